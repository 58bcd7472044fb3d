"""Norms that normalise an input with statistics of its own.

Which axes share statistics (`reduction_axes`) and which have a scale and bias for each position
(`feature_axes`) are two questions, and the layers differ in the answers. Statistics are computed
in float32; the result has the dtype `dtype`, by default that to which the input, scale and bias
are promoted.
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
    """Normalises each position of a batch by itself, `functional.layer_norm` (Ba et al., 2016).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None.

    Args:
        num_features: how many features there are, along all `feature_axes`.
        epsilon: added to the variance.
        dtype: of the result; by default promoted from the input and the parameters.
        param_dtype: of the parameters.
        use_bias: whether to add a bias.
        use_scale: whether to multiply with a scale.
        bias_init: makes the bias.
        scale_init: makes the scale.
        reduction_axes: the axes that share statistics.
        feature_axes: the axes of scale and bias.
        axis_name: a mapped axis, or an axis of devices, over which the statistics are taken as
            well.
        axis_index_groups: the groups of indices of that axis that share statistics, as in
            `jax.lax.psum`.
        use_fast_variance: whether mean and variance come out of one reduction.
        promote_dtype: says to which dtype input and parameters promote.
        rngs: its stream `params` gives a key for each parameter.
        bias_metadata: of the bias's variable.
        scale_metadata: of the scale's variable.

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
        """Normalises an input.

        Args:
            x: the input.
            mask: which values count in the statistics; all by default.

        Raises:
            ArgumentShapeError: if the input has another number of features.
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
    """Divides by the root mean square, `functional.rms_norm` (Zhang and Sennrich, 2019).

    The parameter is `scale`, shape `(num_features,)` or None.

    Args:
        num_features: see `LayerNorm`, as for all others but for the following.
        epsilon: added to the mean square.
        dtype: of the result.
        param_dtype: of the parameter.
        use_scale: whether to multiply with a scale.
        scale_init: makes the scale.
        reduction_axes: the axes that share a mean square.
        feature_axes: the axes of the scale.
        axis_name: a mapped axis over which the mean square is taken as well.
        axis_index_groups: of that axis.
        use_fast_variance: without effect: there is one statistic.
        promote_dtype: says to which dtype input and parameter promote.
        rngs: its stream `params` gives a key.
        scale_metadata: of the scale's variable.

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
        """Normalises an input; arguments and errors as of `LayerNorm`."""
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
    """Normalises groups of channels, each example by itself (Wu and He, 2018).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None.

    Args:
        num_features: how many channels there are, along the last axis.
        num_groups: how many groups there are; None if `group_size` is given.
        group_size: how many channels a group has; then `num_groups` must be None.
        epsilon: see `LayerNorm`, as for all others but for the following.
        dtype: of the result.
        param_dtype: of the parameters.
        use_bias: whether to add a bias.
        use_scale: whether to multiply with a scale.
        bias_init: makes the bias.
        scale_init: makes the scale.
        reduction_axes: the axes that share statistics, the last one among them; all but the first
            by default.
        axis_name: a mapped axis over which the statistics are taken as well.
        axis_index_groups: of that axis.
        use_fast_variance: whether mean and variance come out of one reduction.
        promote_dtype: says to which dtype input and parameters promote.
        rngs: its stream `params` gives a key for each parameter.
        bias_metadata: of the bias's variable.
        scale_metadata: of the scale's variable.

    Raises:
        ArgumentShapeError: if the channels cannot be cut into equal groups.
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
        """Normalises an input; arguments as of `LayerNorm`.

        Raises:
            ArgumentShapeError: if the input has another number of channels.
            ArgumentValueError: if the last axis is not among the `reduction_axes`.
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
    """Normalises each channel of each example by itself (Ulyanov et al., 2016).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None.

    Args:
        num_features: how many channels there are, along all `feature_axes`.
        epsilon: see `LayerNorm`, as for all others but for the following.
        dtype: of the result.
        param_dtype: of the parameters.
        use_bias: whether to add a bias.
        use_scale: whether to multiply with a scale.
        bias_init: makes the bias.
        scale_init: makes the scale.
        feature_axes: the axes of the channels. All others but the first share statistics.
        axis_name: a mapped axis over which the statistics are taken as well.
        axis_index_groups: of that axis.
        use_fast_variance: whether mean and variance come out of one reduction.
        promote_dtype: says to which dtype input and parameters promote.
        rngs: its stream `params` gives a key for each parameter.
        bias_metadata: of the bias's variable.
        scale_metadata: of the scale's variable.

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
        """Normalises an input; arguments as of `LayerNorm`.

        Raises:
            ArgumentShapeError: if the input has another number of channels.
            ArgumentValueError: if the first axis is among the `feature_axes`.
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
