"""Convolutions, their transposes, and their window arithmetic in one namespace."""

from weft.functional import (
    NAMED_PADDINGS as SUPPORT_CONV_PADDING,
)
from weft.functional import (
    compute_conv_paddings,
    compute_conv_transpose_paddings,
    conv_dilate_window,
    conv_explicit_padding,
    conv_output_shape,
    conv_transpose_explicit_padding,
    conv_transpose_output_shape,
)
from weft.hierarchy.conv_layers import BaseConv, Conv1D, Conv2D, Conv3D, ConvPaddingType
from weft.hierarchy.conv_time import Conv1DWithPadding, Conv2DWith1DPadding, StackOverTime
from weft.hierarchy.conv_transpose_layers import (
    BaseConvTranspose,
    Conv1DTranspose,
    Conv2DTranspose,
    Conv2DTransposeWith1DPadding,
    Conv3DTranspose,
)

__all__ = [
    # Convolutions.
    "BaseConv",
    "Conv1D",
    "Conv2D",
    "Conv3D",
    # Transposed convolutions.
    "BaseConvTranspose",
    "Conv1DTranspose",
    "Conv2DTranspose",
    "Conv3DTranspose",
    # Convolutions of padded sequences.
    "Conv1DWithPadding",
    "Conv2DTransposeWith1DPadding",
    "Conv2DWith1DPadding",
    "StackOverTime",
    # Windows, paddings, shapes.
    "SUPPORT_CONV_PADDING",
    "ConvPaddingType",
    "compute_conv_paddings",
    "compute_conv_transpose_paddings",
    "conv_dilate_window",
    "conv_explicit_padding",
    "conv_output_shape",
    "conv_transpose_explicit_padding",
    "conv_transpose_output_shape",
]
