"""Normalization of a layer's weights.

The layers wrap another layer, which sees normalized parameters. Statistics and scales of a
parameter are variables of the wrapper, named by the parameter's path, such as `Dense_0/kernel/u`.
`init` returns normalized parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft.errors import ArgumentShapeError
from weft.functional.dtypes import canonicalize_dtype
from weft.functional.initializers import normal, ones
from weft.functional.statistics import Axes
from weft.functional.weight_norm import spectral_norm, weight_features, weight_norm
from weft.linen.initializers import Initializer
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.linen.running import name_of
from weft.linen.transforms import map_variables
from weft.typing import DType

__all__ = ["SpectralNorm", "WeightNorm"]


class SpectralNorm(Module):
    """Division of a layer's weights by their largest singular values (Miyato et al., 2018).

    Applies `functional.weight_norm.spectral_norm` to each parameter with at least two axes, and
    stores its singular value `sigma` and vector `u`.

    Attributes:
        layer_instance: the layer, a submodule of the module that creates it.
        n_steps: number of power iterations per call; 0 leaves the weights unchanged.
        epsilon: added to the squares of norms.
        dtype: dtype of the normalized weights; by default promoted from weights and `u`.
        param_dtype: dtype of the first `u` and `sigma`.
        error_on_non_matrix: whether to reject parameters with more than two axes; otherwise all
            axes but the last are the rows of the matrix.
        collection_name: collection of `u` and `sigma`.

    Example:
        >>> from weft import linen as nn
        >>> layer = nn.SpectralNorm(nn.Dense(4))
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3)), update_stats=False)
        >>> sorted(variables["batch_stats"])
        ['layer_instance/kernel/sigma', 'layer_instance/kernel/u']
        >>> y, updates = layer.apply(
        ...     variables, jnp.ones((1, 3)), update_stats=True, mutable=["batch_stats"]
        ... )
    """

    layer_instance: Module
    n_steps: int = 1
    epsilon: float = 1e-12
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    error_on_non_matrix: bool = False
    collection_name: str = "batch_stats"

    @compact
    def __call__(self, *args: Any, update_stats: bool, **kwargs: Any) -> Any:
        """Calls the layer with the other arguments.

        Args:
            update_stats: whether to store the new `u` and `sigma`, as in training.

        Raises:
            ArgumentShapeError: if a parameter is not a matrix and `error_on_non_matrix` is set.
        """

        def normalized(name: str, weight: Array) -> Array:
            return self._normalized(name, weight, update_stats)

        return _call(self, normalized, args, kwargs)

    def _normalized(self, name: str, weight: Array, update_stats: bool) -> Array:
        if weight.ndim < 2 or self.n_steps < 1:
            return weight
        if weight.ndim > 2 and self.error_on_non_matrix:
            raise ArgumentShapeError(
                f"the parameter {name} has shape {weight.shape} and is not a matrix; set "
                "error_on_non_matrix=False to take all axes but the last as its rows."
            )
        col, dtype = self.collection_name, self.param_dtype
        shape = (1, weight.shape[-1])
        u = self.variable(
            col, f"{name}/u", lambda: normal(1.0)(self.make_rng("params"), shape, dtype)
        )
        sigma = self.variable(col, f"{name}/sigma", jnp.ones, (), dtype)
        options = {"n_steps": self.n_steps, "eps": self.epsilon}
        weight, new_u, new_sigma = spectral_norm(weight, u.value, **options)
        if update_stats:
            u.value, sigma.value = new_u, new_sigma
        return weight.astype(canonicalize_dtype(weight, new_u, dtype=self.dtype))


class WeightNorm(Module):
    """Weight normalization with learned norms (Salimans and Kingma, 2016).

    Applies `functional.weight_norm.weight_norm` to the parameters, with a new parameter `scale`.

    Attributes:
        layer_instance: the layer, a submodule of the module that creates it.
        epsilon: added to the squares of norms.
        dtype: dtype of the normalized weights; by default promoted from weights and scales.
        use_scale: whether to learn scales; otherwise all norms are 1.
        feature_axes: axes whose positions have separate norms; None for one norm per parameter.
        variable_filter: substrings of the paths of parameters to normalize, such as
            `layer_instance/kernel`; None for all parameters.

    Example:
        >>> from weft import linen as nn
        >>> variables = nn.WeightNorm(nn.Dense(4)).init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables["params"])["layer_instance/kernel/scale"]
        (4,)
        >>> kernel = variables["params"]["layer_instance"]["kernel"]
        >>> jnp.linalg.norm(kernel, axis=0).round(3).tolist()
        [1.0, 1.0, 1.0, 1.0]
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
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer with the same arguments.

        Raises:
            ArgumentValueError: if a parameter lacks one of `feature_axes`.
        """
        return _call(self, self._normalized, args, kwargs)

    def _normalized(self, name: str, weight: Array) -> Array:
        parts = tuple(self.variable_filter or ())
        if parts and not any(part in name for part in parts):
            return weight
        scale = None
        if self.use_scale:
            shape = tuple(weight.shape[a] for a in weight_features(weight.shape, self.feature_axes))
            scale = self.param(f"{name}/scale", self.scale_init, shape, self.param_dtype)
        y = weight_norm(weight, scale, feature_axes=self.feature_axes, eps=self.epsilon)
        return y.astype(canonicalize_dtype(y, dtype=self.dtype))


def _call(
    module: Any,
    normalized: Callable[[str, Float[Array, "*shape"]], Float[Array, "*shape"]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls the layer of a module with normalized parameters."""
    layer = module.layer_instance

    def seen(variables: dict[str, Any]) -> dict[str, Any]:
        def of_path(path: Any, weight: Array) -> Array:
            below = jax.tree_util.keystr(path, simple=True, separator="/")
            return normalized(f"{name_of(layer)}/{below}", weight)

        return {
            col: jax.tree_util.tree_map_with_path(of_path, tree) for col, tree in variables.items()
        }

    run = map_variables(
        _run, "params", trans_in_fn=seen, init=module.is_initializing(), mutable=True
    )
    return run(layer, *args, **kwargs)


def _run(layer: Module, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)
