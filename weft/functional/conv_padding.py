"""Convolution paddings by the names that Flax uses.

    VALID       none
    SAME        an input of length `n` has `ceil(n / stride)` outputs; half on each side, the odd
                position on the right (on the left with SAME_LOWER)
    CIRCULAR    wraps around
    REFLECT     mirrors the input, without repeating its end
    CAUSAL      zeros before the input, so that outputs see no later position; one axis only

A number, one number per axis, or `(left, right)` per axis also work. Transposed convolutions accept
VALID, SAME and CIRCULAR, and SAME_LOWER (as SAME) with strides of 1. Padding other than zeros is
added to the array itself; the convolution adds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.conv_shape import (
    conv_dilate_window,
    conv_padding_of_length,
    conv_transpose_explicit_padding,
)

Padding = str | int | Sequence[int | Sequence[int]]
Pairs = tuple[tuple[int, int], ...]

PADDINGS = ("VALID", "SAME", "SAME_LOWER", "CIRCULAR", "REFLECT", "CAUSAL")
TRANSPOSE_PADDINGS = ("VALID", "SAME", "SAME_LOWER", "CIRCULAR")


def pad_conv(
    x: Num[Array, "*batch_spatial channels"],
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    input_dilation: Sequence[int] | None = None,
) -> tuple[Num[Array, "*batch_padded channels"], Pairs]:
    """Returns the padded input of a convolution, and the zeros that the convolution must add.

    Args:
        x: the input, with any number of batch axes.
        window, strides, dilation: one number per spatial axis.
        padding: see the module; names are case-insensitive.
        input_dilation: requires VALID or numeric padding.

    Raises:
        ArgumentShapeError: if there is not one number per spatial axis.
        ArgumentValueError: if the padding is unknown or not supported here.

    >>> x, zeros = pad_conv(
    ...     jnp.ones((1, 5, 2)), window=(3,), strides=(1,), padding="CAUSAL", dilation=(2,)
    ... )
    >>> x.shape, zeros
    ((1, 5, 2), ((4, 0),))
    """
    _require_axes(x, window=window, strides=strides, dilation=dilation)
    if not isinstance(padding, str):
        return x, _as_pairs(padding, len(window), PADDINGS)
    name = padding.upper()
    if name != "VALID" and any(step != 1 for step in input_dilation or ()):
        raise ArgumentValueError(
            f"padding={padding!r} with input_dilation={tuple(input_dilation or ())}: give the "
            "padding as numbers, or use a transposed convolution."
        )
    span = conv_dilate_window(window=window, dilation=dilation)
    none = ((0, 0),) * len(window)
    if name == "CAUSAL":
        if len(window) != 1:
            raise ArgumentValueError(
                f"padding='CAUSAL' is for one spatial axis, but the window is {tuple(window)}: "
                "give (left, right) for each axis."
            )
        return x, ((span[0] - 1, 0),)
    if name in ("CIRCULAR", "REFLECT"):
        sides = [((n - 1) // 2, n // 2) for n in span]
        return _padded(x, sides, "wrap" if name == "CIRCULAR" else "reflect"), none
    if name not in PADDINGS:
        raise _unknown(padding, len(window), PADDINGS)
    spatial = x.shape[x.ndim - len(window) - 1 : -1]
    return x, conv_padding_of_length(
        spatial, window=window, strides=strides, padding=name, dilation=dilation
    )


def pad_conv_transpose(
    x: Num[Array, "*batch_spatial channels"],
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    transpose_kernel: bool = False,
) -> tuple[Num[Array, "*batch_padded channels"], Pairs]:
    """Returns the padded input of a transposed convolution, and the zeros to add around it.

    CIRCULAR wraps outputs beyond one end to the other, and keeps `length * stride` outputs, like
    SAME.

    Args:
        x: the input, with any number of batch axes.
        window, strides, dilation: one number per spatial axis.
        padding: see the module; names are case-insensitive.
        transpose_kernel: see `conv_transpose`; with CIRCULAR, moves a window's odd output to the
            other side.

    Raises:
        ArgumentShapeError: if there is not one number per spatial axis.
        ArgumentValueError: if the padding is unknown or not supported here.

    >>> x, zeros = pad_conv_transpose(
    ...     jnp.ones((1, 5, 2)), window=(3,), strides=(2,), padding="CIRCULAR", dilation=(1,)
    ... )
    >>> x.shape, zeros
    ((1, 6, 2), ((0, 1),))
    """
    _require_axes(x, window=window, strides=strides, dilation=dilation)
    if not isinstance(padding, str):
        return x, _as_pairs(padding, len(window), TRANSPOSE_PADDINGS)
    name = padding.upper()
    if name == "SAME_LOWER" and all(stride == 1 for stride in strides):
        name = "SAME"
    if name == "CIRCULAR":
        span = conv_dilate_window(window=window, dilation=dilation)
        sizes = zip(span, strides, strict=True)
        circular = [_circular(n, stride, transpose_kernel) for n, stride in sizes]
        return _padded(x, [sides for sides, _ in circular], "wrap"), tuple(z for _, z in circular)
    if name not in ("VALID", "SAME"):
        raise _unknown(padding, len(window), TRANSPOSE_PADDINGS)
    return x, conv_transpose_explicit_padding(
        window=window, strides=strides, padding=name, dilation=dilation
    )


def _circular(span: int, stride: int, is_flipped: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the input positions to repeat on each side, and the (negative) padding with zeros.

    Without padding, input `i` reaches the outputs from `i * stride` on. Outputs from `first` on are
    kept, which centres the window; the positions repeated on the left reach up to them.
    """
    first = (max(span - stride, 0) + is_flipped) // 2
    left = -(-(span - 1 - first) // stride)
    right = (first + stride - 1) // stride
    zeros = span - 1 - first - left * stride, first - 1 - (right - 1) * stride
    return (left, right), zeros


def _padded(x: Array, sides: Sequence[tuple[int, int]], mode: str) -> Array:
    batch = ((0, 0),) * (x.ndim - len(sides) - 1)
    return jnp.pad(x, (*batch, *sides, (0, 0)), mode=mode)


def _as_pairs(padding: int | Sequence, n: int, names: Sequence[str]) -> Pairs:
    sides = (padding,) * n if isinstance(padding, int) else padding
    try:
        pairs = tuple((s, s) if isinstance(s, int) else (int(s[0]), int(s[1])) for s in sides)
        fits = len(pairs) == n and all(isinstance(s, int) or len(s) == 2 for s in sides)
    except (TypeError, ValueError, IndexError):
        fits, pairs = False, ()
    if not fits:
        raise _unknown(padding, n, names)
    return pairs


def _unknown(padding: object, n: int, names: Sequence[str]) -> ArgumentValueError:
    return ArgumentValueError(
        f"padding={padding!r} is neither one of {', '.join(names)} nor a number nor, for each of "
        f"{n} spatial axes, a number or (left, right)."
    )


def _require_axes(x: Array, **sizes: Sequence[int]) -> None:
    n = len(sizes["window"])
    if x.ndim < n + 1 or any(len(value) != n for value in sizes.values()):
        shown = ", ".join(f"{name}={tuple(value)}" for name, value in sizes.items())
        raise ArgumentShapeError(
            f"Expected one number per spatial axis in each of {shown}, and an input with as many "
            f"axes before its channels; its shape is {x.shape}."
        )
