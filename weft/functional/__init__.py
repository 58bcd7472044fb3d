"""The mathematics of layers: pure functions of arrays, without state and without configs.

Every way of writing a model declares its parameters and calls these. Statistics and softmaxes are
computed in float32, and what comes out has the dtype of what went in.
"""

from weft.functional.linear import dense, dense_general, project

__all__ = [
    # linear
    "dense",
    "dense_general",
    "project",
]
