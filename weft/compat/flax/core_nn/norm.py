"""Normalization and dropout as functions of a scope."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.compat.flax.core_nn.linear import Initializer
from weft.core.scope import Scope
from weft.functional.dropout import keep_mask
from weft.functional.statistics import canonical_axes

zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones


def batch_norm(
    scope: Scope,
    x: Float[Array, "*shape"],
    use_running_average: bool = False,
    axis: int | Sequence[int] = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    dtype: jax.typing.DTypeLike = jnp.float32,
    bias: bool = True,
    scale: bool = True,
    bias_init: Initializer = zeros,
    scale_init: Initializer = ones,
    axis_name: str | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    kind: str = "batch_stats",
) -> Float[Array, "*shape"]:
    """Normalizes with the statistics of the batch, and updates their running averages.

    Args:
        scope: has `scale` and `bias`, and `mean` and `var` in the collection `kind`.
        use_running_average: whether to normalize with the averages instead.
        axis: feature axes; each position along them has its own statistics.
        momentum: decay of the averages.
        axis_name: mapped axes to include in the statistics.
        axis_index_groups: see `jax.lax.pmean`.

    >>> from weft.core import apply, init
    >>> x = jnp.array([[1.0], [3.0]])
    >>> y, variables = init(batch_norm)(jax.random.key(0), x)
    >>> y.round(2).tolist()
    [[-1.0], [1.0]]
    >>> y, changed = apply(batch_norm, mutable=["batch_stats"])(variables, x, momentum=0.5)
    >>> changed["batch_stats"]["mean"].tolist()
    [1.0]
    """
    features = sorted(canonical_axes(axis, x.ndim))
    reduced = tuple(a for a in range(x.ndim) if a not in features)
    feature_shape = tuple(x.shape[a] for a in features)
    shape = tuple(
        x.shape[a] if a in features else 1 for a in range(x.ndim)
    )  # broadcasts to x
    is_initializing = not scope.has_variable(kind, "mean")
    running_mean = scope.variable(
        kind, "mean", jnp.zeros, feature_shape, jnp.float32
    )
    running_var = scope.variable(
        kind, "var", jnp.ones, feature_shape, jnp.float32
    )
    if use_running_average:
        mean, var = running_mean.value, running_var.value
    else:
        mean, var = functional.moments(
            x,
            axis=reduced,
            axis_name=None if is_initializing else axis_name,
            axis_index_groups=axis_index_groups,
        )
        mean, var = mean.reshape(feature_shape), var.reshape(feature_shape)
        if not is_initializing:
            for average, value in ((running_mean, mean), (running_var, var)):
                average.value = functional.update_running_average(
                    average.value, value, decay=momentum
                )
    scale_array = bias_array = None
    if scale:
        scale_array = scope.param("scale", scale_init, feature_shape).reshape(
            shape
        )
    if bias:
        bias_array = scope.param("bias", bias_init, feature_shape).reshape(
            shape
        )
    y = functional.batch_norm(
        x.astype(jnp.float32),
        mean.reshape(shape),
        var.reshape(shape),
        scale_array,
        bias_array,
        eps=epsilon,
    )
    return y.astype(dtype)


def layer_norm(
    scope: Scope,
    x: Float[Array, "*shape"],
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.float32,
    bias: bool = True,
    scale: bool = True,
    bias_init: Initializer = zeros,
    scale_init: Initializer = ones,
) -> Float[Array, "*shape"]:
    """Normalizes the last axis.

    Args:
        scope: has `scale` and `bias`, of the size of the last axis.
        dtype: output dtype, unless that of `x` is wider.

    >>> from weft.core import init
    >>> init(layer_norm)(jax.random.key(0), jnp.array([1.0, 3.0]))[0].round(2).tolist()
    [-1.0, 1.0]
    """
    shape = x.shape[-1:]
    y = functional.layer_norm(
        x.astype(jnp.float32),
        scope.param("scale", scale_init, shape) if scale else None,
        scope.param("bias", bias_init, shape) if bias else None,
        eps=epsilon,
    )
    return y.astype(jnp.promote_types(x.dtype, dtype))


def group_norm(
    scope: Scope,
    x: Float[Array, "batch *spatial channels"],
    num_groups: int | None = 32,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.float32,
    bias: bool = True,
    scale: bool = True,
    bias_init: Initializer = zeros,
    scale_init: Initializer = ones,
) -> Float[Array, "batch *spatial channels"]:
    """Normalizes groups of channels in each example.

    Args:
        scope: has `scale` and `bias`, of shape `(1, ..., channels)`.
        num_groups: number of groups; must be None if `group_size` is given.

    Raises:
        ArgumentShapeError: if the channels are not divisible into equal groups.
        ArgumentValueError: unless one of `num_groups` and `group_size` is given, and positive.

    >>> from weft.core import init
    >>> x = jnp.array([[1.0, 3.0, 5.0, 9.0]])
    >>> init(group_norm)(jax.random.key(0), x, num_groups=2)[0].round(2).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """
    channels = x.shape[-1]
    num_groups = functional.number_of_groups(channels, num_groups, group_size)
    shape = (*[1] * (x.ndim - 1), channels)
    y = functional.group_norm(
        x.astype(jnp.float32),
        scope.param("scale", scale_init, shape) if scale else None,
        scope.param("bias", bias_init, shape) if bias else None,
        num_groups=num_groups,
        eps=epsilon,
    )
    return y.astype(dtype)


def dropout(
    scope: Scope,
    inputs: Float[Array, "*shape"],
    rate: float,
    deterministic: bool = False,
    rng: Array | None = None,
) -> Float[Array, "*shape"]:
    """Applies dropout with probability `rate`, scaling the other elements up.

    The key is `rng` or one of the scope's stream `dropout`; `deterministic` returns the input.

    Raises:
        ArgumentValueError: if the rate is not in `[0, 1]`.
        InvalidRngError: if there is no key.

    >>> from weft.core import apply
    >>> y = apply(dropout)({}, jnp.ones(100), 0.5, rngs={"dropout": jax.random.key(0)})
    >>> sorted(set(y.tolist()))
    [0.0, 2.0]
    """
    if rate == 0.0 or deterministic:
        return inputs
    if rate == 1.0:
        return jnp.zeros_like(inputs)
    key = scope.make_rng("dropout") if rng is None else rng
    return functional.dropout(
        inputs, rate=rate, mask=keep_mask(key, rate, inputs.shape)
    )
