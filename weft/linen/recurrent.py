"""Recurrent cells, and layers that apply them to sequences.

A cell maps a state and an input to the next state and an output; `weft.functional.recurrent` has
the formulas. To use a cell directly, create the first state with `initialize_carry`. The loop of
`RNN` is a lifted scan, so all steps share the cell's parameters; other variables can be carried or
stacked along a new axis. With `seq_lengths`, the returned state is that after a sequence's last
valid position, and later outputs are meaningless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft import functional
from weft.core import FrozenDict, filters
from weft.functional import promote_dtype, recurrent
from weft.functional.initializers import (
    Initializer,
    lecun_normal,
    ones,
    orthogonal,
    zeros,
)
from weft.functional.recurrent import gru_step, lstm_step, mgu_step
from weft.linen.conv import Conv
from weft.linen.linear import Dense, kernel_and_bias
from weft.linen.methods import compact, nowrap
from weft.linen.module import Module
from weft.linen.transforms import scan
from weft.typing import DType, PyTree

Activation = Callable[[Array], Array]
State = Float[Array, "*batch state"]
Input = Float[Array, "*batch input"]
Carry = tuple[State, State]
GATES = "ifgo"


class RNNCellBase(Module):
    """Base class of cells: `cell(carry, inputs) -> (carry, output)`.

    >>> class Sum(nn.RNNCellBase):
    ...     num_feature_axes = 0
    ...     def initialize_carry(self, rng, input_shape):
    ...         return jnp.zeros(input_shape)
    ...     def __call__(self, carry, x):
    ...         return carry + x, carry + x
    >>> nn.RNN(Sum()).apply({}, jnp.arange(5.0)).tolist()
    [0.0, 1.0, 3.0, 6.0, 10.0]
    """

    @nowrap
    def initialize_carry(
        self, rng: Array, input_shape: tuple[int, ...]
    ) -> PyTree:
        """Returns the state before the first input; `input_shape` includes batch axes."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define initialize_carry."
        )

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of an input that are not batch axes."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define num_feature_axes."
        )


class _Cell(RNNCellBase):
    features: int

    @nowrap
    def initialize_carry(
        self, rng: Array, input_shape: tuple[int, ...]
    ) -> PyTree:
        cell: Any = self  # subclasses declare the initializer and the dtype
        return cell.carry_init(
            rng, (*input_shape[:-1], cell.features), cell.param_dtype
        )

    @property
    def num_feature_axes(self) -> int:
        return 1


class _GatedCell(_Cell):
    gate_fn: Activation = jax.nn.sigmoid
    activation_fn: Activation = jnp.tanh
    kernel_init: Initializer = lecun_normal()
    recurrent_kernel_init: Initializer = orthogonal()
    bias_init: Initializer = zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros


class _MemoryCell(_Cell):
    @nowrap
    def initialize_carry(
        self, rng: Array, input_shape: tuple[int, ...]
    ) -> Carry:
        memory_key, output_key = jax.random.split(rng)
        memory = super().initialize_carry(memory_key, input_shape)
        output = super().initialize_carry(output_key, input_shape)
        return memory, output


class SimpleCell(_Cell):
    """Recurrent cell with one linear map of input and state (Elman, 1990).

    `h' = act(i(x) + h(h))`, with the submodules `i` and `h`.

    Attributes:
        features: width of the first state; a state of another width determines that of the maps.
        dtype: dtype of the computation; by default promoted from inputs and parameters.
        param_dtype: dtype of the parameters and of the first state.
        residual: whether to add the state before the activation.

    >>> cell, x = nn.SimpleCell(4), jnp.ones((2, 3))
    >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
    >>> cell.init_with_output(jax.random.key(1), carry, x)[0][1].shape
    (2, 4)
    """

    activation_fn: Activation = jnp.tanh
    kernel_init: Initializer = lecun_normal()
    recurrent_kernel_init: Initializer = orthogonal()
    bias_init: Initializer = zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros
    residual: bool = False

    @compact
    def __call__(self, carry: State, inputs: Input) -> tuple[State, State]:
        input_map, state_map = linear_maps(self, carry)
        candidate = input_map(name="i")(inputs) + state_map(name="h")(carry)
        # The activation comes last, so a residual state stays within its range.
        if self.residual:
            candidate = candidate + carry
        carry = self.activation_fn(candidate)
        return carry, carry


class GRUCell(_GatedCell):
    """Gated recurrent unit, `functional.gru_step` (Cho et al., 2014).

    The submodules are `ir`, `iz`, `in` for the input and `hr`, `hz`, `hn` for the state, for the
    reset gate, the update gate and the candidate; `activation_fn` is for the candidate. See
    `SimpleCell` for the other attributes.

    >>> variables = nn.RNN(nn.GRUCell(4)).init(jax.random.key(0), jnp.ones((2, 5, 3)))
    >>> sorted(variables["params"]["cell"])
    ['hn', 'hr', 'hz', 'in', 'ir', 'iz']
    """

    @compact
    def __call__(self, carry: State, inputs: Input) -> tuple[State, State]:
        input_map, state_map = linear_maps(self, carry)
        candidate_map = state_map(
            use_bias=True, bias_init=self.bias_init, name="hn"
        )
        carry = gru_step(
            carry,
            [input_map(name=name)(inputs) for name in ("ir", "iz", "in")],
            [
                state_map(name="hr")(carry),
                state_map(name="hz")(carry),
                candidate_map(carry),
            ],
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return carry, carry


class MGUCell(_Cell):
    """Minimal gated unit, `functional.mgu_step` (Zhou et al., 2016).

    The submodules are `if`, `in` for the input and `hf`, `hn` for the state, for the forget gate
    and the candidate. See `SimpleCell` for the other attributes.

    Attributes:
        gate_fn, forget_bias_init: activation and bias initializer of the gate.
        activation_fn, activation_bias_init: activation and bias initializer of the candidate.
        reset_gate: whether the gate also applies to the state's part of the candidate.

    >>> variables = nn.RNN(nn.MGUCell(4)).init(jax.random.key(0), jnp.ones((2, 5, 3)))
    >>> variables["params"]["cell"]["if"]["bias"].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    gate_fn: Activation = jax.nn.sigmoid
    activation_fn: Activation = jnp.tanh
    kernel_init: Initializer = lecun_normal()
    recurrent_kernel_init: Initializer = orthogonal()
    forget_bias_init: Initializer = ones
    activation_bias_init: Initializer = zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros
    reset_gate: bool = True

    @compact
    def __call__(self, carry: State, inputs: Input) -> tuple[State, State]:
        input_map, state_map = linear_maps(self, carry, self.forget_bias_init)
        candidate_bias = self.activation_bias_init
        candidate_input_map = input_map(bias_init=candidate_bias, name="in")
        candidate_state_map = state_map(
            use_bias=self.reset_gate, bias_init=candidate_bias, name="hn"
        )
        carry = mgu_step(
            carry,
            [input_map(name="if")(inputs), candidate_input_map(inputs)],
            [state_map(name="hf")(carry), candidate_state_map(carry)],
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
            reset_gate=self.reset_gate,
        )
        return carry, carry


def linear_maps(
    cell: Any, state: State, bias_init: Initializer | None = None
) -> tuple[Callable[..., Dense], Callable[..., Dense]]:
    """Returns factories of the linear maps of the input, which have a bias, and of the state.

    Their width is that of the state, which may differ from the `features` of the cell. Raises
    ArgumentValueError if `features` is not a positive integer.
    """
    functional.check_sizes(type(cell).__name__, features=cell.features)
    dense = functools.partial(
        Dense,
        features=state.shape[-1],
        dtype=cell.dtype,
        param_dtype=cell.param_dtype,
    )
    input_map = functools.partial(
        dense,
        kernel_init=cell.kernel_init,
        bias_init=bias_init or cell.bias_init,
    )
    state_map = functools.partial(
        dense, kernel_init=cell.recurrent_kernel_init, use_bias=False
    )
    return input_map, state_map


class LSTMCell(_MemoryCell, _GatedCell):
    """Long short-term memory cell, `functional.lstm_step` (Hochreiter and Schmidhuber, 1997).

    The submodules are `ii`, `if`, `ig`, `io` for the input and `hi`, `hf`, `hg`, `ho` for the
    state: input gate, forget gate, candidate and output gate. For the rest see `SimpleCell`.

    Attributes:
        activation_fn: activation of the candidate and of the output.
        bias_init: initializer of the biases of the state's maps; the input's maps have none.
        carry_init: initializer of the first memory and output, each with its own key.

    >>> cell, x = nn.LSTMCell(4), jnp.ones((2, 3))
    >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
    >>> cell.init_with_output(jax.random.key(1), carry, x)[0][1].shape
    (2, 4)
    """

    @compact
    def __call__(self, carry: Carry, inputs: Input) -> tuple[Carry, State]:
        """Computes one step from memory and output to the next, and returns the output again."""
        c, h = carry
        input_map, state_map = linear_maps(self, h)
        gates: list[Array] = []
        for gate in GATES:
            from_input = input_map(use_bias=False, name=f"i{gate}")(inputs)
            from_state = state_map(
                use_bias=True, bias_init=self.bias_init, name=f"h{gate}"
            )(h)
            gates.append(from_input + from_state)
        c, h = lstm_step(
            c, *gates, gate_fn=self.gate_fn, activation_fn=self.activation_fn
        )
        return (c, h), h


class OptimizedLSTMCell(_MemoryCell, _GatedCell):
    """`LSTMCell` with the linear maps merged into one of the input and one of the state.

    Two large multiplications are faster than eight small ones. For the rest see `LSTMCell`.

    >>> x = jnp.ones((2, 5, 3))
    >>> variables = nn.RNN(nn.OptimizedLSTMCell(4)).init(jax.random.key(0), x)
    >>> y = nn.RNN(nn.LSTMCell(4)).apply(variables, x)
    >>> bool(jnp.allclose(y, nn.RNN(nn.OptimizedLSTMCell(4)).apply(variables, x), atol=1e-6))
    True
    """

    @compact
    def __call__(self, carry: Carry, inputs: Input) -> tuple[Carry, State]:
        functional.check_sizes(type(self).__name__, features=self.features)
        c, h = carry

        def mapped(
            x: Array, prefix: str, kernel_init: Initializer, use_bias: bool
        ) -> Array:
            """Applies the maps of all gates in one multiplication; each has its own parameters."""
            kernels: list[Array] = []
            biases: list[Array] = []
            for gate in GATES:
                params = _LinearParams(
                    h.shape[-1],
                    self.param_dtype,
                    kernel_init,
                    use_bias,
                    self.bias_init,
                    name=f"{prefix}{gate}",
                )
                kernel, bias = params(x.shape[-1])
                kernels.append(kernel)
                if bias is not None:
                    biases.append(bias)
            merged_kernel = jnp.concatenate(kernels, -1)
            merged_bias = jnp.concatenate(biases) if use_bias else None
            # Shape (*batch, 4 * state), the gates in their order.
            return functional.dense(
                *promote_dtype(x, merged_kernel, merged_bias, dtype=self.dtype)
            )

        from_input = mapped(inputs, "i", self.kernel_init, use_bias=False)
        from_state = mapped(h, "h", self.recurrent_kernel_init, use_bias=True)
        gates = jnp.split(from_input + from_state, 4, -1)
        c, h = lstm_step(
            c, *gates, gate_fn=self.gate_fn, activation_fn=self.activation_fn
        )
        return (c, h), h


class ConvLSTMCell(_MemoryCell):
    """Convolutional long short-term memory cell (Shi et al., 2015).

    The convolutions are the submodules `ih` of the input and `hh` of the state. Their output
    channels are those of the input gate, the candidate, the forget gate (to which 1 is added) and
    the output gate. See `Conv` and `LSTMCell` for the attributes; `features` are the channels of
    memory and output.

    >>> frames = jnp.ones((2, 7, 8, 3))  # batch, time, width, channels
    >>> layer = nn.RNN(nn.ConvLSTMCell(4, (3,)))
    >>> layer.init_with_output(jax.random.key(0), frames)[0].shape
    (2, 7, 8, 4)
    """

    kernel_size: Sequence[int]
    strides: Sequence[int] | None = None
    padding: str | Sequence[tuple[int, int]] = "SAME"
    use_bias: bool = True
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros

    @compact
    def __call__(
        self, carry: Carry, inputs: Float[Array, "*batch_and_space channels"]
    ) -> tuple[Carry, Float[Array, "*batch_and_space features"]]:
        functional.check_sizes(
            type(self).__name__,
            features=self.features,
            kernel_size=self.kernel_size,
        )
        c, h = carry
        conv = functools.partial(
            Conv,
            features=4 * self.features,
            kernel_size=self.kernel_size,
            strides=self.strides,
            padding=self.padding,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        gates = conv(name="ih")(inputs) + conv(name="hh")(h)
        i, g, f, o = jnp.split(gates, 4, -1)
        # The bias of 1 keeps the memory in the first steps of training.
        c, h = lstm_step(c, i, f + 1, g, o)
        return (c, h), h

    @property
    def num_feature_axes(self) -> int:
        return len(self.kernel_size) + 1


class _LinearParams(Module):
    features: int
    param_dtype: DType
    kernel_init: Initializer
    use_bias: bool
    bias_init: Initializer

    @compact
    def __call__(self, size: int) -> tuple[Array, Array | None]:
        return kernel_and_bias(self, (size, self.features), (self.features,))


class RNN(Module):
    """Layer that applies a cell to sequences.

    Attributes:
        cell: the cell; its variables are in the submodule `cell`.
        time_major: whether time is the first axis; otherwise it precedes the `num_feature_axes`.
        reverse: whether to run from the last position to the first.
        keep_order: whether a reverse run returns outputs in the order of the inputs.
        unroll: number of steps per compiled iteration.
        variable_axes, variable_broadcast, variable_carry, split_rngs: see `scan`.

    >>> x = jnp.ones((2, 5, 3))
    >>> (carry, y), _ = nn.RNN(nn.GRUCell(4), return_carry=True).init_with_output(
    ...     jax.random.key(0), x, seq_lengths=jnp.array([2, 5])
    ... )
    >>> y.shape, bool(jnp.array_equal(carry, y[jnp.array([0, 1]), jnp.array([1, 4])]))
    ((2, 5, 4), True)
    """

    cell: RNNCellBase
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    unroll: int = 1
    variable_axes: Mapping[Any, Any] = FrozenDict()
    variable_broadcast: filters.Filter = "params"
    variable_carry: filters.Filter = False
    split_rngs: Mapping[Any, bool] = FrozenDict({"params": False})

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: PyTree = None,
        init_key: Array | None = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> PyTree:
        """Runs the cell; options override the attributes of the same name.

        Args:
            inputs: the sequences, of shape `(time, *batch, *features)` if `time_major`.
            initial_carry: the first state; by default the cell's.
            seq_lengths: number of valid positions of each sequence; all by default.

        Returns the outputs, or the last state and the outputs.

        Raises ArgumentShapeError if `seq_lengths` does not match the sequences.
        """

        def first_carry(shape: tuple[int, ...]) -> PyTree:
            key = jax.random.key(0) if init_key is None else init_key
            return self.cell.initialize_carry(key, shape)

        def loop(
            step: Callable[..., tuple[PyTree, PyTree]],
            carry: PyTree,
            xs: PyTree,
            axis: int,
            reverse: bool,
        ) -> tuple[PyTree, PyTree]:
            run = scan(
                step,
                variable_axes=self.variable_axes,
                variable_broadcast=self.variable_broadcast,
                variable_carry=self.variable_carry,
                split_rngs=self.split_rngs,
                in_axes=axis,
                out_axes=axis,
                reverse=reverse,
                unroll=self.unroll,
            )
            return run(self.cell, carry, xs)

        return recurrent.run_layer(
            self, loop, first_carry, inputs, initial_carry, seq_lengths, return_carry=return_carry,
            time_major=time_major, reverse=reverse, keep_order=keep_order,
        )  # fmt: skip


class Bidirectional(Module):
    """Layer that applies one `RNN` forward and one backward, and merges the outputs.

    Attributes:
        forward_rnn, backward_rnn: the submodules; may be the same module, to share parameters.
        merge_fn: merges outputs in the order of the inputs; by default concatenates the last axis.
        return_carry: whether to return both last states, as a pair.

    >>> layer = nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(6)))
    >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))
    >>> y.shape
    (2, 5, 10)
    """

    forward_rnn: RNN
    backward_rnn: RNN
    merge_fn: Callable[[Any, Any], Any] = recurrent.concatenate
    time_major: bool = False
    return_carry: bool = False

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: tuple[PyTree, PyTree] | None = None,
        init_key: Array | None = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> PyTree:
        """Runs both; see `RNN`. `initial_carry` is a pair; `reverse`, `keep_order` are ignored."""
        return_carry = (
            self.return_carry if return_carry is None else return_carry
        )
        time_major = self.time_major if time_major is None else time_major
        forward_carry = backward_carry = None
        if initial_carry is not None:
            forward_carry, backward_carry = initial_carry
        forward_key = backward_key = None
        if init_key is not None:
            forward_key, backward_key = jax.random.split(init_key)
        forward = self.forward_rnn(
            inputs,
            initial_carry=forward_carry,
            init_key=forward_key,
            seq_lengths=seq_lengths,
            return_carry=return_carry,
            time_major=time_major,
            reverse=False,
        )
        backward = self.backward_rnn(
            inputs,
            initial_carry=backward_carry,
            init_key=backward_key,
            seq_lengths=seq_lengths,
            return_carry=return_carry,
            time_major=time_major,
            reverse=True,
            keep_order=True,
        )
        if not return_carry:
            return jax.tree.map(self.merge_fn, forward, backward)
        forward_carry, forward_outputs = forward
        backward_carry, backward_outputs = backward
        outputs = jax.tree.map(self.merge_fn, forward_outputs, backward_outputs)
        return (forward_carry, backward_carry), outputs
