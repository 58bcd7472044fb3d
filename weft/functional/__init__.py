"""The mathematics of layers: pure functions of arrays, without state and without configs.

Every way of writing a model declares its parameters and calls these. Statistics and softmaxes are
computed in float32, and what comes out has the dtype of what went in.
"""

from weft.functional.conv import conv, conv_transpose
from weft.functional.conv_shape import (
    NAMED_PADDINGS,
    ConvPadding,
    compute_conv_paddings,
    compute_conv_transpose_paddings,
    conv_dilate_window,
    conv_explicit_padding,
    conv_output_shape,
    conv_transpose_explicit_padding,
    conv_transpose_output_shape,
)
from weft.functional.linear import dense, dense_general, project
from weft.functional.pooling import avg_pool, max_pool, min_pool

__all__ = [
    # linear
    "dense",
    "dense_general",
    "project",
    # convolution
    "conv",
    "conv_transpose",
    "ConvPadding",
    "NAMED_PADDINGS",
    "conv_dilate_window",
    "conv_explicit_padding",
    "conv_output_shape",
    "conv_transpose_explicit_padding",
    "conv_transpose_output_shape",
    "compute_conv_paddings",
    "compute_conv_transpose_paddings",
    # pooling
    "max_pool",
    "min_pool",
    "avg_pool",
]
