"""Normalization with statistics of the input.

`reduction_axes` share statistics; `feature_axes` have a scale and a bias for each position.
Statistics are in float32 unless `force_float32_reductions=False`. The output has the dtype `dtype`,
by default promoted from input, scale and bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from weft import functional
from weft.functional.dtypes import canonicalize_dtype
from weft.functional.initializers import ones, zeros
from weft.functional.norm_axes import group_norm_axes, instance_norm_axes
from weft.functional.statistics import Axes, canonical_axes, cast, statistics_dtype
from weft.linen.initializers import Initializer
from weft.linen.methods import compact
from weft.linen.module import Module

__all__ = ["GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(Module):
    """Normalization of each position, `functional.layer_norm` (Ba et al., 2016).

    Attributes:
        dtype: output dtype; by default promoted from input and parameters.
        reduction_axes: axes that share statistics.
        feature_axes: axes of scale and bias.
        axis_name: mapped or mesh axis to include in the statistics.
        axis_index_groups: groups of indices of that axis that share statistics, see `jax.lax.psum`.
        use_fast_variance: whether to compute mean and variance in one reduction.
        force_float32_reductions: whether statistics have at least float32.

    Example:
        >>> import jax
        >>> from weft import linen as nn
        >>> y, variables = nn.LayerNorm().init_with_output(jax.random.key(0), jnp.array([1.0, 3.0]))
        >>> y.round(2).tolist(), jax.tree.map(jnp.shape, variables)
        ([-1.0, 1.0], {'params': {'bias': (2,), 'scale': (2,)}})
    """

    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = zeros
    scale_init: Initializer = ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self, x: Float[Array, "*shape"], *, mask: Bool[Array, "*#shape"] | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes an input.

        Args:
            mask: values that count in the statistics; all by default.
        """
        features = sorted(canonical_axes(self.feature_axes, x.ndim))
        scale, bias = scale_and_bias(self, [x.shape[a] for a in features])
        y = functional.layer_norm(
            cast(x, statistics_dtype(x, self.force_float32_reductions)),
            along(features, scale, x),
            along(features, bias, x),
            axis=self.reduction_axes,
            eps=self.epsilon,
            where=mask,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            fast_variance=self.use_fast_variance,
            dtype=None,
        )
        return cast(y, canonicalize_dtype(x, scale, bias, dtype=self.dtype))


class RMSNorm(Module):
    """Division by the root mean square, `functional.rms_norm` (Zhang and Sennrich, 2019).

    See `LayerNorm` for the attributes; `use_fast_variance` has no effect.

    Example:
        >>> import jax
        >>> from weft import linen as nn
        >>> nn.RMSNorm(use_scale=False).apply({}, jnp.array([-3.0, 3.0])).round(2).tolist()
        [-1.0, 1.0]
    """

    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self, x: Float[Array, "*shape"], *, mask: Bool[Array, "*#shape"] | None = None
    ) -> Float[Array, "*shape"]:
        features = sorted(canonical_axes(self.feature_axes, x.ndim))
        scale = None
        if self.use_scale:
            shape = tuple(x.shape[a] for a in features)
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        y = functional.rms_norm(
            cast(x, statistics_dtype(x, self.force_float32_reductions)),
            along(features, scale, x),
            axis=self.reduction_axes,
            eps=self.epsilon,
            where=mask,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            dtype=None,
        )
        return cast(y, canonicalize_dtype(x, scale, dtype=self.dtype))


class GroupNorm(Module):
    """Normalization of groups of channels in each example (Wu and He, 2018).

    See `LayerNorm` for the other attributes.

    Attributes:
        num_groups: number of groups; must be None if `group_size` is set.
        group_size: number of channels per group.
        reduction_axes: must contain the last axis; by default all but the first.

    Example:
        >>> import jax
        >>> from weft import linen as nn
        >>> layer = nn.GroupNorm(num_groups=2, use_bias=False, use_scale=False)
        >>> layer.apply({}, jnp.array([[1.0, 3.0, 5.0, 9.0]])).round(2).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """

    num_groups: int | None = 32
    group_size: int | None = None
    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = zeros
    scale_init: Initializer = ones
    reduction_axes: Axes | None = None
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self,
        x: Float[Array, "batch *spatial channels"],
        *,
        mask: Bool[Array, "*#batch"] | None = None,
    ) -> Float[Array, "batch *spatial channels"]:
        """Normalizes an input; see `LayerNorm` for the arguments.

        Raises:
            ArgumentShapeError: if the channels are not divisible into equal groups.
            ArgumentValueError: if not exactly one of `num_groups` and `group_size` is given, or
                `reduction_axes` lacks the last axis.
        """
        functional.check_sizes(
            type(self).__name__, num_groups=self.num_groups, group_size=self.group_size
        )
        channels = x.shape[-1]
        num_groups = functional.number_of_groups(channels, self.num_groups, self.group_size)
        axes = group_norm_axes(self.reduction_axes, x.shape)
        scale, bias = scale_and_bias(self, (channels,))
        y = functional.group_norm(
            cast(x, statistics_dtype(x, self.force_float32_reductions)),
            scale,
            bias,
            num_groups=num_groups,
            axis=axes,
            eps=self.epsilon,
            where=None if mask is None else jnp.broadcast_to(mask, x.shape),
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            fast_variance=self.use_fast_variance,
            dtype=None,
        )
        return cast(y, canonicalize_dtype(x, scale, bias, dtype=self.dtype))


class InstanceNorm(Module):
    """Normalization of each channel in each example (Ulyanov et al., 2016).

    See `LayerNorm` for the attributes; all axes but the first and `feature_axes` share statistics.

    Example:
        >>> import jax
        >>> from weft import linen as nn
        >>> layer = nn.InstanceNorm(use_bias=False, use_scale=False)
        >>> layer.apply({}, jnp.array([[[1.0, 5.0], [3.0, 9.0]]])).round(2).tolist()
        [[[-1.0, -1.0], [1.0, 1.0]]]
    """

    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = zeros
    scale_init: Initializer = ones
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self, x: Float[Array, " batch *shape"], *, mask: Bool[Array, "*#batch"] | None = None
    ) -> Float[Array, " batch *shape"]:
        """Normalizes an input; see `LayerNorm` for the arguments.

        Raises:
            ArgumentValueError: if the first axis is in `feature_axes`.
        """
        features, axes = instance_norm_axes(self.feature_axes, x.shape)
        scale, bias = scale_and_bias(self, [x.shape[a] for a in features])
        y = functional.layer_norm(
            cast(x, statistics_dtype(x, self.force_float32_reductions)),
            along(features, scale, x),
            along(features, bias, x),
            axis=axes,
            eps=self.epsilon,
            where=mask,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            fast_variance=self.use_fast_variance,
            dtype=None,
        )
        return cast(y, canonicalize_dtype(x, scale, bias, dtype=self.dtype))


def scale_and_bias(module: Any, shape: Sequence[int]) -> tuple[Array | None, Array | None]:
    """Returns the parameters `scale` and `bias` of a norm, or None where unused."""
    given = tuple(shape), module.param_dtype
    scale = module.param("scale", module.scale_init, *given) if module.use_scale else None
    bias = module.param("bias", module.bias_init, *given) if module.use_bias else None
    return scale, bias


def along(axes: Sequence[int], values: Array | None, x: Array) -> Array | None:
    """Reshapes values for positions of some axes of `x` to broadcast to `x`."""
    if values is None or list(axes) == list(range(x.ndim - len(axes), x.ndim)):
        return values
    return values.reshape([x.shape[a] if a in axes else 1 for a in range(x.ndim)])
