"""The functions of `weft.functional`, with one compiled program for each call.

`from tests.compiled import cross_entropy` is `weft.functional.cross_entropy` in a `jax.jit`. Called
as they are, as the examples in their docstrings do, they compile each operation by itself, which
takes several times as long.
"""

import functools

import jax
import numpy as np

from weft import functional


def compiled(fn):
    """Returns a function whose calls are one program of the arrays among the arguments."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

        @jax.jit
        def program(arrays):
            arrays = iter(arrays)
            given = [next(arrays) if a else x for x, a in zip(leaves, is_array, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, given)
            return fn(*args, **kwargs)

        return program([x for x, a in zip(leaves, is_array, strict=True) if a])

    return call


def __getattr__(name):
    return compiled(getattr(functional, name))
