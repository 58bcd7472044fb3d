"""Normalization of activations by statistics, and of a layer's weights.

`reduction_axes` share statistics; `feature_axes` have a scale and a bias for each position.
Statistics are in float32 unless `force_float32_reductions=False`. The output has the dtype `dtype`,
by default promoted from input, scale and bias.

`SpectralNorm` and `WeightNorm` wrap another layer, which sees normalized parameters. Statistics and
scales of a parameter are variables of the wrapper, named by the parameter's path, such as
`Dense_0/kernel/u`. `init` returns normalized parameters.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from weft import errors, functional
from weft.functional import canonicalize_dtype, norm
from weft.functional.initializers import Initializer, normal, ones, zeros
from weft.functional.statistics import (
    Axes,
    canonical_axes,
    cast,
    statistics_dtype,
)
from weft.linen.apply import merge_param
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.linen.state import name_of
from weft.linen.transforms import map_variables
from weft.typing import DType, PyTree


class _ScaleAndBias(Module):
    epsilon: float = 1e-6
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = zeros
    scale_init: Initializer = ones


class LayerNorm(_ScaleAndBias):
    """Normalization of each position, `functional.layer_norm` (Ba et al., 2016).

    Attributes:
        dtype: output dtype; by default promoted from input and parameters.
        axis_name: mapped or mesh axis to include in the statistics.
        axis_index_groups: groups of indices of that axis that share statistics, see `jax.lax.psum`.
        use_fast_variance: whether to compute mean and variance in one reduction.
        force_float32_reductions: whether statistics have at least float32.

    >>> y, variables = nn.LayerNorm().init_with_output(jax.random.key(0), jnp.array([1.0, 3.0]))
    >>> y.round(2).tolist(), jax.tree.map(jnp.shape, variables)
    ([-1.0, 1.0], {'params': {'bias': (2,), 'scale': (2,)}})
    """

    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Sequence[Sequence[int]] | None = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self,
        x: Float[Array, "*shape"],
        *,
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes an input; `mask` selects the values of the statistics, by default all."""
        features = sorted(canonical_axes(self.feature_axes, x.ndim))
        return _layer_norm(self, x, self.reduction_axes, features, mask)


class RMSNorm(Module):
    """Division by the root mean square, `functional.rms_norm` (Zhang and Sennrich, 2019).

    See `LayerNorm` for the attributes; `use_fast_variance` has no effect.

    >>> nn.RMSNorm(use_scale=False).apply({}, jnp.array([-3.0, 3.0])).round(2).tolist()
    [-1.0, 1.0]
    """

    epsilon: float = 1e-6
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Sequence[Sequence[int]] | None = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self,
        x: Float[Array, "*shape"],
        *,
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        features = sorted(canonical_axes(self.feature_axes, x.ndim))
        scale, _ = scale_and_bias(self, [x.shape[a] for a in features])
        scale = norm.along(features, scale, x)
        return _normalized(
            self,
            functional.rms_norm,
            x,
            scale,
            axis=self.reduction_axes,
            where=mask,
        )


class GroupNorm(Module):
    """Normalization of groups of channels in each example (Wu and He, 2018).

    See `LayerNorm` for the other attributes.

    Attributes:
        num_groups: number of groups; must be None if `group_size` is set.
        reduction_axes: must contain the last axis; by default all but the first.

    >>> layer = nn.GroupNorm(num_groups=2, use_bias=False, use_scale=False)
    >>> layer.apply({}, jnp.array([[1.0, 3.0, 5.0, 9.0]])).round(2).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    num_groups: int | None = 32
    group_size: int | None = None
    epsilon: float = 1e-6
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = zeros
    scale_init: Initializer = ones
    reduction_axes: Axes | None = None
    axis_name: str | None = None
    axis_index_groups: Sequence[Sequence[int]] | None = None
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
            type(self).__name__,
            num_groups=self.num_groups,
            group_size=self.group_size,
        )
        channels = x.shape[-1]
        num_groups = functional.number_of_groups(
            channels, self.num_groups, self.group_size
        )
        axes = norm.group_norm_axes(self.reduction_axes, x.shape)
        scale, bias = scale_and_bias(self, (channels,))
        if mask is not None:
            mask = jnp.broadcast_to(
                mask, x.shape
            )  # before the channels are divided into groups
        return _normalized(
            self,
            functional.group_norm,
            x,
            scale,
            bias,
            num_groups=num_groups,
            axis=axes,
            where=mask,
            fast_variance=self.use_fast_variance,
        )


class InstanceNorm(_ScaleAndBias):
    """Normalization of each channel in each example (Ulyanov et al., 2016).

    See `LayerNorm` for the attributes; all axes but the first and `feature_axes` share statistics.

    >>> layer = nn.InstanceNorm(use_bias=False, use_scale=False)
    >>> layer.apply({}, jnp.array([[[1.0, 5.0], [3.0, 9.0]]])).round(2).tolist()
    [[[-1.0, -1.0], [1.0, 1.0]]]
    """

    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Sequence[Sequence[int]] | None = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self,
        x: Float[Array, " batch *shape"],
        *,
        mask: Bool[Array, "*#batch"] | None = None,
    ) -> Float[Array, " batch *shape"]:
        """Normalizes an input; see `LayerNorm` for the arguments.

        Raises ArgumentValueError if the first axis is in `feature_axes`.
        """
        features, axes = norm.instance_norm_axes(self.feature_axes, x.shape)
        return _layer_norm(self, x, axes, features, mask)


def _layer_norm(
    module: Any,
    x: Array,
    axes: Axes,
    features: Sequence[int],
    mask: Array | None,
) -> Array:
    scale, bias = scale_and_bias(module, [x.shape[a] for a in features])
    return _normalized(
        module,
        functional.layer_norm,
        x,
        norm.along(features, scale, x),
        norm.along(features, bias, x),
        axis=axes,
        where=mask,
        fast_variance=module.use_fast_variance,
    )


def _normalized(
    module: LayerNorm | RMSNorm | GroupNorm | InstanceNorm,
    norm_fn: Callable[..., Array],
    x: Array,
    *params: Array | None,
    **options: Any,
) -> Array:
    return norm.normalize_by_layer(
        module,
        norm_fn,
        x,
        *params,
        dtype=canonicalize_dtype(x, *params, dtype=module.dtype),
        force_float32=module.force_float32_reductions,
        **options,
    )


def scale_and_bias(
    module: Any, shape: Sequence[int]
) -> tuple[Array | None, Array | None]:
    """Returns the parameters `scale` and `bias` of a norm, or None where unused."""
    shape = tuple(shape)
    scale = bias = None
    if module.use_scale:
        scale = module.param(
            "scale", module.scale_init, shape, module.param_dtype
        )
    if getattr(module, "use_bias", False):  # RMSNorm has none
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    return scale, bias


class BatchNorm(Module):
    """Normalization with statistics of the batch or running averages (Ioffe and Szegedy, 2015).

    `apply` updates the averages `mean` and `var` of the collection `batch_stats` if it is mutable.
    See `LayerNorm` for the other attributes.

    Attributes:
        use_running_average: whether to normalize with the averages, as in evaluation, without
            updating them; set here or in the call.
        axis: feature axes; each position along them has its own statistics.
        axis_name: mapped or mesh axis over which the batch is split. All parts use the statistics
            of the whole batch, weighted by their masks. `init` does not need the axis.
        force_float32_reductions: whether statistics have at least float32; otherwise the averages
            have `param_dtype`.

    >>> x = jnp.array([[1.0], [3.0]])
    >>> layer = nn.BatchNorm(momentum=0.5)
    >>> variables = layer.init(jax.random.key(0), x, use_running_average=False)
    >>> y, updates = layer.apply(
    ...     variables, x, use_running_average=False, mutable=["batch_stats"])
    >>> y.round(2).tolist(), updates["batch_stats"]["mean"].tolist()
    ([[-1.0], [1.0]], [1.0])
    """

    use_running_average: bool | None = None
    axis: int | Sequence[int] = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = zeros
    scale_init: Initializer = ones
    axis_name: str | None = None
    axis_index_groups: Sequence[Sequence[int]] | None = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self,
        x: Float[Array, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes a batch.

        Args:
            use_running_average: see the attribute; exactly one of the two must be set.
            mask: values that count in the statistics; all by default. NaN and infinities of others
                are returned as they are, with gradient 0.

        Raises ParameterGivenTwiceError if `use_running_average` is given twice or not at all.
        """
        use_average = merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        features = sorted(canonical_axes(self.axis, x.ndim))
        reduction_axes = [a for a in range(x.ndim) if a not in features]
        feature_shape = tuple(x.shape[a] for a in features)
        broadcast_shape = [
            x.shape[a] if a in features else 1 for a in range(x.ndim)
        ]
        average_dtype = (
            jnp.float32 if self.force_float32_reductions else self.param_dtype
        )
        mean_average = self.variable(
            "batch_stats", "mean", jnp.zeros, feature_shape, average_dtype
        )
        var_average = self.variable(
            "batch_stats", "var", jnp.ones, feature_shape, average_dtype
        )
        x_dtype = statistics_dtype(x, self.force_float32_reductions)
        if use_average:
            mean = mean_average.value.reshape(broadcast_shape)
            var = var_average.value.reshape(broadcast_shape)
        else:
            initializing = (
                self.is_initializing()
            )  # where the mapped axis need not exist
            mean, var = functional.moments(
                x,
                axis=reduction_axes,
                where=mask,
                axis_name=None if initializing else self.axis_name,
                axis_index_groups=self.axis_index_groups,
                fast=self.use_fast_variance,
                dtype=x_dtype,
            )
            if not initializing:
                for average, statistic in (
                    (mean_average, mean),
                    (var_average, var),
                ):
                    average.value = functional.update_running_average(
                        average.value,
                        statistic.reshape(feature_shape),
                        decay=self.momentum,
                    )
        scale, bias = scale_and_bias(self, feature_shape)
        scale_along_features = (
            None if scale is None else scale.reshape(broadcast_shape)
        )
        bias_along_features = (
            None if bias is None else bias.reshape(broadcast_shape)
        )
        y = functional.batch_norm(
            cast(x, x_dtype),
            mean,
            var,
            scale_along_features,
            bias_along_features,
            eps=self.epsilon,
            where=mask,
            dtype=None,
        )
        return cast(y, canonicalize_dtype(x, scale, bias, dtype=self.dtype))


class SpectralNorm(Module):
    """Division of a layer's weights by their largest singular values (Miyato et al., 2018).

    Applies `functional.norm.spectral_norm` to each parameter with at least two axes, and
    stores its singular value `sigma` and vector `u`.

    Attributes:
        n_steps: number of power iterations per call; 0 leaves the weights unchanged.
        dtype: dtype of the normalized weights; by default promoted from weights and `u`.
        param_dtype: dtype of the first `u` and `sigma`.
        error_on_non_matrix: whether to reject parameters with more than two axes; otherwise all
            axes but the last are the rows of the matrix.

    >>> layer = nn.SpectralNorm(nn.Dense(4))
    >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3)), update_stats=False)
    >>> sorted(variables["batch_stats"])
    ['layer_instance/kernel/sigma', 'layer_instance/kernel/u']
    """

    layer_instance: Module
    n_steps: int = 1
    epsilon: float = 1e-12
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    error_on_non_matrix: bool = False
    collection_name: str = "batch_stats"

    @compact
    def __call__(
        self, *args: PyTree, update_stats: bool, **kwargs: PyTree
    ) -> PyTree:
        """Calls the layer with the other arguments.

        Args:
            update_stats: whether to store the new `u` and `sigma`, as in training.

        Raises ArgumentShapeError if a parameter is not a matrix and `error_on_non_matrix` is set.
        """
        normalized = functools.partial(self._normalized, update_stats)
        return _call_with_normalized(self, normalized, args, kwargs)

    def _normalized(
        self, update_stats: bool, name: str, weight: Array
    ) -> Array:
        if weight.ndim < 2 or self.n_steps < 1:
            return weight
        if weight.ndim > 2 and self.error_on_non_matrix:
            raise errors.ArgumentShapeError(
                f"the parameter {name} has shape {weight.shape} and is not a matrix; set "
                "error_on_non_matrix=False to take all axes but the last as its rows."
            )

        def initial_u() -> Array:
            shape = (1, weight.shape[-1])
            return normal(1.0)(self.make_rng("params"), shape, self.param_dtype)

        u = self.variable(self.collection_name, f"{name}/u", initial_u)
        sigma = self.variable(
            self.collection_name,
            f"{name}/sigma",
            jnp.ones,
            (),
            self.param_dtype,
        )
        normalized, new_u, new_sigma = norm.spectral_norm(
            weight, u.value, n_steps=self.n_steps, eps=self.epsilon
        )
        # The next call continues the power iteration from here.
        if update_stats:
            u.value, sigma.value = new_u, new_sigma
        return normalized.astype(
            canonicalize_dtype(normalized, new_u, dtype=self.dtype)
        )


class WeightNorm(Module):
    """Weight normalization with learned norms (Salimans and Kingma, 2016).

    Applies `functional.norm.weight_norm` to the parameters, with a new parameter `scale`.

    Attributes:
        dtype: dtype of the normalized weights; by default promoted from weights and scales.
        use_scale: whether to learn scales; otherwise all norms are 1.
        feature_axes: axes whose positions have separate norms; None for one norm per parameter.
        variable_filter: substrings of the paths of parameters to normalize, such as
            `layer_instance/kernel`; None for all parameters.

    >>> variables = nn.WeightNorm(nn.Dense(4)).init(jax.random.key(0), jnp.ones((1, 3)))
    >>> jax.tree.map(jnp.shape, variables["params"])["layer_instance/kernel/scale"]
    (4,)
    """

    layer_instance: Module
    epsilon: float = 1e-12
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = ones
    feature_axes: Axes | None = -1
    variable_filter: Iterable[str] | None = frozenset({"kernel"})

    @compact
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the layer with the same arguments.

        Raises ArgumentValueError if a parameter lacks one of `feature_axes`.
        """
        return _call_with_normalized(self, self._normalized, args, kwargs)

    def _normalized(self, name: str, weight: Array) -> Array:
        selected_parts = tuple(self.variable_filter or ())
        if selected_parts and not any(part in name for part in selected_parts):
            return weight
        scale = None
        if self.use_scale:
            features = norm.weight_features(weight.shape, self.feature_axes)
            shape = tuple(weight.shape[a] for a in features)
            scale = self.param(
                f"{name}/scale", self.scale_init, shape, self.param_dtype
            )
        y = norm.weight_norm(
            weight, scale, feature_axes=self.feature_axes, eps=self.epsilon
        )
        return y.astype(canonicalize_dtype(y, dtype=self.dtype))


def _call_with_normalized(
    module: SpectralNorm | WeightNorm,
    normalized: Callable[[str, Array], Array],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Calls a layer that sees `normalized(path, parameter)` in place of each parameter."""
    layer = module.layer_instance

    def normalized_at_path(path: tuple[Any, ...], weight: Array) -> Array:
        parameter_path = jax.tree_util.keystr(path, simple=True, separator="/")
        return normalized(f"{name_of(layer)}/{parameter_path}", weight)

    def normalized_variables(variables: dict[str, PyTree]) -> dict[str, PyTree]:
        # One collection, `params`, if the layer has parameters.
        return {
            collection: jax.tree_util.tree_map_with_path(
                normalized_at_path, tree
            )
            for collection, tree in variables.items()
        }

    run = map_variables(
        operator.call,
        "params",
        trans_in_fn=normalized_variables,
        init=module.is_initializing(),
        mutable=True,
    )
    return run(layer, *args, **kwargs)
