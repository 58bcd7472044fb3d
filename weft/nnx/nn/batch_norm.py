"""Batch normalization with running averages of the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from weft import functional
from weft.functional.initializers import ones, zeros
from weft.functional.statistics import canonical_axes, cast, statistics_dtype
from weft.nnx.kinds import BatchStat
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.linear import value_of
from weft.nnx.nn.modes import mode_of
from weft.nnx.nn.norm_parameters import along, optional_param, promoted
from weft.nnx.nn.parameters import NO_METADATA, Initializer, Metadata
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["BatchNorm"]


class BatchNorm(Module):
    """Batch normalization (Ioffe and Szegedy, 2015).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None; the running averages are
    `mean` and `var`, `BatchStat`s in float32.

    Args:
        num_features: number of features, along all axes in `axis`.
        use_running_average: whether to normalize with the averages and leave them unchanged, set by
            `model.train()` and `model.eval()`; if None, calls must pass it.
        axis: feature axes, along which each position has its own statistics.
        momentum: decay of the averages per step.
        epsilon: added to the variance.
        dtype: dtype of the output; by default promoted from input, averages and parameters.
        axis_name: mapped or mesh axis over which the batch is sharded. All shards are normalized
            with the statistics of the whole batch, in which each value that the masks include
            counts once.
        axis_index_groups: groups of indices of that axis that share statistics, as in
            `jax.lax.psum`.
        use_fast_variance: whether to compute mean and variance in one reduction.
        promote_dtype: determines the dtype to which input, averages and parameters promote.

    Example:
        >>> from weft import nnx
        >>> layer = BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[1.0], [3.0]])).round(2).tolist(), layer.mean[...].tolist()
        ([[-1.0], [1.0]], [1.0])
        >>> layer.eval()
        >>> layer(jnp.array([[1.0]])).tolist()
        [[0.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int | Sequence[int] = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(type(self).__name__, num_features=num_features)
        self.mean = BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = BatchStat(jnp.ones((num_features,), jnp.float32))
        given = rngs, num_features, param_dtype
        self.scale = optional_param(use_scale, scale_init, *given, scale_metadata)
        self.bias = optional_param(use_bias, bias_init, *given, bias_metadata)
        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self,
        x: Float[Array, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes a batch.

        Args:
            use_running_average: overrides the attribute.
            mask: values included in the statistics; all by default.
        """
        use_average = mode_of(self, "use_running_average", use_running_average)
        features = sorted(canonical_axes(self.axis, x.ndim))
        averages = self.mean.get_value(), self.var.get_value()
        dtype, (_, _, scale, bias) = promoted(
            self, x, *averages, value_of(self.scale), value_of(self.bias)
        )
        mean, var, scale, bias = (
            along(self, values, features, x, self.num_features)
            for values in (*averages, scale, bias)
        )
        if not use_average:
            mean, var = functional.moments(
                x,
                axis=[a for a in range(x.ndim) if a not in features],
                where=mask,
                axis_name=self.axis_name,
                axis_index_groups=self.axis_index_groups,
                fast=self.use_fast_variance,
                dtype=statistics_dtype(x),
            )
            for variable, average, value in zip(
                (self.mean, self.var), averages, (mean, var), strict=True
            ):
                variable.set_value(
                    functional.update_running_average(
                        average, value.reshape(average.shape), decay=self.momentum
                    )
                )
        y = functional.batch_norm(
            cast(x, statistics_dtype(x)), mean, var, scale, bias, eps=self.epsilon, dtype=None
        )
        return cast(y, dtype)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets the mode, see `nnx.view`; None leaves it unchanged."""
        if use_running_average is not None:
            self.use_running_average = use_running_average
