"""Feed-forward layer of a transformer: two linear maps with an activation between them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from weft.config import (
    REQUIRED,
    FunctionConfigBase,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
)
from weft.errors import LayerConfigError
from weft.functional import get_activation_fn
from weft.hierarchy.linear import Linear
from weft.hierarchy.module import Module
from weft.hierarchy.residual import ResidualLayer
from weft.typing import Tensor


def scaled_hidden_dim(scale: float = 4) -> FunctionConfigBase:
    """Returns a hidden dimension of `scale` times the input dimension, rounded.

    Example:
      >>> scaled_hidden_dim(2.5).set(input_dim=8).instantiate()
      20
    """
    return config_for_function(_scale_dim).set(scale=scale)


def _scale_dim(input_dim: int, *, scale: float) -> int:
    return round(input_dim * scale)


class TransformerFeedForwardLayer(ResidualLayer):
    """Residual layer with the branch `linear2(activation(linear1(x)))`, gated with two activations.

    Gated means `linear2(activation0(linear1_0(x)) * activation1(linear1_1(x)))` (Shazeer, 2020).
    """

    @config_class
    class Config(ResidualLayer.Config):
        """Configures a TransformerFeedForwardLayer.

        Attributes:
          input_dim: the size of input and output.
          hidden_dim: the size between the linear maps, or a function of `input_dim`, such as
            `scaled_hidden_dim(4)`.
          activation: the name of the activation, such as "nn.gelu"; two names for a gated layer,
            such as ("nn.silu", "linear").
          hidden_dropout: between activation and `linear2`; None for that of the branch, or for
            none with structure="postnorm".
          residual_weight: a factor of the branch.
          add_dead_neuron_summary: whether to report, per activation, the number of hidden
            dimensions that are 0 for all inputs.
          add_value_rms_norm_summary: values whose root mean square to report: "linear1_outputs",
            "linear2_outputs".
        """

        input_dim: Required[int] = REQUIRED
        hidden_dim: Required[int | FunctionConfigBase] = REQUIRED
        linear1: InstantiableConfig = Linear.default_config().set(
            param_partition_spec=(None, "model")
        )
        activation: str | tuple[str, str] = "nn.relu"
        linear2: InstantiableConfig = Linear.default_config().set(
            param_partition_spec=("model", None)
        )
        hidden_dropout: InstantiableConfig | None = None
        residual_weight: float = 1.0
        add_dead_neuron_summary: bool | None = None
        add_value_rms_norm_summary: Sequence[str] = []

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        names = cfg.add_value_rms_norm_summary
        if unknown := set(names) - {"linear1_outputs", "linear2_outputs"}:
            raise LayerConfigError(
                f"{self.path()}: add_value_rms_norm_summary has {sorted(unknown)}; expected "
                "'linear1_outputs' or 'linear2_outputs'."
            )
        hidden_dim: Any = cfg.hidden_dim
        if not isinstance(hidden_dim, int):
            hidden_dim = hidden_dim.set(input_dim=cfg.input_dim).instantiate()
        self._add_norms(cfg.input_dim)
        linear1 = cfg.linear1.set(input_dim=cfg.input_dim, output_dim=hidden_dim)
        if isinstance(cfg.activation, str):
            self._activations = {"linear1": cfg.activation}
        else:
            self._activations = {f"linear1_{i}": name for i, name in enumerate(cfg.activation)}
        for name in self._activations:
            self._add_child(name, linear1)
        self._add_child("linear2", cfg.linear2.set(input_dim=hidden_dim, output_dim=cfg.input_dim))
        # With the norm after the sum, only the branch's output is dropped.
        if cfg.structure == "postnorm" and cfg.hidden_dropout is None:
            self._dropouts = ["dropout"]
        else:
            hidden = cfg.dropout if cfg.hidden_dropout is None else cfg.hidden_dropout
            self._dropouts = ["dropout1", "dropout2"]
            self._add_child("dropout1", hidden)
        self._add_child(self._dropouts[-1], cfg.dropout)
        self._add_child("stochastic_depth", cfg.stochastic_depth)

    def forward(self, inputs: Tensor) -> Tensor:
        """Applies the layer to `Float[Array, "*batch input_dim"]`."""
        cfg = self.config
        self._add_tensor_stats("inputs", inputs)
        skipped, x = self._enter_branch(inputs)
        x = self._linear1_activation(x)
        if len(self._dropouts) == 2:
            x = getattr(self, self._dropouts[0])(x)
        x = self._remat_name(self.linear2(x), "linear2_0")
        self._report("linear2_outputs", x)
        outputs = self._leave_branch(
            skipped, x, dropout=getattr(self, self._dropouts[-1]), weight=cfg.residual_weight
        )
        self._add_tensor_stats("outputs", outputs)
        return outputs

    def _linear1_activation(self, x: Tensor) -> Tensor:
        hidden = None
        for i, (linear, activation) in enumerate(self._activations.items()):
            y = self._remat_name(getattr(self, linear)(x), f"linear1_{i}")
            self._report("linear1_outputs" if i == 0 else f"linear1_{i}_outputs", y)
            y = get_activation_fn(activation)(y)
            if self.config.add_dead_neuron_summary:
                largest = jnp.max(jnp.abs(y), axis=tuple(range(y.ndim - 1)))
                self.add_summary(f"dead_neurons/{i}_{activation}", jnp.sum(largest == 0))
            hidden = y if hidden is None else hidden * y
        assert hidden is not None  # there is at least one activation
        return hidden

    def _report(self, name: str, value: Tensor) -> None:
        self._add_tensor_stats(name, value)
        if name in self.config.add_value_rms_norm_summary:
            self.add_summary(f"rms_norm/{name}", jnp.sqrt(jnp.mean(jnp.square(value))))
