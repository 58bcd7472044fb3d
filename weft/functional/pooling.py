"""Pooling: maximum, minimum, average or another reduction of each window.

Arrays are channels-last, `(batch, *spatial, channels)`; padding names are those of `conv_shape.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError
from weft.functional.conv_shape import ConvPadding, conv_explicit_padding


def pool(
    x: Num[Array, "batch *spatial channels"],
    initial: float | Num[Array, ""],
    reduce: Callable[[Array, Array], Array],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: ConvPadding = "VALID",
) -> Num[Array, "batch *out_spatial channels"]:
    """Reduces the numbers of each window by a function of two numbers.

    Args:
        initial: the identity of `reduce`, such as 0 for `jax.lax.add`; the value of padding.
        reduce: associative, such as `jax.lax.add`.
        strides: step between windows along each axis; 1 by default.
        padding: a name, or `(left, right)` per spatial axis.

    Raises ArgumentShapeError if `window` does not have one size per spatial axis.

    >>> pool(jnp.array([[[2.0], [3.0], [4.0]]]), 1.0, lax.mul, (2,)).ravel().tolist()
    [6.0, 12.0]
    """
    if len(window) != x.ndim - 2:
        raise ArgumentShapeError(
            f"window={tuple(window)} must have one size for each of the {x.ndim - 2} spatial "
            f"axes of x, whose shape is {x.shape}: (batch, *spatial, channels)."
        )
    strides = (1,) * len(window) if strides is None else tuple(strides)
    pads = conv_explicit_padding(window=window, strides=strides, padding=padding)
    return lax.reduce_window(
        x,
        np.asarray(initial, x.dtype)[()],
        reduce,
        window_dimensions=(1, *window, 1),
        window_strides=(1, *strides, 1),
        padding=((0, 0), *pads, (0, 0)),
    )


def max_pool(
    x: Num[Array, "batch *spatial channels"],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: ConvPadding = "VALID",
) -> Num[Array, "batch *out_spatial channels"]:
    """Returns the largest value of each window, ignoring padding; arguments as in `pool`.

    >>> max_pool(jnp.arange(4.0).reshape(1, 4, 1), (2,), strides=(2,)).ravel().tolist()
    [1.0, 3.0]
    """
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return pool(x, lowest, lax.max, window, strides=strides, padding=padding)


def min_pool(
    x: Num[Array, "batch *spatial channels"],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: ConvPadding = "VALID",
) -> Num[Array, "batch *out_spatial channels"]:
    """Returns the smallest value of each window. Arguments as in `max_pool`."""
    return -max_pool(-x, window, strides=strides, padding=padding)


def avg_pool(
    x: Num[Array, "batch *spatial channels"],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: ConvPadding = "VALID",
    count_include_pad: bool = True,
) -> Num[Array, "batch *out_spatial channels"]:
    """Returns the mean of each window. Arguments and errors as in `pool`.

    `count_include_pad` counts padding as zeros; otherwise it is ignored.

    >>> x = jnp.ones((1, 3, 1))
    >>> avg_pool(x, (3,), padding="SAME", count_include_pad=False).ravel().tolist()
    [1.0, 1.0, 1.0]
    """
    total = pool(x, 0, lax.add, window, strides=strides, padding=padding)
    if count_include_pad:
        return total / math.prod(window)
    ones = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
    return total / pool(ones, 0, lax.add, window, strides=strides, padding=padding)
