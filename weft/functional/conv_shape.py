"""Convolution window arithmetic: span, padding, output shape and output padding.

Along each spatial axis, output `o` of a convolution sees the padded positions

    o * stride, o * stride + dilation, …, o * stride + dilation * (window - 1)

which span `conv_dilate_window` positions. The named paddings of `conv_explicit_padding` do not
depend on the input's length, so that a stream convolved in pieces has the outputs of the whole.
The SAME of `jax.lax` does depend on the length: see `lax_conv_padding`. So does that of `pad_conv`
and `pad_conv_transpose`, which take the names that Flax uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.arrays import as_tuple, gathered

NAMED_PADDINGS = ("SAME", "VALID", "CAUSAL")
"""Names of paddings that `ConvPadding` allows."""
LAX_PADDINGS = ("SAME", "VALID", "SAME_LOWER")
Sizes = Sequence[int]
"""One number per spatial axis."""
ConvPadding = str | Sequence[Sequence[int]]
"""One of `NAMED_PADDINGS` (see `conv_explicit_padding`), or `(left, right)` per spatial axis."""
Padding = str | int | Sequence[int | Sequence[int]]
"""A name, or for all or each of the spatial axes an integer or `(left, right)`."""
Pairs = tuple[tuple[int, int], ...]


def per_axis(sizes: int | Sequence[int] | None, n: int) -> tuple[int, ...]:
    """Returns one number for each of `n` spatial axes: those given, the one given, or 1.

    >>> per_axis(2, 3), per_axis(None, 2)
    ((2, 2, 2), (1, 1))
    """
    if sizes is None:
        return (1,) * n
    sizes_of_axes = as_tuple(sizes)
    if np.ndim(sizes) == 0:
        return sizes_of_axes * n
    return sizes_of_axes


def conv_dilate_window(
    *, window: Sizes, dilation: Sizes | None
) -> tuple[int, ...]:
    """Returns the number of positions that the window spans along each axis.

    >>> conv_dilate_window(window=(3, 5), dilation=(2, 1))
    (5, 5)
    """
    if dilation is None:
        dilation = (1,) * len(window)
    _require_same_rank(window=window, dilation=dilation)
    return tuple((w - 1) * d + 1 for w, d in zip(window, dilation, strict=True))


def conv_explicit_padding(
    *,
    window: Sizes,
    strides: Sizes,
    padding: ConvPadding,
    dilation: Sizes | None = None,
) -> Pairs:
    """Returns the `(left, right)` padding of each spatial axis.

    Pairs given as `padding` are returned unchanged. Its names do not depend on the input's length;
    a window of `span` positions gets

        VALID   none
        SAME    span - 1 in total, half on each side, the odd position on the right
        CAUSAL  span - 1 in total, span - stride on the left: an output sees no position after its
                stride. Applies to the first spatial axis, time; the others use SAME.

    Raises:
        ArgumentShapeError: if the arguments have different numbers of axes.
        ArgumentValueError: if the padding is neither a known name nor pairs of sizes.

    >>> conv_explicit_padding(window=(5,), strides=(2,), padding="SAME")
    ((2, 2),)
    >>> conv_explicit_padding(window=(5,), strides=(2,), padding="CAUSAL")
    ((3, 1),)
    """
    _require_same_rank(window=window, strides=strides)
    if not isinstance(padding, str):
        return _as_pairs(padding, len(window), NAMED_PADDINGS)
    span = conv_dilate_window(window=window, dilation=dilation)
    if padding == "VALID":
        return ((0, 0),) * len(window)
    same = _half_on_each_side(span)
    if padding == "SAME":
        return same
    if padding == "CAUSAL":
        total = span[0] - 1
        left_pad = max(span[0] - strides[0], 0)
        return ((left_pad, total - left_pad), *same[1:])
    raise _unknown_padding(padding, len(window), NAMED_PADDINGS)


def lax_conv_padding(
    in_shape: Sizes,
    *,
    window: Sizes,
    strides: Sizes,
    padding: ConvPadding,
    dilation: Sizes | None = None,
) -> Pairs:
    """Returns the `(left, right)` padding of each spatial axis, by the names of `jax.lax`.

    Args:
        window, strides, dilation: as in `conv_explicit_padding`.
        padding: pairs, or a case-insensitive name: VALID, SAME (`ceil(n / stride)` outputs for an
            input of length `n`, the odd position on the right) or SAME_LOWER (on the left).

    Raises:
        ArgumentShapeError: if the arguments have different numbers of axes.
        ArgumentValueError: if the padding is neither a known name nor pairs of sizes.

    >>> lax_conv_padding((6,), window=(3,), strides=(2,), padding="SAME")
    ((0, 1),)
    """
    _require_same_rank(in_shape=in_shape, window=window, strides=strides)
    if not isinstance(padding, str):
        return _as_pairs(padding, len(window), LAX_PADDINGS)
    name = padding.upper()
    if name not in LAX_PADDINGS:
        raise _unknown_padding(padding, len(window), LAX_PADDINGS)
    if name == "VALID":
        return ((0, 0),) * len(window)

    # `lax.padtype_to_pads` takes four times as long.
    span = conv_dilate_window(window=window, dilation=dilation)
    pads = []
    for size, n, stride in zip(in_shape, span, strides, strict=True):
        num_outputs = -(-size // stride)
        total = max((num_outputs - 1) * stride + n - size, 0)
        less, more = total // 2, -(-total // 2)
        pads.append((less, more) if name == "SAME" else (more, less))
    return tuple(pads)


def conv_output_shape(
    in_shape: Sequence[int | None],
    *,
    window: Sizes,
    strides: Sizes,
    padding: ConvPadding,
    dilation: Sizes | None = None,
) -> tuple[int | None, ...]:
    """Returns the spatial shape of a convolution's output; unknown sizes (None) stay None.

    >>> conv_output_shape((10, None), window=(3, 3), strides=(2, 1), padding="VALID")
    (4, None)
    """
    _require_same_rank(in_shape=in_shape, window=window)
    pads = conv_explicit_padding(
        window=window, strides=strides, padding=padding, dilation=dilation
    )
    span = conv_dilate_window(window=window, dilation=dilation)
    out_shape = []
    for size, pad, n, stride in zip(in_shape, pads, span, strides, strict=True):
        if size is not None:
            size = max((size + sum(pad) - n) // stride + 1, 0)
        out_shape.append(size)
    return tuple(out_shape)


def conv_transpose_explicit_padding(
    *,
    window: Sizes,
    strides: Sizes,
    padding: ConvPadding,
    dilation: Sizes | None = None,
) -> Pairs:
    """Returns the padding of a transposed convolution, around the dilated input.

    VALID keeps every output that an input reaches. SAME and CAUSAL keep `stride` outputs per input:
    SAME the middle ones (like `jax.lax.conv_transpose`), CAUSAL the first ones.

    >>> conv_transpose_explicit_padding(window=(3,), strides=(2,), padding="SAME")
    ((2, 1),)
    """
    _require_same_rank(window=window, strides=strides)
    if not isinstance(padding, str):
        return _as_pairs(padding, len(window), NAMED_PADDINGS)
    if padding not in NAMED_PADDINGS:
        raise _unknown_padding(padding, len(window), NAMED_PADDINGS)
    span = conv_dilate_window(window=window, dilation=dilation)

    pads = []
    for axis, (n, stride) in enumerate(zip(span, strides, strict=True)):
        total = n + stride - 2  # for `stride` outputs per input
        if padding == "VALID":
            left_pad = n - 1
            total += max(n - stride, 0)
        elif (padding == "CAUSAL" and axis == 0) or stride > n - 1:
            left_pad = n - 1
        else:
            left_pad = -(-total // 2)
        pads.append((left_pad, total - left_pad))
    return tuple(pads)


def conv_transpose_output_shape(
    in_shape: Sequence[int | None],
    *,
    window: Sizes,
    strides: Sizes,
    padding: ConvPadding,
    dilation: Sizes | None = None,
) -> tuple[int | None, ...]:
    """Returns the spatial shape of a transposed convolution's output; None stays None.

    >>> conv_transpose_output_shape((5, None), window=(3, 3), strides=(2, 1), padding="VALID")
    (11, None)
    """
    _require_same_rank(in_shape=in_shape, window=window)
    pads = conv_transpose_explicit_padding(
        window=window, strides=strides, padding=padding, dilation=dilation
    )
    # That of a convolution of the input with `stride - 1` zeros between its positions.
    dilated_shape = []
    for size, stride in zip(in_shape, strides, strict=True):
        if size is not None:
            size = (size - 1) * stride + 1
        dilated_shape.append(size)
    return conv_output_shape(
        dilated_shape,
        window=window,
        strides=(1,) * len(window),
        padding=pads,
        dilation=dilation,
    )


def compute_conv_paddings(
    in_paddings: Num[Array, "batch time"],
    *,
    window: int,
    stride: int,
    conv_padding: ConvPadding,
    dilation: int | None = None,
    anchor: int | None = None,
) -> Num[Array, "batch out_time"]:
    """Returns the outputs of a convolution over time that are padding.

    An output is padding if the input under its anchor, one position of its window, is padding.

    Args:
        in_paddings: 1 where the input is padding, else 0.
        anchor: position in the dilated window. Defaults to the number of positions padded on the
            left, so that the first output's anchor is the first input.

    Raises ArgumentValueError if the anchor is outside the window, or left of the default.

    >>> in_paddings = jnp.array([[0, 0, 0, 1, 1, 1]])
    >>> compute_conv_paddings(in_paddings, window=3, stride=2, conv_padding="SAME").tolist()
    [[0, 0, 1]]
    """
    if dilation is None:
        dilation = 1
    sizes = {"window": (window,), "strides": (stride,), "dilation": (dilation,)}
    pads = conv_explicit_padding(padding=conv_padding, **sizes)
    (length,) = conv_output_shape(in_paddings.shape[1:], padding=pads, **sizes)
    ((left_pad, _),) = pads
    offset = _anchor_offset(
        anchor, left_pad=left_pad, window=window, dilation=dilation
    )
    anchored_inputs = jnp.arange(length) * stride + offset
    return _take_paddings(in_paddings, anchored_inputs)


def compute_conv_transpose_paddings(
    in_paddings: Num[Array, "batch time"],
    *,
    window: int,
    stride: int,
    conv_padding: ConvPadding,
    dilation: int = 1,
    anchor: int | None = None,
) -> Num[Array, "batch out_time"]:
    """Returns the outputs of a transposed convolution over time that are padding.

    Like `compute_conv_paddings`. An anchor between two inputs counts as under the earlier one, so
    that each input decides for `stride` outputs.

    Raises ArgumentValueError if the anchor is outside the window, or left of the default.

    >>> x = jnp.array([[0, 0, 1]])
    >>> compute_conv_transpose_paddings(x, window=3, stride=2, conv_padding="SAME").tolist()
    [[0, 0, 0, 0, 1, 1]]
    """
    sizes = {"window": (window,), "strides": (stride,), "dilation": (dilation,)}
    pads = conv_transpose_explicit_padding(padding=conv_padding, **sizes)
    (length,) = conv_transpose_output_shape(
        in_paddings.shape[1:], padding=pads, **sizes
    )
    ((left_pad, _),) = pads
    offset = _anchor_offset(
        anchor, left_pad=left_pad, window=window, dilation=dilation
    )
    anchored_inputs = (jnp.arange(length) + offset) // stride
    return _take_paddings(in_paddings, anchored_inputs)


def _anchor_offset(
    anchor: int | None, *, left_pad: int, window: int, dilation: int
) -> int:
    """Returns the first output's anchor, counted from the first input."""
    if anchor is None:
        return 0
    (span,) = conv_dilate_window(window=(window,), dilation=(dilation,))
    if not left_pad <= anchor < span:
        raise ArgumentValueError(
            f"anchor={anchor} must be in the range [{left_pad}, {span}): at least the {left_pad} "
            f"position(s) padded on the left, and inside the window's {span}."
        )
    return anchor - left_pad


def _take_paddings(paddings: Array, index: Array) -> Array:
    """Returns the paddings at the positions; those outside are padding."""
    is_padding = True if paddings.dtype == bool else 1
    paddings = gathered(paddings, 1)
    return jnp.take(paddings, index, axis=1, mode="fill", fill_value=is_padding)


def _half_on_each_side(span: Sizes) -> Pairs:
    """Returns a padding of `span - 1` positions in total, the odd one on the right."""
    return tuple(((n - 1) // 2, n // 2) for n in span)


def _require_same_rank(**sizes: Sequence[int | None]) -> None:
    ranks = set(map(len, sizes.values()))
    if len(ranks) > 1:
        raise ArgumentShapeError(
            f"Expected one number per spatial axis in each of {_as_arguments(sizes)}."
        )


def _as_arguments(sizes: Mapping[str, Sequence[int | None]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


PADDINGS = ("VALID", "SAME", "SAME_LOWER", "CIRCULAR", "REFLECT", "CAUSAL")
TRANSPOSE_PADDINGS = ("VALID", "SAME", "SAME_LOWER", "CIRCULAR")


def pad_conv(
    x: Num[Array, "*batch_spatial channels"],
    *,
    window: Sizes,
    strides: Sizes,
    padding: Padding,
    dilation: Sizes,
    input_dilation: Sizes | None = None,
) -> tuple[Num[Array, "*batch_padded channels"], Pairs]:
    """Returns the padded input of a convolution, and the zeros that the convolution must add.

    Padding other than zeros is added to the array itself. The names, in any case, are:

        VALID       none
        SAME        an input of length `n` has `ceil(n / stride)` outputs; half on each side, the
                    odd position on the right (on the left with SAME_LOWER)
        CIRCULAR    wraps around
        REFLECT     mirrors the input, without repeating its end
        CAUSAL      zeros before the input, so that outputs see no later position; one axis only

    Args:
        window, strides, dilation: one number per spatial axis.
        padding: a name, a number, one number per axis, or `(left, right)` per axis.
        input_dilation: requires VALID or numeric padding.

    Raises:
        ArgumentShapeError: if there is not one number per spatial axis.
        ArgumentValueError: if the padding is unknown or not supported here.

    >>> x, zeros = pad_conv(
    ...     jnp.ones((1, 5, 2)), window=(3,), strides=(1,), padding="CAUSAL", dilation=(2,))
    >>> x.shape, zeros
    ((1, 5, 2), ((4, 0),))
    """
    _require_axes(x, window=window, strides=strides, dilation=dilation)
    if not isinstance(padding, str):
        return x, _as_pairs(padding, len(window), PADDINGS, numbers=True)
    name = padding.upper()
    input_dilation = tuple(input_dilation or ())
    if name != "VALID" and any(step != 1 for step in input_dilation):
        raise ArgumentValueError(
            f"padding={padding!r} with input_dilation={input_dilation}: give the "
            "padding as numbers, or use a transposed convolution."
        )
    span = conv_dilate_window(window=window, dilation=dilation)
    if name == "CAUSAL":
        if len(window) != 1:
            raise ArgumentValueError(
                f"padding='CAUSAL' is for one spatial axis, but the window is {tuple(window)}: "
                "give (left, right) for each axis."
            )
        return x, ((span[0] - 1, 0),)
    if name in ("CIRCULAR", "REFLECT"):
        mode = "wrap" if name == "CIRCULAR" else "reflect"
        no_zeros = ((0, 0),) * len(window)
        return _pad_spatial(x, _half_on_each_side(span), mode), no_zeros
    if name not in PADDINGS:
        raise _unknown_padding(padding, len(window), PADDINGS, numbers=True)
    spatial_shape = x.shape[x.ndim - len(window) - 1 : -1]
    zeros = lax_conv_padding(
        spatial_shape,
        window=window,
        strides=strides,
        padding=name,
        dilation=dilation,
    )
    return x, zeros


def pad_conv_transpose(
    x: Num[Array, "*batch_spatial channels"],
    *,
    window: Sizes,
    strides: Sizes,
    padding: Padding,
    dilation: Sizes,
    transpose_kernel: bool = False,
) -> tuple[Num[Array, "*batch_padded channels"], Pairs]:
    """Returns the padded input of a transposed convolution, and the zeros to add around it.

    CIRCULAR wraps outputs past one end to the other, and keeps `length * stride`, as SAME does.

    Args:
        padding: VALID, SAME, CIRCULAR, or, with strides of 1, SAME_LOWER, which is SAME; or
            numbers, as for `pad_conv`.
        transpose_kernel: see `conv_transpose`; with CIRCULAR, moves odd outputs to the other side.

    For the other arguments and errors see `pad_conv`.

    >>> x, zeros = pad_conv_transpose(
    ...     jnp.ones((1, 5, 2)), window=(3,), strides=(2,), padding="CIRCULAR", dilation=(1,))
    >>> x.shape, zeros
    ((1, 6, 2), ((0, 1),))
    """
    _require_axes(x, window=window, strides=strides, dilation=dilation)
    if not isinstance(padding, str):
        return x, _as_pairs(
            padding, len(window), TRANSPOSE_PADDINGS, numbers=True
        )
    name = padding.upper()
    if name == "SAME_LOWER" and all(stride == 1 for stride in strides):
        name = "SAME"
    if name == "CIRCULAR":
        span = conv_dilate_window(window=window, dilation=dilation)
        repeated, zeros = [], []
        for n, stride in zip(span, strides, strict=True):
            repeated_sides, zero_sides = _circular_padding(
                n, stride, transpose_kernel
            )
            repeated.append(repeated_sides)
            zeros.append(zero_sides)
        return _pad_spatial(x, repeated, "wrap"), tuple(zeros)
    if name not in ("VALID", "SAME"):
        raise _unknown_padding(
            padding, len(window), TRANSPOSE_PADDINGS, numbers=True
        )
    zeros = conv_transpose_explicit_padding(
        window=window, strides=strides, padding=name, dilation=dilation
    )
    return x, zeros


def _circular_padding(
    span: int, stride: int, is_flipped: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the input positions to repeat on each side, and the (negative) padding with zeros.

    Without padding, input `i` reaches the outputs from `i * stride` on. Outputs from `first` on are
    kept, which centers the window; the positions repeated on the left reach up to them.
    """
    first = (max(span - stride, 0) + is_flipped) // 2
    left_outputs = span - 1 - first
    num_left = -(-left_outputs // stride)
    num_right = (first + stride - 1) // stride
    left_zeros = left_outputs - num_left * stride
    right_zeros = first - 1 - (num_right - 1) * stride
    return (num_left, num_right), (left_zeros, right_zeros)


def _pad_spatial(
    x: Array, sides: Sequence[tuple[int, int]], mode: str
) -> Array:
    num_batch_axes = x.ndim - len(sides) - 1
    spatial_axes = range(num_batch_axes, x.ndim - 1)
    widths = [(0, 0)] * num_batch_axes + [*sides, (0, 0)]
    return jnp.pad(gathered(x, *spatial_axes), widths, mode=mode)


def canonicalize_padding(
    padding: Padding, rank: int
) -> str | list[tuple[int, int]]:
    """Returns a padding of `rank` spatial axes as a name, or as `(left, right)` for each axis.

    Raises ArgumentValueError if it is neither a name nor numbers for each axis.

    >>> canonicalize_padding((1, (0, 2)), 2)
    [(1, 1), (0, 2)]
    """
    if isinstance(padding, str):
        return padding
    return list(_as_pairs(padding, rank, PADDINGS, numbers=True))


def _as_pairs(
    padding: Padding, n: int, names: Sequence[str], numbers: bool = False
) -> Pairs:
    """Returns `(left, right)` for each axis; `numbers` allows a number for both sides."""
    sides: Any = padding  # what users give, which may be of any type
    if numbers and isinstance(padding, int):
        sides = (padding,) * n
    pairs = []
    try:
        for side in sides:
            if numbers and isinstance(side, int):
                side = (side, side)
            left_pad, right_pad = side
            pairs.append((int(left_pad), int(right_pad)))
    except (TypeError, ValueError) as error:
        raise _unknown_padding(padding, n, names, numbers) from error
    if len(pairs) != n:
        raise _unknown_padding(padding, n, names, numbers)
    return tuple(pairs)


def _unknown_padding(
    padding: object, n: int, names: Sequence[str], numbers: bool = False
) -> ArgumentValueError:
    expected = f"for each of {n} spatial axes, (left, right)"
    if numbers:
        expected = f"a number, nor for each of {n} spatial axes, a number or (left, right)"
    return ArgumentValueError(
        f"padding={padding!r} is neither one of {', '.join(names)} nor {expected}."
    )


def _require_axes(x: Array, **sizes: Sizes) -> None:
    ranks = set(map(len, sizes.values()))
    expected = f"Expected one number per spatial axis in each of {_as_arguments(sizes)}"
    if len(ranks) > 1:
        raise ArgumentShapeError(f"{expected}; they have not as many.")
    if x.ndim < max(ranks) + 1:
        raise ArgumentShapeError(
            f"{expected}, and an input with as many axes before its channels; its shape is "
            f"{x.shape}."
        )
