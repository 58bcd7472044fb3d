"""Wrappers that normalize a layer's weights before each call.

State kept for a parameter is stored under the parameter's path in the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from weft.errors import ArgumentShapeError
from weft.functional.dtypes import canonicalize_dtype
from weft.functional.initializers import normal, ones
from weft.functional.statistics import Axes
from weft.functional.weight_norm import spectral_norm, weight_features, weight_norm
from weft.nnx.filters import Filter, Path, PathContains, to_predicate
from weft.nnx.graph import iter_graph
from weft.nnx.kinds import BatchStat, Param
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.parameters import Initializer, key_of
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["SpectralNorm", "WeightNorm"]

KERNELS = PathContains("kernel")


class SpectralNorm(Module):
    """Layer wrapper that divides weights by their largest singular values (Miyato et al., 2018).

    It bounds the Lipschitz constant of discriminators in generative adversarial networks.
    `functional.weight_norm.spectral_norm` normalizes each parameter with two or more axes;
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

    Example:
        >>> from weft import nnx
        >>> from weft.nnx.nn.linear import Linear
        >>> layer = SpectralNorm(Linear(3, 4, rngs=nnx.Rngs(0)), n_steps=20, rngs=nnx.Rngs(1))
        >>> y = layer(jnp.ones((1, 3)))
        >>> singular = jnp.linalg.svd(layer.layer_instance.kernel[...], compute_uv=False)
        >>> float(singular[0].round(3)), sorted(layer.batch_stats)
        (1.0, [('kernel', 'sigma'), ('kernel', 'u')])
    """

    def __init__(
        self,
        layer_instance: Module,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: Rngs,
    ):
        self.layer_instance = layer_instance
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats
        stats = {}
        for path, param in self._matrices():
            u = normal()(key_of(rngs), (1, param.shape[-1]), param_dtype)
            stats[*path, "u"] = BatchStat(u)
            stats[*path, "sigma"] = BatchStat(jnp.ones((), param_dtype))
        self.batch_stats = stats

    def __call__(self, x: Any, update_stats: bool | None = None) -> Any:
        """Normalizes the weights of the layer, and calls it.

        Args:
            x: input of the layer.
            update_stats: overrides `use_running_average`.
        """
        if update_stats is None:
            update_stats = not self.use_running_average
        for path, param in self._matrices():
            self._normalize(path, param, update_stats)
        return self.layer_instance(x)  # pyright: ignore[reportCallIssue]

    def _matrices(self) -> Iterator[tuple[Path, Any]]:
        if self.n_steps < 1:
            return iter(())
        found = params(self.layer_instance, ...)
        return ((path, param) for path, param in found if param.get_value().ndim > 1)

    def _normalize(self, path: Path, param: Any, update_stats: bool) -> None:
        weight = param.get_value()
        if weight.ndim > 2 and self.error_on_non_matrix:
            raise ArgumentShapeError(
                f"the parameter {'/'.join(map(str, path))} of the {_name(self.layer_instance)} in "
                f"a SpectralNorm has shape {weight.shape} and is not a matrix; give "
                "error_on_non_matrix=False to take all axes but the last as its rows."
            )
        u, sigma = self.batch_stats[*path, "u"], self.batch_stats[*path, "sigma"]
        options = {"n_steps": self.n_steps, "eps": self.epsilon}
        weight, new_u, new_sigma = spectral_norm(weight, u.get_value(), **options)
        if update_stats:
            u[...], sigma[...] = new_u, new_sigma
        param[...] = weight.astype(canonicalize_dtype(weight, new_u, dtype=self.dtype))


class WeightNorm(Module):
    """Layer wrapper that splits weights into direction and norm (Salimans and Kingma, 2016).

    `functional.weight_norm.weight_norm` normalizes each parameter; `scales` holds the learned norms
    under the parameters' paths, or is None without scales.

    Args:
        feature_axes: axes of a parameter along which each position has its own norm; None for one
            norm per parameter.
        use_scale: whether norms are learned; otherwise all norms are 1.
        epsilon: added to squared norms.
        dtype: dtype to which the normalized weights are rounded; they keep the parameter's dtype.
        variable_filter: filter of the parameters to normalize.
        promote_dtype: casts a normalized weight to the dtype to which it is rounded.

    Raises:
        ArgumentValueError: if a parameter lacks the `feature_axes`.

    Example:
        >>> from weft import nnx
        >>> from weft.nnx.nn.linear import Linear
        >>> layer = WeightNorm(Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        >>> y = layer(jnp.ones((1, 3)))
        >>> jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0).round(3).tolist()
        [1.0, 1.0]
        >>> layer.scales["kernel",].shape
        (2,)
    """

    def __init__(
        self,
        layer_instance: Module,
        *,
        feature_axes: Axes | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = ones,
        epsilon: float = 1e-12,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        variable_filter: Filter = KERNELS,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
    ):
        self.layer_instance = layer_instance
        self.feature_axes = feature_axes
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.variable_filter = variable_filter
        self.promote_dtype = promote_dtype
        self.scales: Any = None
        if use_scale:
            found = params(layer_instance, variable_filter)
            self.scales = {path: self._scale(param.shape, rngs) for path, param in found}

    def _scale(self, shape: tuple[int, ...], rngs: Rngs) -> Param[Array]:
        shape = tuple(shape[a] for a in weight_features(shape, self.feature_axes))
        # A key is drawn only if it is used, so that layers made later keep their keys.
        key = None if self.scale_init is ones else key_of(rngs)
        return Param(self.scale_init(key, shape, self.param_dtype))

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Normalizes the weights of the layer, and calls it with the arguments.

        Raises:
            ArgumentValueError: if a parameter lacks the `feature_axes`.
        """
        for path, param in params(self.layer_instance, self.variable_filter):
            scale = None if self.scales is None else self.scales[path].get_value()
            axes = {"feature_axes": self.feature_axes, "eps": self.epsilon}
            weight = weight_norm(param.get_value(), scale, **axes)
            (param[...],) = self.promote_dtype((weight,), dtype=self.dtype)
        return self.layer_instance(x, *args, **kwargs)  # pyright: ignore[reportCallIssue]


def params(layer: Module, which: Filter) -> Iterator[tuple[Path, Param[Any]]]:
    """Yields the parameters in a layer that a filter matches, each once, with their paths.

    Example:
        >>> from weft import nnx
        >>> from weft.nnx.nn.linear import Linear
        >>> [path for path, _ in params(Linear(3, 2, rngs=nnx.Rngs(0)), ...)]
        [('bias',), ('kernel',)]
    """
    matches = to_predicate(which)
    found = ((path, x) for path, x in iter_graph(layer) if isinstance(x, Param))
    return ((path, x) for path, x in found if matches(path, x))


def _name(layer: Module) -> str:
    return type(layer).__name__
