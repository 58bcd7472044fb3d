"""Pooling of inputs with any number of batch axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Num

from weft import functional
from weft.errors import ArgumentShapeError
from weft.functional import arrays
from weft.functional.conv_shape import ConvPadding, Sizes, lax_conv_padding


def max_pool(
    inputs: Num[Array, "*batch_spatial channels"],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: ConvPadding = "VALID",
) -> Num[Array, "*batch_out_spatial channels"]:
    """Returns the largest value of each window.

    Args:
        strides: step between windows along each axis; 1 by default.
        padding: a name of `lax_conv_padding`, or `(left, right)` per spatial axis.

    Raises:
        ArgumentShapeError: if the sizes are for different axes, or the input has fewer.
        ArgumentValueError: if the padding is unknown.

    >>> max_pool(jnp.arange(4.0).reshape(1, 4, 1), (2,), strides=(2,)).ravel().tolist()
    [1.0, 3.0]
    """
    return _pool_batched(
        functional.max_pool, inputs, window_shape, strides, padding
    )


def min_pool(
    inputs: Num[Array, "*batch_spatial channels"],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: ConvPadding = "VALID",
) -> Num[Array, "*batch_out_spatial channels"]:
    """Returns the smallest value of each window. Arguments and errors as in `max_pool`.

    >>> min_pool(jnp.arange(4.0).reshape(1, 4, 1), (2,), strides=(2,)).ravel().tolist()
    [0.0, 2.0]
    """
    return _pool_batched(
        functional.min_pool, inputs, window_shape, strides, padding
    )


def pool(
    inputs: Num[Array, "*batch_spatial channels"],
    init: float | Num[Array, ""],
    reduce_fn: Callable[[Array, Array], Array],
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: ConvPadding,
) -> Num[Array, "*batch_out_spatial channels"]:
    """Reduces each window by an associative function, such as `jax.lax.add`.

    `init` is its identity, and the value of padding. Other arguments and errors as in `max_pool`.

    >>> pool(jnp.full((1, 4, 1), 3.0), 1.0, jax.lax.mul, (2,), (2,), "VALID").ravel().tolist()
    [9.0, 9.0]
    """
    pool_windows = functools.partial(
        functional.pool, initial=init, reduce=reduce_fn
    )
    return _pool_batched(pool_windows, inputs, window_shape, strides, padding)


def avg_pool(
    inputs: Num[Array, "*batch_spatial channels"],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: ConvPadding = "VALID",
    count_include_pad: bool = True,
) -> Num[Array, "*batch_out_spatial channels"]:
    """Returns the mean of each window. Arguments and errors as in `max_pool`.

    `count_include_pad` counts padding as zeros. If False, half-precision inputs return float32.

    >>> x = jnp.arange(4.0).reshape(1, 4, 1)
    >>> avg_pool(x, (2,), strides=(2,)).ravel().tolist()
    [0.5, 2.5]
    """
    if not count_include_pad:
        inputs = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    pool_windows = functools.partial(
        functional.avg_pool, count_include_pad=count_include_pad
    )
    return _pool_batched(pool_windows, inputs, window_shape, strides, padding)


def _pool_batched(
    pool: Callable[..., Array],
    x: Array,
    window: Sizes,
    strides: Sizes | None,
    padding: ConvPadding,
) -> Array:
    """Pools with any number of batch axes; strides are 1 by default."""
    num_batch_axes = x.ndim - len(window) - 1
    if num_batch_axes < 0:
        raise ArgumentShapeError(
            f"window_shape={window} is for {len(window)} spatial axes, but the input has "
            f"shape {x.shape}: before its channels there are {x.ndim - 1}."
        )
    if strides is None:
        strides = (1,) * len(window)
    spatial_shape = x.shape[num_batch_axes:-1]
    pads = lax_conv_padding(
        spatial_shape, window=window, strides=strides, padding=padding
    )
    pool = functools.partial(
        pool, window=window, strides=tuple(strides), padding=pads
    )
    return arrays.over_batch_axes(pool, x, item_ndim=len(window) + 1)
