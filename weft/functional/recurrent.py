"""Steps of recurrent cells, and sequences of different lengths.

A step takes the previous state and the gates' inputs, which are linear maps of input and state
before any activation, and returns the next state. The layer computes the maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num

from weft.errors import ArgumentShapeError
from weft.functional.arrays import (
    explicit_spec,
    finite_or_counted,
    gathered,
    positions,
)

Activation = Callable[[Array], Array]
Carry = TypeVar("Carry")  # a cell's state, a pytree
Outputs = Any  # a cell's outputs, a pytree
Cell = Callable[[Carry, Array], tuple[Carry, Outputs]]


def lstm_step(
    c: Float[Array, "*state"],
    i: Float[Array, "*state"],
    f: Float[Array, "*state"],
    g: Float[Array, "*state"],
    o: Float[Array, "*state"],
    *,
    gate_fn: Activation = jax.nn.sigmoid,
    activation_fn: Activation = jnp.tanh,
    max_cell_value: float | None = None,
) -> tuple[Float[Array, "*state"], Float[Array, "*state"]]:
    """Returns the memory and the output of a long short-term memory (Hochreiter, 1997).

    `c' = gate(f) * c + gate(i) * act(g)`, `h' = gate(o) * act(c')`, of the memory `c`, input gate
    `i`, forget gate `f`, candidate `g` and output gate `o`, each before its activation.
    `max_cell_value` bounds the absolute value of the memory; None for no bound.

    >>> c, h = lstm_step(*(jnp.array([x]) for x in (2.0, 0.0, 0.0, 0.0, 100.0)))
    >>> c.tolist(), h.tolist()
    ([1.0], [0.76159...])
    """
    c = gate_fn(f) * c + gate_fn(i) * activation_fn(g)
    if max_cell_value is not None:
        c = jnp.clip(c, -max_cell_value, max_cell_value)
    return c, gate_fn(o) * activation_fn(c)


def gru_step(
    h: Float[Array, "*state"],
    from_input: Sequence[Array],
    from_state: Sequence[Array],
    *,
    gate_fn: Activation = jax.nn.sigmoid,
    activation_fn: Activation = jnp.tanh,
) -> Float[Array, "*state"]:
    """Returns the state of a gated recurrent unit (Cho et al., 2014).

    `n = act(in + gate(ir + hr) * hn)`, `h' = (1 - z) * n + z * h` with `z = gate(iz + hz)`.
    `from_input` is `(ir, iz, in)`, maps of the input; `from_state` `(hr, hz, hn)`, of the state.

    >>> zero, one = jnp.zeros(1), jnp.ones(1)
    >>> gru_step(one, (zero, zero, zero), (zero, zero, zero)).tolist()
    [0.5]
    """
    input_reset, input_keep, input_new = from_input
    state_reset, state_keep, state_new = from_state
    reset = gate_fn(input_reset + state_reset)
    keep = gate_fn(input_keep + state_keep)
    new = activation_fn(input_new + reset * state_new)
    return (1 - keep) * new + keep * h


def mgu_step(
    h: Float[Array, "*state"],
    from_input: Sequence[Array],
    from_state: Sequence[Array],
    *,
    gate_fn: Activation = jax.nn.sigmoid,
    activation_fn: Activation = jnp.tanh,
    reset_gate: bool = True,
) -> Float[Array, "*state"]:
    """Returns the state of a minimal gated unit (Zhou et al., 2016).

    `h' = (1 - f) * n + f * h` with `f = gate(if + hf)` and `n = act(in + f * hn)`, or `n = act(in +
    hn)` without `reset_gate` (Heck and Salem, 2017). `from_input` is `(if, in)`, the maps of the
    input; `from_state` `(hf, hn)`, of the state.

    >>> zero, one = jnp.zeros(1), jnp.ones(1)
    >>> mgu_step(one, (zero, zero), (zero, zero)).tolist()
    [0.5]
    """
    input_forget, input_new = from_input
    state_forget, state_new = from_state
    forget = gate_fn(input_forget + state_forget)
    if reset_gate:
        state_new = forget * state_new
    new = activation_fn(input_new + state_new)
    return (1 - forget) * new + forget * h


def flip_sequences(
    x: Num[Array, "*shape"],
    seq_lengths: Int[Array, "*batch"] | None = None,
    *,
    axis: int,
) -> Num[Array, "*shape"]:
    """Returns sequences in reverse order; positions after a sequence's end stay in place.

    Args:
        seq_lengths: number of positions per sequence that count; all by default. Its axes are the
            first axes of `x` without the time axis.
        axis: the time axis, at most the number of axes of `seq_lengths`.

    Raises ArgumentShapeError if the lengths do not match the batch axes of `x`.

    >>> flip_sequences(jnp.array([[1, 2, 3, 0]]), jnp.array([3]), axis=1).tolist()
    [[3, 2, 1, 0]]
    """
    if seq_lengths is None:
        return jnp.flip(x, axis)
    check_lengths(x.shape, seq_lengths, axis)
    size = x.shape[axis]
    steps = positions(size, seq_lengths.ndim + 1)
    # The modulus maps the negative index of a position after the end to that position.
    index = (seq_lengths[..., None] - 1 - steps) % size  # (*batch, time)
    index = _with_last_axes(jnp.moveaxis(index, -1, axis), x.ndim)
    return jnp.take_along_axis(x, index, axis)


class RecurrentCell(Protocol):
    """A cell of a recurrent layer, as `run_layer` reads it."""

    @property
    def num_feature_axes(self) -> int: ...


class RecurrentLayer(Protocol):
    """A layer that runs a cell over sequences, such as an `RNN`, as `run_layer` reads it."""

    @property
    def cell(self) -> RecurrentCell: ...

    return_carry: bool
    time_major: bool
    reverse: bool
    keep_order: bool


class _Running(NamedTuple, Generic[Carry]):
    """State of a loop over sequences of different lengths.

    Attributes:
        running: the cell's state, also of sequences that have ended.
        final: the cell's state at the end of each sequence, or so far.
    """

    running: Carry
    final: Carry
    step: Array
    seq_lengths: Array


def run_layer(
    layer: RecurrentLayer,
    loop: Callable[..., tuple[Any, Outputs]],
    first_carry: Callable[[tuple[int, ...]], Carry],
    inputs: Num[Array, "*batch_time_features"],
    initial_carry: Carry | None,
    seq_lengths: Int[Array, "*batch"] | None,
    *,
    return_carry: bool | None,
    time_major: bool | None,
    reverse: bool | None,
    keep_order: bool | None,
) -> Outputs | tuple[Carry, Outputs]:
    """Returns the outputs of a layer's cell over sequences, or its last state and the outputs.

    NaN and infinities beyond the length of a sequence are taken for 0.

    Args:
        layer: an `RNN`, whose options the last four arguments replace where they are not None.
        loop: `loop(step, carry, xs, axis, reverse)` scans `step(cell, carry, x) -> (carry, y)`.
        first_carry: returns the first state of inputs of that shape, without an `initial_carry`.

    Raises ArgumentShapeError if the inputs have too few axes, or the lengths do not match them.
    """
    if return_carry is None:
        return_carry = layer.return_carry
    if time_major is None:
        time_major = layer.time_major
    if reverse is None:
        reverse = layer.reverse
    if keep_order is None:
        keep_order = layer.keep_order

    num_feature_axes = layer.cell.num_feature_axes
    axis = inputs.ndim - (num_feature_axes + 1)
    if axis < 0:
        raise ArgumentShapeError(
            f"an RNN was given an input of shape {inputs.shape}; {type(layer.cell).__name__} takes "
            f"{num_feature_axes} feature axes, in addition to the time axis."
        )
    if time_major:
        axis = 0
    inputs = gathered(inputs, axis)
    if seq_lengths is not None:
        check_lengths(inputs.shape, seq_lengths, axis)
    if initial_carry is None:
        initial_carry = first_carry(
            (*inputs.shape[:axis], *inputs.shape[axis + 1 :])
        )
    if seq_lengths is not None:
        inputs = finite_or_counted(inputs, _within(inputs, seq_lengths, axis))
    initial_carry = sharded_as_steps(
        inputs, initial_carry, axis, num_feature_axes
    )

    # A reversed loop would begin with what follows a sequence's end, so sequences of different
    # lengths are flipped instead; their outputs then come in the order of the steps.
    flips = reverse and seq_lengths is not None
    if flips:
        inputs = flip_sequences(inputs, seq_lengths, axis=axis)
    if seq_lengths is not None and return_carry:
        state = _Running(
            initial_carry, initial_carry, jnp.int32(0), jnp.asarray(seq_lengths)
        )
        state, outputs = loop(_valid_step, state, inputs, axis, False)
        carry = state.final
    else:
        carry, outputs = loop(
            _step, initial_carry, inputs, axis, reverse and not flips
        )
    if reverse and keep_order == flips:
        outputs = jax.tree.map(
            lambda y: flip_sequences(y, seq_lengths, axis=axis), outputs
        )
    if return_carry:
        return carry, outputs
    return outputs


def sharded_as_steps(
    inputs: Array, carry: Carry, axis: int, num_feature_axes: int = 1
) -> Carry:
    """Returns the state with the sharding that a step gives it over Explicit axes of a mesh.

    The type of a loop's state includes it. It is that of the batch axes of the inputs.
    """
    spec = list(explicit_spec(inputs))
    del spec[axis]
    batch_spec = spec[: len(spec) - num_feature_axes]
    if not any(batch_spec) or jax.sharding.get_abstract_mesh().empty:
        return carry
    sharding = NamedSharding(
        jax.typeof(inputs).sharding.mesh, PartitionSpec(*batch_spec)
    )
    return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), carry)


def _step(cell: Cell[Carry], carry: Carry, x: Array) -> tuple[Carry, Outputs]:
    """Computes a step of all sequences, which `loop` calls for each position."""
    return cell(carry, x)


def _valid_step(
    cell: Cell[Carry], state: _Running[Carry], x: Array
) -> tuple[_Running[Carry], Outputs]:
    """Computes a step of all sequences, keeping the final state of those that have ended."""
    running, y = cell(state.running, x)
    final = within_lengths(running, state.final, state.step, state.seq_lengths)
    return _Running(running, final, state.step + 1, state.seq_lengths), y


def within_lengths(
    new: Carry,
    old: Carry,
    step: Int[Array, ""],
    seq_lengths: Int[Array, "*batch"],
) -> Carry:
    """Returns the state after a step; sequences that have ended keep the state before.

    Args:
        new: the state after the step, arrays whose first axes are those of `seq_lengths`.
        step: the position of the step, from 0.
        seq_lengths: number of positions per sequence that count.

    >>> new, old = jnp.array([1, 1]), jnp.array([0, 0])
    >>> within_lengths(new, old, jnp.array(2), jnp.array([3, 2])).tolist()
    [1, 0]
    """
    has_step = step < seq_lengths  # (*batch,)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(_with_last_axes(has_step, new.ndim), new, old)

    return jax.tree.map(choose, new, old)


def concatenate(a: Array, b: Array) -> Array:
    """Returns the outputs of two directions, concatenated along the last axis."""
    return jnp.concatenate([a, b], -1)


def _within(x: Array, seq_lengths: Array, axis: int) -> Array:
    """Returns which positions of sequences count, broadcastable to `x`."""
    steps = positions(x.shape[axis], seq_lengths.ndim + 1)
    counts = steps < jnp.asarray(seq_lengths)[..., None]  # (*batch, time)
    return _with_last_axes(jnp.moveaxis(counts, -1, axis), x.ndim)


def _with_last_axes(x: Array, ndim: int) -> Array:
    """Returns `x` with axes of size 1 appended."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def check_lengths(
    shape: tuple[int, ...], seq_lengths: Array, axis: int
) -> None:
    """Raises ArgumentShapeError unless there is one length per sequence."""
    shape_without_time = (*shape[:axis], *shape[axis + 1 :])
    batch_shape = shape_without_time[: seq_lengths.ndim]
    if batch_shape != seq_lengths.shape or axis > seq_lengths.ndim:
        raise ArgumentShapeError(
            f"seq_lengths has shape {seq_lengths.shape}, but the input, of shape {shape} with time "
            f"along axis {axis}, has other batch axes; give one length for each sequence."
        )
