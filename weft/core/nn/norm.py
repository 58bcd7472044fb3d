"""Norms of a scope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from weft import functional
from weft.core.nn.linear import Initializer
from weft.core.scope import Scope

zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones


def batch_norm(
    scope: Scope,
    x: Float[Array, "*shape"],
    use_running_average: bool = False,
    axis: int | Sequence[int] = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    dtype: DTypeLike = jnp.float32,
    bias: bool = True,
    scale: bool = True,
    bias_init: Initializer = zeros,
    scale_init: Initializer = ones,
    axis_name: str | None = None,
    axis_index_groups: Any = None,
    kind: str = "batch_stats",
) -> Float[Array, "*shape"]:
    """Normalises with the statistics of the batch, and keeps a running average of them.

    Args:
        scope: has `scale` and `bias`, and `mean` and `var` in the collection `kind`.
        x: the input.
        use_running_average: whether to normalise with the average instead.
        axis: the axes along which each position has statistics of its own.
        momentum: what is kept of the average in each step.
        epsilon: added to the variance.
        dtype: of the result.
        bias: whether to add a bias.
        scale: whether to multiply with a scale.
        bias_init: makes the bias.
        scale_init: makes the scale.
        axis_name: mapped axes over which the statistics are combined as well.
        axis_index_groups: of that axis, as in `jax.lax.pmean`.
        kind: the collection of the statistics.

    Example:
        >>> from weft.core import apply, init
        >>> x = jnp.array([[1.0], [3.0]])
        >>> y, variables = init(batch_norm)(jax.random.key(0), x)
        >>> y.round(2).tolist()
        [[-1.0], [1.0]]
        >>> y, changed = apply(batch_norm, mutable=["batch_stats"])(variables, x, momentum=0.5)
        >>> changed["batch_stats"]["mean"].tolist()
        [1.0]
    """
    features = sorted(a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    reduced = tuple(a for a in range(x.ndim) if a not in features)
    shape = tuple(x.shape[a] if a in features else 1 for a in range(x.ndim))
    squeezed = tuple(x.shape[a] for a in features)
    initializing = not scope.has_variable(kind, "mean")
    mean_of = scope.variable(kind, "mean", jnp.zeros, squeezed, jnp.float32)
    var_of = scope.variable(kind, "var", jnp.ones, squeezed, jnp.float32)
    if use_running_average:
        mean, var = mean_of.value, var_of.value
    else:
        mean, var = functional.moments(
            x,
            axis=reduced,
            axis_name=None if initializing else axis_name,
            axis_index_groups=axis_index_groups,
        )
        mean, var = mean.reshape(squeezed), var.reshape(squeezed)
        if not initializing:
            for average, value in ((mean_of, mean), (var_of, var)):
                average.value = functional.update_running_average(
                    average.value, value, decay=momentum
                )
    y = functional.batch_norm(
        x.astype(jnp.float32),
        mean.reshape(shape),
        var.reshape(shape),
        scope.param("scale", scale_init, squeezed).reshape(shape) if scale else None,
        scope.param("bias", bias_init, squeezed).reshape(shape) if bias else None,
        eps=epsilon,
    )
    return y.astype(dtype)


def layer_norm(
    scope: Scope,
    x: Float[Array, "*shape"],
    epsilon: float = 1e-6,
    dtype: DTypeLike = jnp.float32,
    bias: bool = True,
    scale: bool = True,
    bias_init: Initializer = zeros,
    scale_init: Initializer = ones,
) -> Float[Array, "*shape"]:
    """Normalises the last axis.

    Args:
        scope: has `scale` and `bias`, of the size of the last axis.
        x: the input.
        epsilon: added to the variance.
        dtype: of the result, if that of `x` is no wider.
        bias: whether to add a bias.
        scale: whether to multiply with a scale.
        bias_init: makes the bias.
        scale_init: makes the scale.

    Example:
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
    dtype: DTypeLike = jnp.float32,
    bias: bool = True,
    scale: bool = True,
    bias_init: Initializer = zeros,
    scale_init: Initializer = ones,
) -> Float[Array, "batch *spatial channels"]:
    """Normalises groups of channels, each example by itself.

    Args:
        scope: has `scale` and `bias`, of shape `(1, ..., channels)`.
        x: the input.
        num_groups: how many groups there are; None if `group_size` is given.
        group_size: how many channels a group has; None if `num_groups` is given.
        epsilon: added to the variance.
        dtype: of the result.
        bias: whether to add a bias.
        scale: whether to multiply with a scale.
        bias_init: makes the bias.
        scale_init: makes the scale.

    Raises:
        ArgumentShapeError: if the channels cannot be cut into equal groups.
        ArgumentValueError: if not exactly one of `num_groups` and `group_size` is given, or it is
            not positive.

    Example:
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
