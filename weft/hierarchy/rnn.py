"""Recurrent layers.

A cell maps its state and the input of one time step to the next state and an output:

    states = cell.init_states(batch_size=b)
    states, y[t] = cell.extend_step(inputs=x[t], cached_states=states)

`cell(x)` does so for all steps of a sequence, in a scan whose steps share the parameters. Sequences
are time-major: axis 0 is time. Stacks of cells are cells.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from weft import errors, struct
from weft.config import REQUIRED, InstantiableConfig, Required
from weft.functional.arrays import gathered, sharded_as
from weft.functional.recurrent import lstm_step, sharded_as_steps
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.layers.linear import Linear, MultiLinear
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.repeat import Repeat
from weft.hierarchy.transforms import scan_in_context
from weft.typing import NestedTensor, Tensor


class BaseRNNCell(BaseLayer):
    """Base of cells. A subclass defines `init_states` and `extend_step`.

    >>> from weft.hierarchy.module import functional
    >>> class Sum(BaseRNNCell):
    ...     def init_states(self, *, batch_size):
    ...         return jnp.zeros((batch_size, self.output_dim))
    ...     def extend_step(self, *, inputs, cached_states):
    ...         return cached_states + inputs, cached_states + inputs
    >>> cell = Sum.default_config().set(name="sum", input_dim=1).instantiate(parent=None)
    >>> x = jnp.arange(4.0).reshape(4, 1, 1)
    >>> y, _ = functional(cell, prng_key=None, state={}, inputs=[x], is_training=False)
    >>> y.ravel().tolist()
    [0.0, 1.0, 3.0, 6.0]
    """

    class Config(BaseLayer.Config):
        """Configures a BaseRNNCell; `output_dim` None is `input_dim`."""

        input_dim: Required[int] = REQUIRED
        output_dim: int | None = None

    @property
    def output_dim(self) -> int:
        """Size of outputs."""
        cfg = self.config
        return cfg.input_dim if cfg.output_dim is None else cfg.output_dim

    @nowrap
    def init_states(self, *, batch_size: int) -> NestedTensor:
        """Returns the state before the first step."""
        raise NotImplementedError(type(self))

    def extend_step(
        self, *, inputs: Tensor, cached_states: NestedTensor
    ) -> tuple[NestedTensor, Tensor]:
        """Computes one step.

        Args:
          inputs: `Float[Array, "batch input_dim"]`.
          cached_states: the state before, of `init_states` or the previous step.

        Returns the state after and the output, `Float[Array, "batch output_dim"]`.
        """
        raise NotImplementedError(type(self))

    def forward(self, time_major_inputs: Tensor) -> Tensor:
        """Maps `Float[Array, "time batch input_dim"]` to `Float[Array, "time batch output_dim"]`.

        Summaries of the steps are averaged under "step".
        """

        def step(
            states: NestedTensor, x: Tensor
        ) -> tuple[NestedTensor, Tensor]:
            return self.extend_step(inputs=x, cached_states=states)

        xs = gathered(time_major_inputs, 0)
        states = sharded_as_steps(
            xs, self.init_states(batch_size=xs.shape[1]), axis=0
        )
        _, outputs = scan_in_context(
            step,
            carry=states,
            xs=xs,
            child_name_prefix="step",
            merge_summaries=True,
        )
        return outputs


class IdentityCell(BaseRNNCell):
    """Cell without a state that returns its inputs."""

    def __init__(self, cfg: BaseRNNCell.Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_output_dim(self, cfg.output_dim, cfg.input_dim)

    def init_states(self, *, batch_size: int) -> NestedTensor:
        return {}

    def extend_step(
        self, *, inputs: Tensor, cached_states: NestedTensor
    ) -> tuple[NestedTensor, Tensor]:
        return cached_states, inputs


class LSTMCell(BaseRNNCell):
    """Long short-term memory, `functional.recurrent.lstm_step` (Hochreiter and Schmidhuber, 1997).

    Children: `input_proj`, a map of the inputs and of the output before, concatenated, to the
    candidate, forget gate, input gate and output gate; `norm` and `output_proj`. The state is the
    memory `c` and the output `m`.
    """

    class Config(BaseRNNCell.Config):
        """Configures an LSTMCell."""

        hidden_dim: int | None = None
        """Size of the memory; None for `output_dim`."""
        max_cell_value: float | None = None
        """Bound of the absolute value of the memory; None for none."""
        input_proj: InstantiableConfig = MultiLinear.default_config().set(
            bias=False
        )
        """Linear map to the gates."""
        hidden_proj: InstantiableConfig | None = None
        """Linear map of the output before, of its own, as in Weft 0.2. The gates are then input
        gate, forget gate, candidate and output gate."""
        norm: InstantiableConfig | None = None
        """Normalization of each gate before its activation (Ba et al., 2016); with `hidden_proj`,
        of all gates together."""
        output_proj: Linear.Config | None = Linear.default_config().set(
            bias=False
        )
        """Linear map to `output_dim` (Sak et al., 2014), where `hidden_dim` is set."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        hidden_dim, output_dim = (
            cfg.hidden_dim or self.output_dim,
            self.output_dim,
        )
        if hidden_dim != output_dim and cfg.output_proj is None:
            raise errors.LayerConfigError(
                f"{self.path()}: hidden_dim={hidden_dim} differs from output_dim={output_dim}, and "
                "output_proj is None; set it to Linear.default_config().set(bias=False)."
            )
        self._hidden_dim = hidden_dim
        input_dim, norm_dim = cfg.input_dim + output_dim, hidden_dim
        if cfg.hidden_proj is not None:
            input_dim, norm_dim = cfg.input_dim, 4 * hidden_dim
        gates: dict[str, Any] = {"num_outputs": 4, "output_dim": hidden_dim}
        self._add_child(
            "input_proj", cfg.input_proj.set(input_dim=input_dim, **gates)
        )
        self._maybe_add_child(
            "hidden_proj", cfg.hidden_proj, input_dim=output_dim, **gates
        )
        self._maybe_add_child("norm", cfg.norm, input_dim=norm_dim)
        if cfg.hidden_dim is not None:
            dims = {"input_dim": hidden_dim, "output_dim": output_dim}
            self._maybe_add_child("output_proj", cfg.output_proj, **dims)

    def init_states(self, *, batch_size: int) -> NestedTensor:
        """Returns zeros: `c`, `(batch, hidden_dim)`, and `m`, `(batch, output_dim)`."""
        sizes = {"c": self._hidden_dim, "m": self.output_dim}
        return {
            name: jnp.zeros((batch_size, n), self.dtype())
            for name, n in sizes.items()
        }

    def extend_step(
        self, *, inputs: Tensor, cached_states: Any
    ) -> tuple[NestedTensor, Tensor]:
        c, m, dtype = cached_states["c"], cached_states["m"], inputs.dtype
        gates = self._gates(inputs, m.astype(dtype))
        new_c, y = lstm_step(
            c, *gates, max_cell_value=self.config.max_cell_value
        )
        y = y.astype(dtype)
        if "output_proj" in self.children:
            y = self.output_proj(y)
        return {"c": new_c.astype(c.dtype), "m": y.astype(m.dtype)}, y

    def _gates(self, x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        """Returns input gate, forget gate, candidate and output gate before their activations."""
        if "hidden_proj" in self.children:
            gates = self.input_proj(x) + self.hidden_proj(m)
            if "norm" in self.children:
                gates = self.norm(gates.reshape(*gates.shape[:-2], -1)).reshape(
                    gates.shape
                )
            return jnp.unstack(gates, axis=-2)
        x = gathered(x, -1)
        gates = self.input_proj(jnp.concatenate([x, sharded_as(m, x)], axis=-1))
        if "norm" in self.children:
            gates = self.norm(gates)
        # The order in which AXLearn's checkpoints have them.
        candidate, forget_gate, input_gate, output_gate = jnp.unstack(
            gates, axis=-2
        )
        return input_gate, forget_gate, candidate, output_gate


class StackedRNNLayer(BaseRNNCell):
    """Stack of cells "layer0", "layer1", and so on; the outputs of each are inputs of the next."""

    class Config(BaseRNNCell.Config):
        """Configures a StackedRNNLayer; each cell gets its `input_dim` from the one before."""

        layers: Required[Sequence[BaseRNNCell.Config]] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim
        for i, layer in enumerate(cfg.layers):
            dim = self._add_child(
                f"layer{i}", layer.clone(input_dim=dim)
            ).output_dim
        self._output_dim = dim
        _check_output_dim(self, cfg.output_dim, dim)

    @property
    def output_dim(self) -> int:
        return self._output_dim

    def init_states(self, *, batch_size: int) -> NestedTensor:
        """Returns the states of all cells by their names."""
        return {
            name: cell.init_states(batch_size=batch_size)
            for name, cell in self._cells()
        }

    def _cells(self) -> list[tuple[str, Any]]:
        names = [f"layer{i}" for i in range(len(self.config.layers))]
        return [(name, self.children[name]) for name in names]

    def extend_step(
        self, *, inputs: Tensor, cached_states: Any
    ) -> tuple[NestedTensor, Tensor]:
        states, x = {}, inputs
        for name, cell in self._cells():
            states[name], x = cell.extend_step(
                inputs=x, cached_states=cached_states[name]
            )
        return states, x

    def forward(self, time_major_inputs: Tensor) -> Tensor:
        x = time_major_inputs
        for _, cell in self._cells():
            x = cell(x)
        return x


class RNNRepeat(Repeat):
    """Loop of a RepeatedRNNLayer."""

    def forward(self, time_major_inputs: Tensor) -> Tensor:
        """Applies all cells to a whole sequence."""
        # The inputs of each cell have the sharding of its outputs.
        x = gathered(time_major_inputs, 0, -1)
        return self._run(lambda x, _: (self.layer(x), None), x).carry

    def extend_step(
        self, *, inputs: Tensor, cached_states: Any
    ) -> tuple[NestedTensor, Tensor]:
        """Computes one step of all cells."""

        def step(x: Tensor, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
            state, x = self.layer.extend_step(inputs=x, cached_states=state)
            return x, state

        x, states = self._run(step, inputs, xs=cached_states["layer"])
        return struct.VDict(layer=states), x


class RepeatedRNNLayer(BaseRNNCell):
    """Stack of equal cells whose parameters have a leading axis, in the child "repeat"."""

    class Config(BaseRNNCell.Config):
        """Configures a RepeatedRNNLayer of `num_layers` cells that keep the size of their input."""

        layer: Required[BaseRNNCell.Config] = REQUIRED
        num_layers: Required[int] = REQUIRED
        repeat: Repeat.Config = RNNRepeat.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_output_dim(self, cfg.output_dim, cfg.input_dim)
        layer = cfg.layer.clone(input_dim=cfg.input_dim)
        self._add_child(
            "repeat", cfg.repeat.set(layer=layer, num_layers=cfg.num_layers)
        )
        _check_output_dim(self, self.repeat.layer.output_dim, cfg.input_dim)

    def init_states(self, *, batch_size: int) -> NestedTensor:
        """Returns the stacked states of all cells."""
        return {"repeat": self.repeat.init_states(batch_size=batch_size)}

    def extend_step(
        self, *, inputs: Tensor, cached_states: Any
    ) -> tuple[NestedTensor, Tensor]:
        states, y = self.repeat.extend_step(
            inputs=inputs, cached_states=cached_states["repeat"]
        )
        return {"repeat": states}, y

    def forward(self, time_major_inputs: Tensor) -> Tensor:
        return self.repeat(time_major_inputs)


def _check_output_dim(
    cell: BaseRNNCell, output_dim: int | None, expected: int
) -> None:
    if output_dim not in (None, expected):
        raise errors.LayerConfigError(
            f"{cell.path()}: output_dim={output_dim}, but the outputs of this "
            f"{type(cell).__name__} have the size {expected}; set output_dim to {expected} or None."
        )
