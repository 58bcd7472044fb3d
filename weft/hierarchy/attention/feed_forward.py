"""Residual layers, and the feed-forward layer of a transformer.

Dropout and stochastic depth apply to the branch after its norms, right before the sum.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from weft import config, errors, functional
from weft.config import (
    REQUIRED,
    FunctionConfigBase,
    InstantiableConfig,
    Required,
)
from weft.hierarchy import base_layer, parameter_spec
from weft.hierarchy.layers import linear, normalization
from weft.hierarchy.module import Module
from weft.typing import ActivationName, FeedForwardStructure, Tensor


class NormPosition(enum.Enum):
    """Position of a norm in a residual block."""

    IN_NORM = "in_norm"
    """Before the branch."""
    RES_NORM = "res_norm"
    """After the branch, before the sum."""
    OUT_NORM = "out_norm"
    """After the sum."""


_IN, _RES, _OUT = (
    NormPosition.IN_NORM,
    NormPosition.RES_NORM,
    NormPosition.OUT_NORM,
)

# Names of the children by structure and position.
_NORMS: dict[str, dict[NormPosition, str]] = {
    "prenorm": {_IN: "norm"},
    "postnorm": {_OUT: "norm"},
    "hybridnorm": {_IN: "prenorm", _RES: "postnorm"},
    "hybridnorm_v2": {_IN: "prenorm", _RES: "postnorm"},
    "v2": {position: position.value for position in NormPosition},
    "nonorm": {},
}


class ResidualLayer(base_layer.BaseLayer):
    """Base of layers with a skip connection.

    A subclass adds norms with `_add_norms` and dropouts with `_add_dropouts`, and computes its
    branch between `_enter_branch` and `_leave_branch`.
    """

    class Config(base_layer.BaseLayer.Config):
        """Configures a ResidualLayer."""

        structure: FeedForwardStructure = "prenorm"
        """Placement of norms around the branch f: "prenorm", `x + f(norm(x))`; "postnorm",
        `norm(x + f(x))`; "hybridnorm", `x + postnorm(f(prenorm(x)))`; "hybridnorm_v2",
        `z + postnorm(f(z))` with `z = prenorm(x)`; "v2", `out_norm(x + res_norm(f(in_norm(x))))`,
        each norm optional; "nonorm", `f(x)`, with the skip connection elsewhere."""
        norm: InstantiableConfig | dict[NormPosition, InstantiableConfig] = (
            normalization.LayerNorm.default_config()
        )
        """Config of all norms, or one per position. With the structure "v2", only the given
        positions have norms."""
        dropout: InstantiableConfig = linear.Dropout.default_config()
        stochastic_depth: InstantiableConfig = (
            linear.StochasticDepth.default_config()
        )
        residual_gate_init: float | None = None
        """Initial value of a learned θ that weighs the input by `sqrt(1 - g²)` and the branch by
        `g = sigmoid(θ)` in their sum; None for no weights."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.structure not in _NORMS:
            raise errors.LayerConfigError(
                f"{self.path()}: structure={cfg.structure!r} is unknown; expected one of "
                f"{', '.join(_NORMS)}."
            )
        self._norms: dict[NormPosition, str] = {}

    def _add_norms(self, dim: int) -> None:
        cfg = self.config
        norm_names = _NORMS[cfg.structure]
        norms: dict[NormPosition, InstantiableConfig] = cfg.norm
        if not isinstance(norms, dict):
            norms = dict.fromkeys(norm_names, cfg.norm)
        if cfg.structure == "v2":
            if not isinstance(cfg.norm, dict):
                raise errors.LayerConfigError(
                    f"{self.path()}: structure='v2' needs a dict of norms by position, such as "
                    "{NormPosition.IN_NORM: RMSNorm.default_config()}, but norm is one config."
                )
        elif norms.keys() != norm_names.keys():
            raise errors.LayerConfigError(
                f"{self.path()}: structure={cfg.structure!r} has norms at "
                f"{', '.join(map(str, norm_names))}, but norm has {', '.join(map(str, norms))}."
            )
        for position, norm in norms.items():
            self._norms[position] = norm_names[position]
            self._add_child(norm_names[position], norm.clone(input_dim=dim))

    def _add_dropouts(self, hidden: InstantiableConfig | None = None) -> None:
        """Adds the dropouts of the branch, and `dropout1` for its hidden dimensions if given."""
        if hidden is None:
            self._add_child("dropout", self.config.dropout)
        else:
            self._add_child("dropout1", hidden)
            self._add_child("dropout2", self.config.dropout)
        self._add_child("stochastic_depth", self.config.stochastic_depth)

    def _create_layer_parameter_specs(
        self,
    ) -> dict[str, base_layer.ParameterSpec]:
        init = self.config.residual_gate_init
        if init is None:
            return {}
        return {
            "residual_gate_theta": parameter_spec.constant_spec(
                (), init, mesh_axes=()
            )
        }

    def _normalize(self, position: NormPosition, x: Tensor) -> Tensor:
        if position not in self._norms:
            return x
        norm = getattr(self, self._norms[position])
        return norm(x)

    def _enter_branch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what skips the branch, and the branch's input."""
        normalized = self._normalize(_IN, x)
        if self.config.structure == "hybridnorm_v2":
            return normalized, normalized
        return x, normalized

    def _leave_branch(
        self, skipped: Tensor, y: Tensor, *, weight: float = 1.0
    ) -> Tensor:
        """Returns the layer's output for a branch output `y`, which is scaled by `weight`."""
        dropout = (
            self.dropout2 if "dropout2" in self._children else self.dropout
        )
        y = dropout(self._normalize(_RES, y))
        y = self.stochastic_depth(y)
        if weight != 1:
            y = y * weight
        if self.config.residual_gate_init is not None:
            gate = jax.nn.sigmoid(self.parameters["residual_gate_theta"])
            y = y * gate.astype(y.dtype)
            skipped = skipped * jnp.sqrt(1 - jnp.square(gate)).astype(
                skipped.dtype
            )
        if self.config.structure == "nonorm":
            return y
        return self._normalize(_OUT, skipped + y)


def scaled_hidden_dim(scale: float = 4) -> FunctionConfigBase:
    """Returns a hidden dimension of `scale` times the input dimension, rounded.

    >>> scaled_hidden_dim(2.5).set(input_dim=8).instantiate()
    20
    """
    return config.config_for_function(scale_dim).set(scale=scale)


def scale_dim(input_dim: int, *, scale: float) -> int:
    """Returns `scale * input_dim`, rounded."""
    return round(input_dim * scale)


def hidden_dim_of(cfg: Any) -> int:
    """Returns the hidden dimension of a feed-forward layer's config."""
    if isinstance(cfg.hidden_dim, int):
        return cfg.hidden_dim
    return cfg.hidden_dim.set(input_dim=cfg.input_dim).instantiate()


class TransformerFeedForwardLayer(ResidualLayer):
    """Residual layer with the branch `linear2(activation(linear1(x)))`, gated with two activations.

    Gated means `linear2(activation0(linear1_0(x)) * activation1(linear1_1(x)))` (Shazeer, 2020).
    """

    class Config(ResidualLayer.Config):
        """Configures a TransformerFeedForwardLayer."""

        input_dim: Required[int] = REQUIRED
        hidden_dim: Required[int | FunctionConfigBase] = REQUIRED
        """The size between the linear maps, or a function of `input_dim`, such as
        `scaled_hidden_dim(4)`."""
        linear1: InstantiableConfig = linear.Linear.default_config().set(
            param_partition_spec=(None, "model")
        )
        activation: ActivationName | tuple[ActivationName, ActivationName] = (
            "nn.relu"
        )
        """The name of the activation, such as "nn.gelu"; two names for a gated layer, such as
        ("nn.silu", "linear")."""
        linear2: InstantiableConfig = linear.Linear.default_config().set(
            param_partition_spec=("model", None)
        )
        hidden_dropout: InstantiableConfig | None = None
        """Dropout between activation and `linear2`; None for that of the branch, or for none with
        structure="postnorm"."""
        residual_weight: float = 1.0
        add_dead_neuron_summary: bool | None = None
        """Whether to report, per activation, the number of hidden dimensions that are 0 for all
        inputs."""
        add_value_rms_norm_summary: Sequence[str] = []
        """Values whose root mean square to report: "linear1_outputs", "linear2_outputs"."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        value_names = {"linear1_outputs", "linear2_outputs"}
        unknown_names = sorted(
            set(cfg.add_value_rms_norm_summary) - value_names
        )
        if unknown_names:
            raise errors.LayerConfigError(
                f"{self.path()}: add_value_rms_norm_summary has {unknown_names}; expected "
                "'linear1_outputs' or 'linear2_outputs'."
            )
        hidden_dim = hidden_dim_of(cfg)
        self._add_norms(cfg.input_dim)
        linear1 = cfg.linear1.set(
            input_dim=cfg.input_dim, output_dim=hidden_dim
        )
        self._activations: dict[str, ActivationName] = {}
        if isinstance(cfg.activation, str):
            self._activations["linear1"] = cfg.activation
        else:
            for i, activation in enumerate(cfg.activation):
                self._activations[f"linear1_{i}"] = activation
        for name in self._activations:
            self._add_child(name, linear1)
        self._add_child(
            "linear2",
            cfg.linear2.set(input_dim=hidden_dim, output_dim=cfg.input_dim),
        )
        hidden_dropout = cfg.hidden_dropout
        # With the norm after the sum, only the branch's output is dropped.
        if hidden_dropout is None and cfg.structure != "postnorm":
            hidden_dropout = cfg.dropout
        self._add_dropouts(hidden_dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Applies the layer to `Float[Array, "*batch input_dim"]`."""
        inputs = self._add_tensor_stats("inputs", inputs)
        skipped, x = self._enter_branch(inputs)
        x = self._linear1_activation(x)
        if "dropout1" in self._children:
            x = self.dropout1(x)
        x = self._remat_name(self.linear2(x), "linear2_0")
        self._report("linear2_outputs", x)
        outputs = self._leave_branch(
            skipped, x, weight=self.config.residual_weight
        )
        return self._add_tensor_stats("outputs", outputs)

    def _linear1_activation(self, x: Tensor) -> Tensor:
        factors: list[Tensor] = []
        for i, (name, activation) in enumerate(self._activations.items()):
            linear1 = getattr(self, name)
            y = self._remat_name(linear1(x), f"linear1_{i}")
            self._report(
                "linear1_outputs" if i == 0 else f"linear1_{i}_outputs", y
            )
            activation_fn = functional.get_activation_fn(activation)
            y = activation_fn(y)
            if self.config.add_dead_neuron_summary:
                largest = jnp.max(jnp.abs(y), axis=tuple(range(y.ndim - 1)))
                self.add_summary(
                    f"dead_neurons/{i}_{activation}", jnp.sum(largest == 0)
                )
            factors.append(y)
        # One factor, or the two of a gated layer.
        return math.prod(factors[1:], start=factors[0])

    def _report(self, name: str, value: Tensor) -> None:
        self._add_tensor_stats(name, value)
        if name in self.config.add_value_rms_norm_summary:
            self.add_summary(
                f"rms_norm/{name}", jnp.sqrt(jnp.mean(jnp.square(value)))
            )
