"""Residual branches and the placement of their norms.

    structure        y =
    "prenorm"        x + f(norm(x))
    "postnorm"       norm(x + f(x))
    "hybridnorm"     x + postnorm(f(prenorm(x)))
    "hybridnorm_v2"  z + postnorm(f(z))  with  z = prenorm(x)
    "v2"             out_norm(x + res_norm(f(in_norm(x)))), each norm optional
    "nonorm"         f(x), with the skip connection elsewhere

Dropout and stochastic depth apply to the branch after its norms, right before the sum.
"""

import enum
from typing import Any

from weft.config import InstantiableConfig, config_class
from weft.errors import LayerConfigError
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.dropout import Dropout, StochasticDepth
from weft.hierarchy.module import Module
from weft.hierarchy.normalization import LayerNorm
from weft.hierarchy.param_init import constant_initializer
from weft.typing import Tensor


class NormPosition(enum.Enum):
    """Position of a norm."""

    IN_NORM = "in_norm"
    """Before the branch."""
    RES_NORM = "res_norm"
    """After the branch, before the sum."""
    OUT_NORM = "out_norm"
    """After the sum."""


_IN, _RES, _OUT = NormPosition.IN_NORM, NormPosition.RES_NORM, NormPosition.OUT_NORM

# Names of the children by structure and position.
_NORMS: dict[str, dict[NormPosition, str]] = {
    "prenorm": {_IN: "norm"},
    "postnorm": {_OUT: "norm"},
    "hybridnorm": {_IN: "prenorm", _RES: "postnorm"},
    "hybridnorm_v2": {_IN: "prenorm", _RES: "postnorm"},
    "v2": {position: position.value for position in NormPosition},
    "nonorm": {},
}


class ResidualLayer(BaseLayer):
    """Base of layers with a skip connection.

    A subclass adds norms with `_add_norms` and computes its branch between `_enter_branch` and
    `_leave_branch`.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a ResidualLayer.

        Attributes:
          structure: placement of norms; see the table in the module docstring.
          norm: config of all norms, or one per position. With the structure "v2", only the given
            positions have norms.
          dropout: dropout of the branch.
          stochastic_depth: drops the whole branch.
          residual_gate_init: initial value of a learned factor of the branch; None for no factor.
        """

        structure: str = "prenorm"
        norm: InstantiableConfig | dict[NormPosition, InstantiableConfig] = (
            LayerNorm.default_config()
        )
        dropout: InstantiableConfig = Dropout.default_config()
        stochastic_depth: InstantiableConfig = StochasticDepth.default_config()
        residual_gate_init: float | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.structure not in _NORMS:
            raise LayerConfigError(
                f"{self.path()}: structure={cfg.structure!r} is unknown; expected one of "
                f"{', '.join(_NORMS)}."
            )
        self._norms: dict[NormPosition, str] = {}

    def _add_norms(self, dim: int) -> None:
        """Adds a child for each norm, of vectors of size `dim`."""
        cfg = self.config
        wanted = _NORMS[cfg.structure]
        given: Any = cfg.norm if isinstance(cfg.norm, dict) else dict.fromkeys(wanted, cfg.norm)
        by_choice = cfg.structure == "v2"
        if by_choice and not isinstance(cfg.norm, dict):
            raise LayerConfigError(
                f"{self.path()}: structure='v2' needs a dict of norms by position, such as "
                "{NormPosition.IN_NORM: RMSNorm.default_config()}, but norm is one config."
            )
        if not by_choice and given.keys() != wanted.keys():
            raise LayerConfigError(
                f"{self.path()}: structure={cfg.structure!r} has norms at "
                f"{', '.join(map(str, wanted))}, but norm has {', '.join(map(str, given))}."
            )
        for position, norm in given.items():
            self._norms[position] = wanted[position]
            self._add_child(wanted[position], norm.clone(input_dim=dim))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        init = self.config.residual_gate_init
        if init is None:
            return {}
        gate = ParameterSpec(
            shape=(), mesh_axes=(), initializer=constant_initializer(init), weight_decay_scale=0.0
        )
        return {"residual_gate": gate}

    def _normalize(self, position: NormPosition, x: Tensor) -> Tensor:
        return getattr(self, self._norms[position])(x) if position in self._norms else x

    def _enter_branch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the skipped value and the branch's input."""
        normalized = self._normalize(_IN, x)
        return (normalized if self.config.structure == "hybridnorm_v2" else x), normalized

    def _leave_branch(
        self, skipped: Tensor, y: Tensor, *, dropout: Any, weight: float = 1.0
    ) -> Tensor:
        """Returns the layer's output for a branch output `y`, which is scaled by `weight`."""
        y = self.stochastic_depth(dropout(self._normalize(_RES, y)))
        y = y if weight == 1 else y * weight
        if self.config.residual_gate_init is not None:
            y = y * self.parameters["residual_gate"].astype(y.dtype)
        if self.config.structure == "nonorm":
            return y
        return self._normalize(_OUT, skipped + y)
