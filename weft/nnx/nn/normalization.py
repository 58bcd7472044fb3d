"""Normalization layers, and wrappers that normalize a layer's weights before each call.

`reduction_axes` share statistics; along `feature_axes` each position has its own scale and bias.
Statistics are computed in float32; the output has dtype `dtype`, by default promoted from input,
scale and bias. The state that a wrapper keeps for a parameter is stored under the parameter's path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from weft import errors, functional
from weft.functional import canonicalize_dtype, norm
from weft.functional.initializers import normal, ones, zeros
from weft.functional.statistics import (
    Axes,
    canonical_axes,
    cast,
    statistics_dtype,
)
from weft.nnx.filters import Filter, Path, PathContains, to_predicate
from weft.nnx.module import Module
from weft.nnx.nn import parameters
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    PromoteDtype,
)
from weft.nnx.pytree import iter_graph
from weft.nnx.rngs import Rngs
from weft.nnx.variables import BatchStat, Param
from weft.typing import DType, PyTree

# The arguments of the two base classes that their parameters are made of.
ScaleArguments = tuple[Initializer, Rngs, Metadata]
ScaleAndBiasArguments = tuple[
    Initializer, Rngs, Metadata, Initializer, Metadata
]


@dataclass(repr=False, eq=False)
class _ScaledNorm(Module):
    """Normalization with a learned scale."""

    num_features: int
    _: KW_ONLY
    epsilon: float = 1e-6
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    use_scale: bool = True
    scale_init: InitVar[Initializer] = ones
    axis_name: str | None = None
    axis_index_groups: Sequence[Sequence[int]] | None = None
    use_fast_variance: bool = True
    promote_dtype: PromoteDtype = parameters.promote_dtype
    rngs: InitVar[Rngs]
    scale_metadata: InitVar[Metadata] = NO_METADATA

    def __post_init__(
        self, scale_init: Initializer, rngs: Rngs, scale_metadata: Metadata
    ) -> None:
        parameters.check_sizes(self, "num_features")
        self.scale = None
        if self.use_scale:
            self.scale = parameters.new_param(
                scale_init,
                rngs,
                (self.num_features,),
                self.param_dtype,
                scale_metadata,
            )

    def _normalized(
        self,
        norm_fn: Callable[..., Array],
        x: Array,
        *params: Array | None,
        **options: Any,
    ) -> Array:
        """Calls a function of `weft.functional.norm`, with the options that all of them have."""
        dtype, params = self._promoted(x, *params)
        return norm.normalize_by_layer(
            self, norm_fn, x, *params, dtype=dtype, **options
        )

    def _promoted(
        self, x: Array, *params: Array | None
    ) -> tuple[DType, tuple[Array | None, ...]]:
        """Returns the output's dtype, and the parameters as `promote_dtype` casts them."""
        # Weft's own only determines the dtype: the computation casts what it needs.
        if self.promote_dtype is parameters.promote_dtype:
            return canonicalize_dtype(x, *params, dtype=self.dtype), params
        promoted_x, *promoted_params = self.promote_dtype(
            (x, *params), dtype=self.dtype
        )
        return promoted_x.dtype, tuple(promoted_params)

    def _along(
        self, values: Array | None, axes: Sequence[int], x: Array
    ) -> Any:
        """Reshapes values of shape `(num_features,)`, or None, to broadcast to the input.

        Raises ArgumentShapeError if the input has a different number of features.
        """
        if values is None:
            return None
        size = math.prod(x.shape[a] for a in axes)
        if size != self.num_features:
            raise errors.ArgumentShapeError(
                f"{type(self).__name__} with num_features={self.num_features} was given an input "
                f"of shape {x.shape}, whose features (axis {', '.join(map(str, axes))}) are "
                f"{size}; make the layer with num_features={size}, or set its feature axis."
            )
        return norm.along(axes, values, x)


@dataclass(repr=False, eq=False)
class _AffineNorm(_ScaledNorm):
    """Normalization with a learned scale and bias."""

    _: KW_ONLY
    use_bias: bool = True
    bias_init: InitVar[Initializer] = zeros
    bias_metadata: InitVar[Metadata] = NO_METADATA

    def __post_init__(
        self,
        scale_init: Initializer,
        rngs: Rngs,
        scale_metadata: Metadata,
        bias_init: Initializer,
        bias_metadata: Metadata,
    ) -> None:
        super().__post_init__(scale_init, rngs, scale_metadata)
        self.bias = None
        if self.use_bias:
            self.bias = parameters.new_param(
                bias_init,
                rngs,
                (self.num_features,),
                self.param_dtype,
                bias_metadata,
            )

    def _scale_and_bias(self) -> tuple[Array | None, Array | None]:
        scale = parameters.optional_value(self.scale)
        bias = parameters.optional_value(self.bias)
        return scale, bias

    def _layer_norm(
        self,
        x: Array,
        reduction_axes: Axes,
        feature_axes: Sequence[int],
        mask: Array | None,
    ) -> Array:
        scale, bias = self._scale_and_bias()
        return self._normalized(
            functional.layer_norm,
            x,
            self._along(scale, feature_axes, x),
            self._along(bias, feature_axes, x),
            axis=reduction_axes,
            where=mask,
            fast_variance=self.use_fast_variance,
        )


@dataclass(repr=False, eq=False)
class LayerNorm(_AffineNorm):
    """Layer normalization, `functional.layer_norm` (Ba et al., 2016).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None.

    Args:
        num_features: number of features, along all `feature_axes`.
        dtype: dtype of the output; by default promoted from input and parameters.
        axis_name: mapped or mesh axis over which statistics are also averaged.
        axis_index_groups: groups of its indices that share statistics, as in `jax.lax.psum`.
        use_fast_variance: whether to compute mean and variance in one reduction.
        promote_dtype: determines the dtype to which input and parameters promote.

    >>> LayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([1.0, 3.0])).round(2).tolist()
    [-1.0, 1.0]
    """

    _: KW_ONLY
    reduction_axes: Axes = -1
    feature_axes: Axes = -1

    def __call__(
        self,
        x: Float[Array, "*shape"],
        *,
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes an input; `mask` selects the values of the statistics, by default all."""
        feature_axes = sorted(canonical_axes(self.feature_axes, x.ndim))
        return self._layer_norm(x, self.reduction_axes, feature_axes, mask)


@dataclass(repr=False, eq=False)
class RMSNorm(_ScaledNorm):
    """Root mean square normalization, `functional.rms_norm` (Zhang and Sennrich, 2019).

    The parameter is `scale`, shape `(num_features,)` or None. Arguments as for `LayerNorm`;
    `use_fast_variance` has no effect.

    >>> RMSNorm(2, rngs=nnx.Rngs(0))(jnp.array([-3.0, 3.0])).round(2).tolist()
    [-1.0, 1.0]
    """

    _: KW_ONLY
    reduction_axes: Axes = -1
    feature_axes: Axes = -1

    def __call__(
        self,
        x: Float[Array, "*shape"],
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes an input; see `LayerNorm`."""
        feature_axes = sorted(canonical_axes(self.feature_axes, x.ndim))
        scale = parameters.optional_value(self.scale)
        return self._normalized(
            functional.rms_norm,
            x,
            self._along(scale, feature_axes, x),
            axis=self.reduction_axes,
            where=mask,
        )


@dataclass(repr=False, eq=False)
class GroupNorm(_AffineNorm):
    """Group normalization of channels, per example (Wu and He, 2018).

    Args:
        num_features: number of channels, along the last axis.
        group_size: number of channels per group; requires `num_groups=None`.
        reduction_axes: axes that share statistics, also the last; by default all but the first.

    The parameters and other arguments are those of `LayerNorm`.

    Raises:
        ArgumentShapeError: if the groups do not divide the channels.
        ArgumentValueError: if not exactly one of `num_groups` and `group_size` is given.

    >>> layer = GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[1.0, 3.0, 5.0, 9.0]])).round(2).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    num_groups: int | None = 32
    group_size: int | None = None
    _: KW_ONLY
    reduction_axes: Axes | None = None

    def __post_init__(self, *arguments: *ScaleAndBiasArguments) -> None:
        super().__post_init__(*arguments)
        sizes = {"num_groups": self.num_groups, "group_size": self.group_size}
        functional.check_sizes(type(self).__name__, **sizes)
        self.feature_axis = -1
        self.num_groups = functional.number_of_groups(
            self.num_features, **sizes
        )
        self.group_size = self.num_features // self.num_groups
        del self.num_features  # the product of the two

    def __call__(
        self,
        x: Float[Array, "batch *spatial channels"],
        *,
        mask: Bool[Array, "*#batch"] | None = None,
    ) -> Float[Array, "batch *spatial channels"]:
        """Normalizes an input; see `LayerNorm`.

        Raises ArgumentValueError if the last axis is not in `reduction_axes`.
        """
        reduction_axes = norm.group_norm_axes(self.reduction_axes, x.shape)
        num_groups = self.num_groups or 1
        group_size = self.group_size or 1
        if x.shape[-1] != num_groups * group_size:
            raise errors.ArgumentShapeError(
                f"GroupNorm with {num_groups} groups of {group_size} channels was given an input "
                f"of shape {x.shape}; expected (..., {num_groups * group_size})."
            )
        if mask is not None:
            mask = jnp.broadcast_to(mask, x.shape)
        return self._normalized(
            functional.group_norm,
            x,
            *self._scale_and_bias(),
            num_groups=num_groups,
            axis=reduction_axes,
            where=mask,
            fast_variance=self.use_fast_variance,
        )


@dataclass(repr=False, eq=False)
class InstanceNorm(_AffineNorm):
    """Instance normalization: each channel of each example separately (Ulyanov et al., 2016).

    Args:
        feature_axes: axes of the channels; all others except the first share statistics.

    The parameters and other arguments are those of `LayerNorm`.

    >>> layer = InstanceNorm(2, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[[1.0, 5.0], [3.0, 9.0]]])).round(2).tolist()
    [[[-1.0, -1.0], [1.0, 1.0]]]
    """

    _: KW_ONLY
    feature_axes: Axes = -1

    def __call__(
        self,
        x: Float[Array, " batch *shape"],
        *,
        mask: Bool[Array, "*#batch"] | None = None,
    ) -> Float[Array, " batch *shape"]:
        """Normalizes an input; see `LayerNorm`.

        Raises ArgumentValueError if the first axis is in `feature_axes`.
        """
        feature_axes, reduction_axes = norm.instance_norm_axes(
            self.feature_axes, x.shape
        )
        return self._layer_norm(x, reduction_axes, feature_axes, mask)


@dataclass(repr=False, eq=False)
class BatchNorm(_AffineNorm):
    """Batch normalization (Ioffe and Szegedy, 2015).

    The parameters are `scale` and `bias`, shape `(num_features,)` or None; the running averages are
    `mean` and `var`, `BatchStat`s in float32.

    Args:
        num_features: number of features, along all axes in `axis`.
        use_running_average: whether to normalize with the averages and leave them unchanged, set by
            `model.train()` and `model.eval()`; if None, calls must pass it.
        axis: feature axes, along which each position has its own statistics.
        momentum: decay of the averages per step.
        axis_name: mapped or mesh axis over which the batch is sharded. All shards use the
            statistics of the whole batch, in which each value that the masks include counts once.

    The other arguments are those of `LayerNorm`.

    >>> layer = BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[1.0], [3.0]])).round(2).tolist(), layer.mean[...].tolist()
    ([[-1.0], [1.0]], [1.0])
    """

    _: KW_ONLY
    epsilon: float = 1e-5
    use_running_average: bool | None = False
    axis: Axes = -1
    momentum: float = 0.99

    def __post_init__(self, *arguments: *ScaleAndBiasArguments) -> None:
        super().__post_init__(*arguments)
        self.mean = BatchStat(jnp.zeros((self.num_features,), jnp.float32))
        self.var = BatchStat(jnp.ones((self.num_features,), jnp.float32))

    def __call__(
        self,
        x: Float[Array, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes a batch.

        Args:
            mask: values included in the statistics; all by default. NaN and infinities of others
                are returned as they are, with gradient 0.
        """
        use_average = parameters.resolve_mode(
            self, "use_running_average", use_running_average
        )
        feature_axes = sorted(canonical_axes(self.axis, x.ndim))
        scale, bias = self._scale_and_bias()
        mean_average = self.mean.get_value()
        var_average = self.var.get_value()
        dtype, promoted = self._promoted(
            x, mean_average, var_average, scale, bias
        )
        _, _, scale, bias = promoted
        scale = self._along(scale, feature_axes, x)
        bias = self._along(bias, feature_axes, x)
        # Also in training, as a check of the input's features where there is no scale or bias.
        mean = self._along(mean_average, feature_axes, x)
        var = self._along(var_average, feature_axes, x)
        if not use_average:
            mean, var = functional.moments(
                x,
                axis=[a for a in range(x.ndim) if a not in feature_axes],
                where=mask,
                axis_name=self.axis_name,
                axis_index_groups=self.axis_index_groups,
                fast=self.use_fast_variance,
                dtype=statistics_dtype(x),
            )
            self._update_average(self.mean, mean)
            self._update_average(self.var, var)
        y = functional.batch_norm(
            cast(x, statistics_dtype(x)),
            mean,
            var,
            scale,
            bias,
            eps=self.epsilon,
            where=mask,
            dtype=None,
        )
        return cast(y, dtype)

    def _update_average(self, variable: BatchStat[Array], value: Array) -> None:
        average = variable.get_value()
        batch_value = value.reshape(average.shape)
        variable.set_value(
            functional.update_running_average(
                average, batch_value, decay=self.momentum
            )
        )

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets the mode, see `nnx.view`; None leaves it unchanged."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


KERNELS = PathContains("kernel")


@dataclass(repr=False, eq=False)
class SpectralNorm(Module):
    """Layer wrapper that divides weights by their largest singular values (Miyato et al., 2018).

    `functional.norm.spectral_norm` normalizes each parameter with two or more axes;
    `batch_stats` holds its singular value and vector under `(*path, "sigma")` and `(*path, "u")`.

    Args:
        n_steps: number of power iterations per call; 0 leaves the weights unchanged.
        epsilon: added to squared norms.
        dtype: dtype to which the normalized weights are rounded; they keep the parameter's dtype.
        param_dtype: dtype of the vectors and singular values.
        error_on_non_matrix: whether to reject parameters with more than two axes; otherwise all
            axes but the last are the rows of the matrix.
        update_stats: whether calls store the new vectors and singular values. It is stored negated,
            as `use_running_average`, which `model.train()` and `model.eval()` set.

    >>> from weft.nnx.nn.linear import Linear
    >>> layer = SpectralNorm(Linear(3, 4, rngs=nnx.Rngs(0)), n_steps=20, rngs=nnx.Rngs(1))
    >>> y = layer(jnp.ones((1, 3)))
    >>> singular = jnp.linalg.svd(layer.layer_instance.kernel[...], compute_uv=False)
    >>> float(singular[0].round(3)), sorted(layer.batch_stats)
    (1.0, [('kernel', 'sigma'), ('kernel', 'u')])
    """

    layer_instance: Module
    _: KW_ONLY
    n_steps: int = 1
    epsilon: float = 1e-12
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    error_on_non_matrix: bool = False
    update_stats: InitVar[bool] = True
    rngs: InitVar[Rngs]

    def __post_init__(self, update_stats: bool, rngs: Rngs) -> None:
        self.use_running_average = not update_stats
        batch_stats: dict[Path, BatchStat[Array]] = {}
        for path, param in self._matrices():
            key = parameters.params_key(rngs)
            u = normal()(key, (1, param.shape[-1]), self.param_dtype)
            sigma = jnp.ones((), self.param_dtype)
            batch_stats[*path, "u"] = BatchStat(u)
            batch_stats[*path, "sigma"] = BatchStat(sigma)
        self.batch_stats = batch_stats

    def __call__(self, x: PyTree, update_stats: bool | None = None) -> PyTree:
        """Normalizes the weights of the layer, and calls it; `update_stats` overrides the mode."""
        if update_stats is None:
            update_stats = not self.use_running_average
        for path, param in self._matrices():
            self._normalize(path, param, update_stats)
        return self.layer_instance(x)  # pyright: ignore[reportCallIssue]

    def _matrices(self) -> Iterator[tuple[Path, Param[Array]]]:
        if self.n_steps < 1:
            return
        for path, param in matching_params(self.layer_instance, ...):
            if param.get_value().ndim > 1:
                yield path, param

    def _normalize(
        self, path: Path, param: Param[Array], update_stats: bool
    ) -> None:
        weight = param.get_value()
        if weight.ndim > 2 and self.error_on_non_matrix:
            name = type(self.layer_instance).__name__
            raise errors.ArgumentShapeError(
                f"the parameter {'/'.join(map(str, path))} of the {name} in a SpectralNorm has "
                f"shape {weight.shape} and is not a matrix; give "
                "error_on_non_matrix=False to take all axes but the last as its rows."
            )
        u = self.batch_stats[*path, "u"]
        sigma = self.batch_stats[*path, "sigma"]
        weight, new_u, new_sigma = norm.spectral_norm(
            weight, u.get_value(), n_steps=self.n_steps, eps=self.epsilon
        )
        if update_stats:
            u[...] = new_u
            sigma[...] = new_sigma
        dtype = canonicalize_dtype(weight, new_u, dtype=self.dtype)
        param[...] = weight.astype(dtype)


@dataclass(repr=False, eq=False)
class WeightNorm(Module):
    """Layer wrapper that splits weights into direction and norm (Salimans and Kingma, 2016).

    `functional.norm.weight_norm` normalizes each parameter; `scales` holds the learned norms
    under the parameters' paths, or is None without scales.

    Args:
        feature_axes: axes along which each position has its own norm; None for one per parameter.
        use_scale: whether norms are learned; otherwise all norms are 1.
        epsilon, dtype: as for `SpectralNorm`.
        promote_dtype: casts a normalized weight to the dtype to which it is rounded.

    Raises ArgumentValueError if a parameter lacks the `feature_axes`.

    >>> from weft.nnx.nn.linear import Linear
    >>> layer = WeightNorm(Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    >>> layer.scales["kernel",].shape
    (2,)
    """

    layer_instance: Module
    _: KW_ONLY
    feature_axes: Axes | None = -1
    use_scale: bool = True
    scale_init: Initializer = ones
    epsilon: float = 1e-12
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    variable_filter: Filter = KERNELS
    promote_dtype: PromoteDtype = parameters.promote_dtype
    rngs: InitVar[Rngs]

    def __post_init__(self, rngs: Rngs) -> None:
        self.scales: dict[Path, Param[Array]] | None = None
        if not self.use_scale:
            return
        scales: dict[Path, Param[Array]] = {}
        for path, param in self._params():
            axes = norm.weight_features(param.shape, self.feature_axes)
            shape = tuple(param.shape[a] for a in axes)
            key = None
            # A key is drawn only if it is used, so that layers made later keep their keys.
            if self.scale_init is not ones:
                key = parameters.params_key(rngs)
            scale = self.scale_init(key, shape, self.param_dtype)
            scales[path] = Param(scale)
        self.scales = scales

    def _params(self) -> Iterator[tuple[Path, Param[Array]]]:
        return matching_params(self.layer_instance, self.variable_filter)

    def __call__(self, x: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Normalizes the weights of the layer, and calls it with the arguments."""
        for path, param in self._params():
            scale = None
            if self.scales is not None:
                scale = self.scales[path].get_value()
            weight = norm.weight_norm(
                param.get_value(),
                scale,
                feature_axes=self.feature_axes,
                eps=self.epsilon,
            )
            (param[...],) = self.promote_dtype((weight,), dtype=self.dtype)
        return self.layer_instance(x, *args, **kwargs)  # pyright: ignore[reportCallIssue]


def matching_params(
    layer: Module, param_filter: Filter
) -> Iterator[tuple[Path, Param[Array]]]:
    """Yields the parameters in a layer that a filter matches, each once, with their paths.

    >>> from weft.nnx.nn.linear import Linear
    >>> [path for path, _ in matching_params(Linear(3, 2, rngs=nnx.Rngs(0)), ...)]
    [('bias',), ('kernel',)]
    """
    matches = to_predicate(param_filter)
    for path, x in iter_graph(layer):
        if isinstance(x, Param) and matches(path, x):
            yield path, x
