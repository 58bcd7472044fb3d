"""Norms and scales of queries and keys before their inner product.

Scaling queries by 1/sqrt(per_head_dim) is cheaper than scaling logits; keys may take part of it.
"""

from collections.abc import Callable
from typing import Any

from weft.config import REQUIRED, InstantiableConfig, Required, config_for_function
from weft.functional import per_dim_scale
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.module import Module
from weft.hierarchy.parameter_spec import constant_spec
from weft.typing import Tensor

ScaleFn = Callable[[int], float]
"""Factor of queries or keys as a function of `per_head_dim`."""


def constant_scale_fn(value: float) -> ScaleFn:
    """Returns a ScaleFn with the same factor for every dimension.

    >>> constant_scale_fn(2.0)(64)
    2.0
    """

    def scale(per_head_dim: int) -> float:
        del per_head_dim
        return value

    return scale


def pow_scale_fn(exp: float) -> ScaleFn:
    """Returns a ScaleFn that is a power of the dimension.

    >>> pow_scale_fn(-0.5)(64)
    0.125
    """
    return lambda per_head_dim: per_head_dim**exp


class PerDimScale(BaseLayer):
    """Learned positive factor for each dimension, initially 1."""

    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED
        param_partition_spec: Any = (None,)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        return {"param": constant_spec((cfg.dim,), mesh_axes=cfg.param_partition_spec)}

    def forward(self, x: Tensor) -> Tensor:
        """Scales the last axis, of size `dim`."""
        return per_dim_scale(x, self.parameters["param"])


class BaseScaleQK(BaseLayer):
    """Base of scales of queries or keys."""

    class Config(BaseLayer.Config):
        per_head_dim: Required[int] = REQUIRED

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        """Scales queries or keys, `Float[Array, "batch time heads per_head_dim"]`.

        Scales that depend on positions use `positions`, `Int[Array, "#batch time"]`.
        """
        raise NotImplementedError(type(self))


class _NormAndScale(BaseScaleQK):
    """Base of scales with a norm and a factor, the fields `norm` and `scale_factor`."""

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        """Returns the default of `scale_factor`."""
        raise NotImplementedError

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        scale_factor = cfg.scale_factor or self.default_scale_factor_config()
        self._scale = scale_factor.instantiate()(cfg.per_head_dim)
        self._maybe_add_child("norm", cfg.norm, input_dim=cfg.per_head_dim)

    def apply_norm(self, proj: Tensor) -> Tensor:
        """Normalizes if a norm is configured."""
        return proj if self.config.norm is None else self.norm(proj)

    def apply_scale_factor(self, proj: Tensor) -> Tensor:
        return proj * self._scale


class ScaleQuery(_NormAndScale):
    """Norm, learned scale per dimension and factor of queries, in this order."""

    class Config(BaseScaleQK.Config):
        """Configures a ScaleQuery; `scale_factor` None is `per_head_dim ** -0.5`."""

        norm: InstantiableConfig | None = None
        per_dim_scale: PerDimScale.Config | None = None
        scale_factor: InstantiableConfig[ScaleFn] | None = None

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        return config_for_function(pow_scale_fn).set(exp=-0.5)

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._maybe_add_child("per_dim_scale", cfg.per_dim_scale, dim=cfg.per_head_dim)

    def apply_per_dim_scale(self, proj: Tensor) -> Tensor:
        """Scales each dimension if a `per_dim_scale` is configured."""
        return proj if self.config.per_dim_scale is None else self.per_dim_scale(proj)

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        del positions
        return self.apply_scale_factor(self.apply_per_dim_scale(self.apply_norm(proj)))


class ScaleKey(_NormAndScale):
    """Norm and factor of keys."""

    class Config(BaseScaleQK.Config):
        """Configures a ScaleKey; `scale_factor` None is 1."""

        norm: InstantiableConfig | None = None
        scale_factor: InstantiableConfig[ScaleFn] | None = None

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        return config_for_function(constant_scale_fn).set(value=1.0)

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        del positions
        return self.apply_norm(proj) * self._scale
