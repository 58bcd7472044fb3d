"""What happens to queries and keys before they meet: norms and scales.

Attention divides logits by the square root of the dimension of a head; here queries are multiplied
by it beforehand, which is cheaper, and keys may take a part of it.
"""

from collections.abc import Callable
from typing import Any

from weft.config import REQUIRED, InstantiableConfig, Required, config_class, config_for_function
from weft.functional import per_dim_scale
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.module import Module
from weft.hierarchy.param_init import constant_initializer
from weft.typing import Tensor

ScaleFn = Callable[[int], float]
"""The factor of queries or keys for a dimension of each head."""


def constant_scale_fn(value: float) -> ScaleFn:
    """The same factor for every dimension.

    Args:
      value: the factor.

    Example:
      >>> constant_scale_fn(2.0)(64)
      2.0
    """

    def scale(per_head_dim: int) -> float:
        del per_head_dim
        return value

    return scale


def pow_scale_fn(exp: float) -> ScaleFn:
    """A power of the dimension.

    Args:
      exp: the exponent.

    Example:
      >>> pow_scale_fn(-0.5)(64)
      0.125
    """
    return lambda per_head_dim: per_head_dim**exp


class PerDimScale(BaseLayer):
    """A learned factor for each dimension, positive and 1 at first."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a PerDimScale.

        Attributes:
          dim: the number of dimensions.
        """

        dim: Required[int] = REQUIRED

    @classmethod
    def default_config(cls) -> Any:
        """A config whose parameter is on every device."""
        return super().default_config().set(param_partition_spec=(None,))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        return {
            "param": ParameterSpec(
                shape=(cfg.dim,),
                mesh_axes=cfg.param_partition_spec,
                initializer=constant_initializer(0.0),
                weight_decay_scale=0.0,
            )
        }

    def forward(self, x: Tensor) -> Tensor:
        """Scales.

        Args:
          x: `Float[Array, "*batch dim"]`.
        """
        return per_dim_scale(x, self.parameters["param"])


class BaseScaleQK(BaseLayer):
    """Scales queries or keys."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a BaseScaleQK.

        Attributes:
          per_head_dim: the size of a vector of one head.
        """

        per_head_dim: Required[int] = REQUIRED

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        """Scales.

        Args:
          proj: queries or keys, `Float[Array, "batch time heads per_head_dim"]`.
          positions: theirs, `Int[Array, "#batch time"]`, for a scale that depends on them.
        """
        raise NotImplementedError(type(self))


class ScaleQuery(BaseScaleQK):
    """Queries: a norm, a learned scale for each dimension, a factor, in this order."""

    @config_class
    class Config(BaseScaleQK.Config):
        """Configures a ScaleQuery.

        Attributes:
          norm: over the dimensions of a head; none if None.
          per_dim_scale: learned; none if None.
          scale_factor: makes a `ScaleFn`; `per_head_dim ** -0.5` if None.
        """

        norm: InstantiableConfig | None = None
        per_dim_scale: PerDimScale.Config | None = None
        scale_factor: InstantiableConfig[ScaleFn] | None = None

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        """The factor where the config has none."""
        return config_for_function(pow_scale_fn).set(exp=-0.5)

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        scale_factor = cfg.scale_factor or self.default_scale_factor_config()
        self._scale = scale_factor.instantiate()(cfg.per_head_dim)
        if cfg.norm is not None:
            self._add_child("norm", cfg.norm.set(input_dim=cfg.per_head_dim))
        if cfg.per_dim_scale is not None:
            self._add_child("per_dim_scale", cfg.per_dim_scale.set(dim=cfg.per_head_dim))

    def apply_norm(self, proj: Tensor) -> Tensor:
        """Normalises, if the config asks for it."""
        return proj if self.config.norm is None else self.norm(proj)

    def apply_per_dim_scale(self, proj: Tensor) -> Tensor:
        """Scales each dimension, if the config asks for it."""
        return proj if self.config.per_dim_scale is None else self.per_dim_scale(proj)

    def apply_scale_factor(self, proj: Tensor) -> Tensor:
        """Multiplies by the factor."""
        return proj * self._scale

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        del positions
        return self.apply_scale_factor(self.apply_per_dim_scale(self.apply_norm(proj)))


class ScaleKey(BaseScaleQK):
    """Keys: a norm and a factor."""

    @config_class
    class Config(BaseScaleQK.Config):
        """Configures a ScaleKey.

        Attributes:
          norm: over the dimensions of a head; none if None.
          scale_factor: makes a `ScaleFn`; 1 if None.
        """

        norm: InstantiableConfig | None = None
        scale_factor: InstantiableConfig[ScaleFn] | None = None

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        """The factor where the config has none."""
        return config_for_function(constant_scale_fn).set(value=1.0)

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        scale_factor = cfg.scale_factor or self.default_scale_factor_config()
        self._scale = scale_factor.instantiate()(cfg.per_head_dim)
        if cfg.norm is not None:
            self._add_child("norm", cfg.norm.set(input_dim=cfg.per_head_dim))

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        del positions
        proj = proj if self.config.norm is None else self.norm(proj)
        return proj * self._scale
