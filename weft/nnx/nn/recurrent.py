"""Recurrent cells, and layers that run them over sequences.

A cell maps a state and an input to the next state and an output; `weft.functional.recurrent` has
the formulas. The loop of `RNN` is a lifted scan, so all steps share the cell's parameters; other
variables can be carried or stacked along a new axis. With `seq_lengths`, the returned state is that
after a sequence's last valid position, and later outputs are meaningless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from weft.errors import CellDefinitionError, InvalidRngError
from weft.functional import initializers, recurrent
from weft.functional.recurrent import gru_step, lstm_step
from weft.nnx import filters, pytree
from weft.nnx.module import Module
from weft.nnx.nn import parameters
from weft.nnx.nn.linear import Linear
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    PromoteDtype,
)
from weft.nnx.rngs import Rngs, RngStream, split_rngs
from weft.nnx.transforms.control_flow import scan
from weft.nnx.transforms.state_roles import Carry, StateAxes
from weft.typing import DType, PyTree

Activation = Callable[..., Array]
Streams = Rngs | RngStream | None
State = Float[Array, "*batch state"]
Input = Float[Array, "*batch input"]
LSTMCarry = tuple[State, State]
InputShape = tuple[int, ...]

LinearOfSize = Callable[[int], Linear]
Step = Callable[..., tuple[PyTree, PyTree]]


def recurrent_kernel_init(
    key: Array, shape: tuple[int, ...], dtype: DType = jnp.float32
) -> Array:
    """Draws an orthogonal matrix, in at least float32, and casts it to `dtype`."""
    wide_dtype = jnp.promote_types(dtype, jnp.float32)
    return initializers.orthogonal()(key, shape, wide_dtype).astype(dtype)


class RNNCellBase(Module):
    """Base class of cells: `cell(carry, inputs) -> (carry, output)`.

    >>> class Sum(RNNCellBase):
    ...     num_feature_axes = 0
    ...     def initialize_carry(self, input_shape, rngs=None, carry_init=None):
    ...         return jnp.zeros(input_shape)
    ...     def __call__(self, carry, inputs):
    ...         return carry + inputs, carry + inputs
    >>> carry = Sum().initialize_carry(())
    >>> [float(carry := Sum()(carry, x)[0]) for x in (1.0, 2.0, 3.0)]
    [1.0, 3.0, 6.0]
    """

    def initialize_carry(
        self,
        input_shape: InputShape,
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> PyTree:
        """Returns the state before the first input.

        Args:
            input_shape: shape of one input, batch axes included.
            rngs: streams with `carry`, or one stream.
        """
        raise _undefined(self, "initialize_carry")

    def __call__(self, carry: PyTree, inputs: Array) -> tuple[PyTree, Array]:
        raise _undefined(self, "__call__")

    @property
    def num_feature_axes(self) -> int:
        """Number of axes of an input that are not batch axes."""
        raise _undefined(self, "num_feature_axes")


def _undefined(cell: RNNCellBase, name: str) -> CellDefinitionError:
    return CellDefinitionError(
        f"{type(cell).__name__} does not define {name}; a cell defines initialize_carry, __call__ "
        "and num_feature_axes."
    )


@dataclass(repr=False, eq=False)
class _LinearCell(RNNCellBase):
    """Fields of cells that apply linear maps to their input and state, of one feature axis."""

    in_features: int
    hidden_features: int
    _: KW_ONLY
    activation_fn: Activation = jnp.tanh
    kernel_init: InitVar[Initializer] = parameters.default_kernel_init
    recurrent_kernel_init: InitVar[Initializer] = recurrent_kernel_init
    bias_init: InitVar[Initializer] = initializers.zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer | None = None
    promote_dtype: PromoteDtype = parameters.promote_dtype
    keep_rngs: InitVar[bool] = False
    rngs: Rngs
    kernel_metadata: InitVar[Metadata] = NO_METADATA
    recurrent_kernel_metadata: InitVar[Metadata] = NO_METADATA
    bias_metadata: InitVar[Metadata] = NO_METADATA

    _input_has_bias: ClassVar[bool] = True

    def __post_init__(
        self,
        kernel_init: Initializer,
        recurrent_kernel_init: Initializer,
        bias_init: Initializer,
        keep_rngs: bool,
        kernel_metadata: Metadata,
        recurrent_kernel_metadata: Metadata,
        bias_metadata: Metadata,
    ) -> None:
        parameters.check_sizes(self, "in_features", "hidden_features")
        rngs = self.rngs
        carry_stream = None
        if keep_rngs:
            carry_stream = parameters.fork_stream(
                rngs, "carry", type(self).__name__
            )
        self.rngs = carry_stream  # pyright: ignore[reportAttributeAccessIssue] - the argument is Rngs
        # One bias per pair of maps is enough, since their results are added.
        linear = functools.partial(
            Linear,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            bias_init=bias_init,
            promote_dtype=self.promote_dtype,
            rngs=rngs,
            bias_metadata=bias_metadata,
        )
        self._make_maps(
            functools.partial(
                linear,
                self.in_features,
                use_bias=self._input_has_bias,
                kernel_init=kernel_init,
                kernel_metadata=kernel_metadata,
            ),
            functools.partial(
                linear,
                self.hidden_features,
                use_bias=not self._input_has_bias,
                kernel_init=recurrent_kernel_init,
                kernel_metadata=recurrent_kernel_metadata,
            ),
        )

    def _make_maps(
        self, input_map: LinearOfSize, state_map: LinearOfSize
    ) -> None:
        """Makes the layers, from functions that make one of a number of features."""
        raise NotImplementedError

    def _first_states(
        self,
        n: int,
        input_shape: InputShape,
        rngs: Streams,
        carry_init: Initializer | None,
    ) -> list[Array]:
        """Returns the `n` arrays of a state before the first input, each drawn with its own key.

        Raises:
            InvalidRngError: if an initializer is given and there is no stream.
            RngArgumentError: if `rngs` has another type.
        """
        name = type(self).__name__
        stream = self.rngs if rngs is None else rngs
        if isinstance(stream, Rngs):
            stream = stream.carry
        init = carry_init or self.carry_init
        if stream is None and init is not None:
            raise InvalidRngError(
                f"{name} draws its first state but has no PRNG stream; give initialize_carry(..., "
                "rngs=nnx.Rngs(carry=0)), or make the cell with keep_rngs=True."
            )
        if not (stream is None or isinstance(stream, RngStream)):
            raise parameters.invalid_rngs_error(rngs, name)
        shape = (*input_shape[:-1], self.hidden_features)
        make_state: Initializer = init or initializers.zeros
        states: list[Array] = []
        for _ in range(n):
            key = None if stream is None else stream()
            states.append(make_state(key, shape, self.param_dtype))
        return states

    @property
    def num_feature_axes(self) -> int:
        return 1


class _OneStateCell(_LinearCell):
    """Cell whose state is also its output."""

    def initialize_carry(
        self,
        input_shape: InputShape,
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> State:
        (state,) = self._first_states(1, input_shape, rngs, carry_init)
        return state


@dataclass(repr=False, eq=False)
class SimpleCell(_OneStateCell):
    """Simple recurrent cell (Elman, 1990): `h' = act(dense_i(x) + dense_h(h))`.

    Args:
        param_dtype: dtype of the parameters and of the first state.
        carry_init: initializer of the first state; zeros by default.
        residual: whether to add the state before the activation.
        kernel_init: initializer of the kernel of `dense_i`, with `kernel_metadata`.
        recurrent_kernel_init: initializer of the kernel of `dense_h`, with
            `recurrent_kernel_metadata`.
        keep_rngs: whether the cell keeps its own PRNG stream to draw first states.
        rngs: stream `params`, and `carry` with `keep_rngs`.

    >>> cell = SimpleCell(3, 4, rngs=nnx.Rngs(0))
    >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> y.shape
    (2, 4)
    """

    _: KW_ONLY
    dtype: DType = jnp.float32
    residual: bool = False

    def _make_maps(
        self, input_map: LinearOfSize, state_map: LinearOfSize
    ) -> None:
        self.dense_h = state_map(self.hidden_features)
        self.dense_i = input_map(self.hidden_features)

    def __call__(self, carry: State, inputs: Input) -> tuple[State, State]:
        total = self.dense_i(inputs) + self.dense_h(carry)
        if self.residual:
            total += carry
        carry = self.activation_fn(total)
        return carry, carry


@dataclass(repr=False, eq=False)
class GRUCell(_OneStateCell):
    """Gated recurrent unit, `functional.gru_step` (Cho et al., 2014).

    The layers `dense_i`, of the input, and `dense_h`, of the state, each return reset gate, update
    gate and candidate, concatenated.

    Args:
        activation_fn: activation of the candidate.
        dtype: computation dtype; by default promoted from input and parameters.

    The other arguments are those of `SimpleCell`.

    >>> cell = GRUCell(3, 4, rngs=nnx.Rngs(0))
    >>> cell.dense_i.kernel.shape, cell.dense_h.kernel.shape
    ((3, 12), (4, 12))
    """

    _: KW_ONLY
    gate_fn: Activation = jax.nn.sigmoid

    def _make_maps(
        self, input_map: LinearOfSize, state_map: LinearOfSize
    ) -> None:
        self.dense_i = input_map(3 * self.hidden_features)
        self.dense_h = state_map(3 * self.hidden_features)

    def __call__(self, carry: State, inputs: Input) -> tuple[State, State]:
        carry = gru_step(
            carry,
            jnp.split(self.dense_i(inputs), 3, -1),
            jnp.split(self.dense_h(carry), 3, -1),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return carry, carry


@dataclass(repr=False, eq=False)
class _GatedMemoryCell(_LinearCell):
    """Cell with a memory and an output; the linear maps of the state have biases."""

    _: KW_ONLY
    gate_fn: Activation = jax.nn.sigmoid

    _input_has_bias = False

    def initialize_carry(
        self,
        input_shape: InputShape,
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> LSTMCarry:
        c, h = self._first_states(2, input_shape, rngs, carry_init)
        return c, h


@dataclass(repr=False, eq=False)
class LSTMCell(_GatedMemoryCell):
    """Long short-term memory, `functional.lstm_step` (Hochreiter and Schmidhuber, 1997).

    The linear maps are the layers `ii`, `if_`, `ig`, `io` of the input and `hi`, `hf`, `hg`, `ho`
    of the state: input gate, forget gate, candidate and output gate.

    Args:
        activation_fn: activation of the candidate and of the output.
        bias_init: initializer of the biases, which the maps of the state have.
        carry_init: initializer of the first memory and output, each with its own key; or zeros.

    The other arguments are those of `GRUCell`.

    >>> cell = LSTMCell(3, 4, rngs=nnx.Rngs(0))
    >>> cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))[1].shape
    (2, 4)
    """

    def _make_maps(
        self, input_map: LinearOfSize, state_map: LinearOfSize
    ) -> None:
        n = self.hidden_features
        self.ii = input_map(n)
        self.if_ = input_map(n)
        self.ig = input_map(n)
        self.io = input_map(n)
        self.hi = state_map(n)
        self.hf = state_map(n)
        self.hg = state_map(n)
        self.ho = state_map(n)

    def __call__(
        self, carry: LSTMCarry, inputs: Input
    ) -> tuple[LSTMCarry, State]:
        """Applies one step to memory and output; returns the next ones, and the output again."""
        c, h = carry
        c, h = lstm_step(
            c,
            self.ii(inputs) + self.hi(h),
            self.if_(inputs) + self.hf(h),
            self.ig(inputs) + self.hg(h),
            self.io(inputs) + self.ho(h),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return (c, h), h


@dataclass(repr=False, eq=False)
class OptimizedLSTMCell(_GatedMemoryCell):
    """`LSTMCell` with one linear map of the input, `dense_i`, and one of the state, `dense_h`.

    Two large products are faster than eight small ones. Each map returns input gate, forget gate,
    candidate and output gate, concatenated; `kernel_init` and `recurrent_kernel_init` draw the
    concatenated kernels. Arguments as for `LSTMCell`.

    >>> cell = OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
    >>> cell.dense_i.kernel.shape, cell.dense_h.kernel.shape
    ((3, 16), (4, 16))
    """

    def _make_maps(
        self, input_map: LinearOfSize, state_map: LinearOfSize
    ) -> None:
        self.dense_i = input_map(4 * self.hidden_features)
        self.dense_h = state_map(4 * self.hidden_features)

    def __call__(
        self, carry: LSTMCarry, inputs: Input
    ) -> tuple[LSTMCarry, State]:
        c, h = carry
        gates = jnp.split(self.dense_i(inputs) + self.dense_h(h), 4, -1)
        c, h = lstm_step(
            c, *gates, gate_fn=self.gate_fn, activation_fn=self.activation_fn
        )
        return (c, h), h


def flip_sequences(
    inputs: Num[Array, "*shape"],
    seq_lengths: Int[Array, "*batch"] | None,
    num_batch_dims: int,
    time_major: bool,
) -> Num[Array, "*shape"]:
    """Reverses sequences; padding after the end of a sequence stays there.

    Args:
        seq_lengths: number of valid positions per sequence; None for all.
        time_major: whether time is the first axis; otherwise it follows the batch axes.

    Raises ArgumentShapeError if the lengths do not match the sequences.

    >>> flip_sequences(jnp.array([[1, 2, 3, 0]]), jnp.array([3]), 1, False).tolist()
    [[3, 2, 1, 0]]
    """
    axis = 0 if time_major else num_batch_dims
    return recurrent.flip_sequences(inputs, seq_lengths, axis=axis)


@dataclass(repr=False, eq=False)
class RNN(Module):
    """Layer that runs a cell over sequences.

    Args:
        time_major: whether time is the first axis; otherwise it follows the batch axes and precedes
            the cell's `num_feature_axes`.
        reverse: whether to run from the last position to the first.
        keep_order: whether the outputs of a reverse run are in the order of the inputs.
        unroll: number of steps compiled into one loop iteration.
        state_axes: for parts of the cell's state, by filter: `nnx.Carry`, None to share it between
            steps, or the axis of per-step state; by default all is carried.
        broadcast_rngs: filter of the cell's PRNG streams that yield the same keys at each step.
        rngs: streams whose `carry` draws first states; True for a stream of seed 0, False for none.

    Raises RngArgumentError if `rngs` has another type.

    >>> from weft.nnx.nn.recurrent import GRUCell
    >>> layer = RNN(GRUCell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
    >>> carry, y = layer(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([2, 5]))
    >>> y.shape, bool(jnp.array_equal(carry, y[jnp.array([0, 1]), jnp.array([1, 4])]))
    ((2, 5, 4), True)
    """

    cell: RNNCellBase
    _: KW_ONLY
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    unroll: int = 1
    state_axes: Mapping[filters.Filter, Any] | StateAxes | None = None
    broadcast_rngs: filters.Filter = None
    rngs: Rngs | RngStream | bool | None = True

    def __post_init__(self) -> None:
        if not isinstance(self.state_axes, StateAxes):
            self.state_axes = StateAxes(self.state_axes or {...: Carry})
        if isinstance(self.broadcast_rngs, list):
            self.broadcast_rngs = tuple(self.broadcast_rngs)
        self.rngs = _own_stream(self, self.rngs)

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: PyTree = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Streams = None,
    ) -> PyTree:
        """Runs the cell; arguments other than the first override the attributes of the same name.

        Args:
            inputs: sequences; of shape `(time, *batch, *features)` if `time_major`.
            initial_carry: first state; by default from the cell's `initialize_carry`.
            seq_lengths: number of valid positions per sequence; all by default.
            rngs: streams, or a stream, that draw the first state instead of the layer's own.

        Returns the outputs, or the last state and the outputs.
        """

        def first_carry(shape: tuple[int, ...]) -> PyTree:
            stream = _streams_of_call(self.rngs, rngs, self)
            if isinstance(stream, Rngs):
                stream = stream.carry.fork()
            return self.cell.initialize_carry(shape, stream)

        return recurrent.run_layer(
            self,
            self._loop,
            first_carry,
            inputs,
            initial_carry,
            seq_lengths,
            return_carry=return_carry,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
        )

    def _loop(
        self, step: Step, carry: PyTree, xs: PyTree, axis: int, reverse: bool
    ) -> tuple[PyTree, PyTree]:
        # The streams of `broadcast_rngs` get a key of their own until the end of the loop.
        with split_rngs(
            self.cell, splits=1, only=self.broadcast_rngs, squeeze=True
        ) as backups:
            stream_ids = {id(stream) for stream, *_ in backups}
            paths: list[filters.Path] = []
            for path, x in pytree.iter_graph(self.cell):
                if id(x) in stream_ids:
                    paths.append(path)
            if paths:
                # A tuple: equal functions share a compiled loop, if they are hashable.
                step = functools.partial(
                    _step_with_same_keys, tuple(paths), step
                )
            run = scan(
                step,
                in_axes=(self.state_axes, Carry, axis),
                out_axes=(Carry, axis),
                reverse=reverse,
                unroll=self.unroll,
            )
            return run(self.cell, carry, xs)


def _step_with_same_keys(
    paths: tuple[filters.Path, ...],
    step: Step,
    cell: RNNCellBase,
    carry: PyTree,
    x: Array,
) -> tuple[PyTree, PyTree]:
    """Runs a step after setting the counts of streams to 0, so that each step has the same keys."""
    for path, stream in pytree.iter_graph(cell):
        if path in paths:
            stream.count.set_value(jnp.zeros_like(stream.count.get_value()))
    return step(cell, carry, x)


def _own_stream(
    layer: Module, rngs: Rngs | RngStream | bool | None
) -> RngStream | None:
    """Returns the stream that a layer keeps; see the argument `rngs` of `RNN`."""
    if isinstance(rngs, bool):
        return RngStream(0, tag="carry") if rngs else None
    return parameters.fork_stream(rngs, "carry", type(layer).__name__)


def _streams_of_call(
    own_streams: Streams | bool, rngs: Streams, layer: Module
) -> Any:
    """Returns the streams of a call, by default the layer's own."""
    if rngs is None:
        return own_streams
    if not isinstance(rngs, Rngs | RngStream):
        raise parameters.invalid_rngs_error(rngs, type(layer).__name__)
    return rngs


@dataclass(repr=False, eq=False)
class Bidirectional(Module):
    """Layer that runs one `RNN` over sequences and one over their reverse, and merges the outputs.

    Args:
        backward_rnn: runs on the reverse; may be `forward_rnn`, to share parameters.
        merge_fn: merges the two outputs, in the order of the inputs; concatenates by default.
        return_carry: whether to return both last states, as a pair, as well.
        time_major, rngs: see `RNN`; with `rngs=False`, each `RNN` uses its own.

    Raises RngArgumentError if `rngs` has another type.

    >>> from weft.nnx.nn.recurrent import GRUCell
    >>> forward, backward = (RNN(GRUCell(3, n, rngs=nnx.Rngs(n))) for n in (4, 6))
    >>> Bidirectional(forward, backward)(jnp.ones((2, 5, 3))).shape
    (2, 5, 10)
    """

    forward_rnn: RNN
    backward_rnn: RNN
    _: KW_ONLY
    merge_fn: Callable[[Array, Array], Array] = recurrent.concatenate
    time_major: bool = False
    return_carry: bool = False
    rngs: Rngs | RngStream | bool | None = True

    def __post_init__(self) -> None:
        self.rngs = _own_stream(self, self.rngs)

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: tuple[PyTree, PyTree] | None = None,
        rngs: Streams = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> PyTree:
        """Runs both; other arguments and result as for `RNN`.

        Args:
            rngs: streams, or a stream, that draw both first states.
            reverse: no effect, like `keep_order`; accepted for compatibility with `RNN`.
        """
        if return_carry is None:
            return_carry = self.return_carry
        if time_major is None:
            time_major = self.time_major
        if initial_carry is None:
            initial_carry = None, None
        stream = _streams_of_call(self.rngs, rngs, self)
        if isinstance(stream, Rngs):
            stream = stream.carry
        forward = self.forward_rnn(
            inputs,
            initial_carry=initial_carry[0],
            rngs=stream,
            seq_lengths=seq_lengths,
            return_carry=return_carry,
            time_major=time_major,
            reverse=False,
        )
        backward = self.backward_rnn(
            inputs,
            initial_carry=initial_carry[1],
            rngs=stream,
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
