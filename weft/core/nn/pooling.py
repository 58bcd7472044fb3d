"""Pooling, which needs no scope."""

from collections.abc import Sequence

from jaxtyping import Array, Num

from weft import functional
from weft.core.nn.conv import explicit_padding


def max_pool(
    inputs: Num[Array, "batch *spatial channels"],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
) -> Num[Array, "batch *out_spatial channels"]:
    """The largest value of each window.

    Args:
        inputs: the input.
        window_shape: the window's size along each spatial axis.
        strides: the step between two windows along each axis; 1 by default.
        padding: "SAME", "VALID", or `(left, right)` for each spatial axis.
    """
    pads = explicit_padding(inputs, window_shape, strides, padding)
    return functional.max_pool(inputs, window_shape, strides=strides, padding=pads)


def avg_pool(
    inputs: Num[Array, "batch *spatial channels"],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
) -> Num[Array, "batch *out_spatial channels"]:
    """The mean of each window.

    Args:
        inputs: the input.
        window_shape: the window's size along each spatial axis.
        strides: the step between two windows along each axis; 1 by default.
        padding: "SAME", "VALID", or `(left, right)` for each spatial axis.
        count_include_pad: whether padding counts as zeros, or not at all.
    """
    pads = explicit_padding(inputs, window_shape, strides, padding)
    return functional.avg_pool(
        inputs, window_shape, strides=strides, padding=pads, count_include_pad=count_include_pad
    )
