"""Norms that use statistics of their input: layer, RMS, group and instance norm.

`reduction_axes` share statistics; along `feature_axes` each position has its own scale and bias.
Statistics are computed in float32; the output has dtype `dtype`, by default promoted from input,
scale and bias.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from weft import functional
from weft.errors import ArgumentShapeError
from weft.functional.initializers import ones, zeros
from weft.functional.norm_axes import group_norm_axes, instance_norm_axes
from weft.functional.statistics import Axes, canonical_axes, cast, statistics_dtype
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.linear import value_of
from weft.nnx.nn.norm_parameters import along, optional_param, promoted
from weft.nnx.nn.parameters import NO_METADATA, Initializer, Metadata
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(Module):
    """Layer normalization, `functional.layer_norm` (Ba et al., 2016).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None.

    Args:
        num_features: number of features, along all `feature_axes`.
        epsilon: added to the variance.
        dtype: dtype of the output; by default promoted from input and parameters.
        reduction_axes: axes that share statistics.
        feature_axes: axes of scale and bias.
        axis_name: mapped or mesh axis over which statistics are also averaged.
        axis_index_groups: groups of indices of that axis that share statistics, as in
            `jax.lax.psum`.
        use_fast_variance: whether to compute mean and variance in one reduction.
        promote_dtype: determines the dtype to which input and parameters promote.

    Example:
        >>> from weft import nnx
        >>> LayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([1.0, 3.0])).round(2).tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(type(self).__name__, num_features=num_features)
        given = rngs, num_features, param_dtype
        self.scale = optional_param(use_scale, scale_init, *given, scale_metadata)
        self.bias = optional_param(use_bias, bias_init, *given, bias_metadata)
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self, x: Float[Array, "*shape"], *, mask: Bool[Array, "*#shape"] | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes an input.

        Args:
            mask: values included in the statistics; all by default.
        """
        features = sorted(canonical_axes(self.feature_axes, x.ndim))
        dtype, (scale, bias) = promoted(self, x, value_of(self.scale), value_of(self.bias))
        y = functional.layer_norm(
            cast(x, statistics_dtype(x)),
            along(self, scale, features, x, self.num_features),
            along(self, bias, features, x, self.num_features),
            axis=self.reduction_axes,
            eps=self.epsilon,
            where=mask,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            fast_variance=self.use_fast_variance,
            dtype=None,
        )
        return cast(y, dtype)


class RMSNorm(Module):
    """Root mean square normalization, `functional.rms_norm` (Zhang and Sennrich, 2019).

    The parameter is `scale`, shape `(num_features,)` or None. Arguments as for `LayerNorm`;
    `use_fast_variance` has no effect.

    Example:
        >>> from weft import nnx
        >>> RMSNorm(2, rngs=nnx.Rngs(0))(jnp.array([-3.0, 3.0])).round(2).tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        scale_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(type(self).__name__, num_features=num_features)
        given = rngs, num_features, param_dtype
        self.scale = optional_param(use_scale, scale_init, *given, scale_metadata)
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self, x: Float[Array, "*shape"], mask: Bool[Array, "*#shape"] | None = None
    ) -> Float[Array, "*shape"]:
        """Normalizes an input; see `LayerNorm`."""
        features = sorted(canonical_axes(self.feature_axes, x.ndim))
        dtype, (scale,) = promoted(self, x, value_of(self.scale))
        y = functional.rms_norm(
            cast(x, statistics_dtype(x)),
            along(self, scale, features, x, self.num_features),
            axis=self.reduction_axes,
            eps=self.epsilon,
            where=mask,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            dtype=None,
        )
        return cast(y, dtype)


class GroupNorm(Module):
    """Group normalization of channels, per example (Wu and He, 2018).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None.

    Args:
        num_features: number of channels, along the last axis.
        num_groups: number of groups; None if `group_size` is given.
        group_size: number of channels per group; requires `num_groups=None`.
        reduction_axes: axes that share statistics, including the last; by default all but the
            first.

    The other arguments are those of `LayerNorm`.

    Raises:
        ArgumentShapeError: if the groups do not divide the channels.
        ArgumentValueError: if not exactly one of `num_groups` and `group_size` is given.

    Example:
        >>> from weft import nnx
        >>> layer = GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[1.0, 3.0, 5.0, 9.0]])).round(2).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(
            type(self).__name__,
            num_features=num_features,
            num_groups=num_groups,
            group_size=group_size,
        )
        self.feature_axis = -1
        self.num_groups = functional.number_of_groups(num_features, num_groups, group_size)
        self.group_size = num_features // self.num_groups
        given = rngs, num_features, param_dtype
        self.scale = optional_param(use_scale, scale_init, *given, scale_metadata)
        self.bias = optional_param(use_bias, bias_init, *given, bias_metadata)
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self,
        x: Float[Array, "batch *spatial channels"],
        *,
        mask: Bool[Array, "*#batch"] | None = None,
    ) -> Float[Array, "batch *spatial channels"]:
        """Normalizes an input; see `LayerNorm`.

        Raises:
            ArgumentValueError: if the last axis is not in `reduction_axes`.
        """
        axes = group_norm_axes(self.reduction_axes, x.shape)
        if x.shape[-1] != self.num_groups * self.group_size:
            raise ArgumentShapeError(
                f"GroupNorm with {self.num_groups} groups of {self.group_size} channels was given "
                f"an input of shape {x.shape}; expected (..., {self.num_groups * self.group_size})."
            )
        dtype, (scale, bias) = promoted(self, x, value_of(self.scale), value_of(self.bias))
        y = functional.group_norm(
            cast(x, statistics_dtype(x)),
            scale,
            bias,
            num_groups=self.num_groups,
            axis=axes,
            eps=self.epsilon,
            where=None if mask is None else jnp.broadcast_to(mask, x.shape),
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            fast_variance=self.use_fast_variance,
            dtype=None,
        )
        return cast(y, dtype)


class InstanceNorm(Module):
    """Instance normalization: each channel of each example separately (Ulyanov et al., 2016).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None.

    Args:
        num_features: number of channels, along all `feature_axes`.
        feature_axes: axes of the channels; all others except the first share statistics.

    The other arguments are those of `LayerNorm`.

    Example:
        >>> from weft import nnx
        >>> layer = InstanceNorm(2, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[[1.0, 5.0], [3.0, 9.0]]])).round(2).tolist()
        [[[-1.0, -1.0], [1.0, 1.0]]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(type(self).__name__, num_features=num_features)
        given = rngs, num_features, param_dtype
        self.scale = optional_param(use_scale, scale_init, *given, scale_metadata)
        self.bias = optional_param(use_bias, bias_init, *given, bias_metadata)
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self, x: Float[Array, " batch *shape"], *, mask: Bool[Array, "*#batch"] | None = None
    ) -> Float[Array, " batch *shape"]:
        """Normalizes an input; see `LayerNorm`.

        Raises:
            ArgumentValueError: if the first axis is in `feature_axes`.
        """
        features, axes = instance_norm_axes(self.feature_axes, x.shape)
        dtype, (scale, bias) = promoted(self, x, value_of(self.scale), value_of(self.bias))
        y = functional.layer_norm(
            cast(x, statistics_dtype(x)),
            along(self, scale, features, x, self.num_features),
            along(self, bias, features, x, self.num_features),
            axis=axes,
            eps=self.epsilon,
            where=mask,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            fast_variance=self.use_fast_variance,
            dtype=None,
        )
        return cast(y, dtype)
