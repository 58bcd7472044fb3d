"""Recurrence over sequences: a cell in a loop, and two of them in opposite directions.

The loop is a scan. What of a cell's state is shared by all steps, carried, or stacked along an axis
`state_axes` says; by default all of it is carried, so that a cell can count and draw. With
`seq_lengths`, the state that is returned is that after a sequence's last position that counts;
outputs behind it mean nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from weft.errors import ArgumentShapeError
from weft.functional import recurrent
from weft.nnx.filters import Filter, Path
from weft.nnx.graph import iter_graph
from weft.nnx.module import Module
from weft.nnx.nn.cells import RNNCellBase, Streams
from weft.nnx.nn.modes import kept_stream, not_streams
from weft.nnx.rngs import Rngs, RngStream, split_rngs
from weft.nnx.transforms.scan import scan
from weft.nnx.transforms.symbols import Carry, StateAxes

__all__ = ["RNN", "Bidirectional", "flip_sequences"]


def flip_sequences(
    inputs: Num[Array, "*shape"],
    seq_lengths: Int[Array, "*batch"] | None,
    num_batch_dims: int,
    time_major: bool,
) -> Num[Array, "*shape"]:
    """Sequences in reverse order; what is behind the end of one stays behind it.

    Args:
        inputs: the sequences.
        seq_lengths: how many positions of each one count; None for all.
        num_batch_dims: how many axes of the input are batch axes.
        time_major: whether time is the first axis; otherwise it comes after the batch axes.

    Raises:
        ArgumentShapeError: if the lengths are not those of the sequences.

    Example:
        >>> flip_sequences(jnp.array([[1, 2, 3, 0]]), jnp.array([3]), 1, False).tolist()
        [[3, 2, 1, 0]]
    """
    axis = 0 if time_major else num_batch_dims
    return recurrent.flip_sequences(inputs, seq_lengths, axis=axis)


class RNN(Module):
    """Runs a cell over sequences.

    Args:
        cell: the cell.
        time_major: whether time is the first axis; otherwise it comes after the batch axes, in
            front of the cell's `num_feature_axes`.
        return_carry: whether to return the last state as well.
        reverse: whether to run from the last position to the first.
        keep_order: of a reverse run, whether outputs are in the order of the inputs.
        unroll: how many steps are compiled into one iteration of the loop.
        state_axes: for each part of the cell's state, by filter, `nnx.Carry`, None if all steps
            share it, or the axis along which each step has its own; by default all is carried.
        broadcast_rngs: a filter of the cell's PRNG streams that give the same keys at each step.
        rngs: streams, whose stream `carry` gives one for the cells' first states; True for one of
            seed 0, False for none.

    Raises:
        RngArgumentError: if `rngs` is something else.

    Example:
        >>> from weft import nnx
        >>> from weft.nnx.nn.cells import GRUCell
        >>> layer = RNN(GRUCell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
        >>> carry, y = layer(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([2, 5]))
        >>> y.shape, bool(jnp.array_equal(carry, y[jnp.array([0, 1]), jnp.array([1, 4])]))
        ((2, 5, 4), True)
    """

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Mapping[Any, Any] | StateAxes | None = None,
        broadcast_rngs: Filter = None,
        rngs: Rngs | RngStream | bool = True,
    ):
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        if not isinstance(state_axes, StateAxes):
            state_axes = StateAxes(state_axes or {...: Carry})
        self.state_axes = state_axes
        if isinstance(broadcast_rngs, list):
            broadcast_rngs = tuple(broadcast_rngs)
        self.broadcast_rngs = broadcast_rngs
        self.rngs = _stream_of(self, rngs)

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: Any = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Streams = None,
    ) -> Any:
        """Runs the cell.

        Args:
            inputs: the sequences; of shape `(time, *batch, *features)` if `time_major`.
            initial_carry: the first state; by default the one that the cell makes.
            seq_lengths: how many positions of each sequence count; all by default.
            return_carry: instead of the attribute.
            time_major: instead of the attribute.
            reverse: instead of the attribute.
            keep_order: instead of the attribute.
            rngs: streams, or a stream, for the cell to make its first state with, instead of the
                layer's own.

        Returns:
            The outputs, or the last state and the outputs.

        Raises:
            ArgumentShapeError: if `seq_lengths` are not those of the sequences, or these have too
                few axes.
            RngArgumentError: if `rngs` is something else.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        axis = _axis_of_time(self.cell, inputs.shape, time_major)
        if seq_lengths is not None:
            recurrent.check_lengths(inputs.shape, seq_lengths, axis)
        if initial_carry is None:
            shape = (*inputs.shape[:axis], *inputs.shape[axis + 1 :])
            streams = _checked(self, rngs)
            stream = streams.carry.fork() if isinstance(streams, Rngs) else streams
            initial_carry = self.cell.initialize_carry(shape, stream)
        flips = reverse and seq_lengths is not None
        if flips:
            inputs = recurrent.flip_sequences(inputs, seq_lengths, axis=axis)
        lengths = seq_lengths if return_carry else None
        carry, outputs = self._looped(initial_carry, inputs, lengths, axis, reverse and not flips)
        if reverse and keep_order == flips:
            outputs = jax.tree.map(
                lambda y: recurrent.flip_sequences(y, seq_lengths, axis=axis), outputs
            )
        return (carry, outputs) if return_carry else outputs

    def _looped(
        self, carry: Any, inputs: Array, seq_lengths: Array | None, axis: int, reverse: bool
    ) -> tuple[Any, Any]:
        with split_rngs(self.cell, splits=1, only=self.broadcast_rngs, squeeze=True) as backups:
            step = _step
            if backups:
                streams = {id(stream) for stream, *_ in backups}
                paths = (path for path, x in iter_graph(self.cell) if id(x) in streams)
                step = functools.partial(_step_of_same_keys, tuple(paths))
            loop = functools.partial(
                scan, out_axes=(Carry, axis), reverse=reverse, unroll=self.unroll
            )
            if seq_lengths is None:
                return loop(step, in_axes=(self.state_axes, Carry, axis))(self.cell, carry, inputs)
            run = loop(
                functools.partial(_step_of_lengths, step),
                in_axes=(self.state_axes, Carry, axis, 0, None),
            )
            steps = jnp.arange(inputs.shape[axis])
            (_, carry), outputs = run(self.cell, (carry, carry), inputs, steps, seq_lengths)
            return carry, outputs


def _step(cell: RNNCellBase, carry: Any, x: Array) -> tuple[Any, Any]:
    return cell(carry, x)


def _step_of_same_keys(
    paths: tuple[Path, ...], cell: RNNCellBase, carry: Any, x: Array
) -> tuple[Any, Any]:
    """A step before which the streams at some paths begin anew."""
    for path, stream in iter_graph(cell):
        if path in paths:
            stream.count.set_value(jnp.zeros_like(stream.count.get_value()))
    return cell(carry, x)


def _step_of_lengths(
    step_of: Callable[..., tuple[Any, Any]],
    cell: RNNCellBase,
    carry: tuple[Any, Any],
    x: Array,
    step: Array,
    seq_lengths: Array,
) -> tuple[tuple[Any, Any], Any]:
    """A step of all sequences, beside which the state is kept that each had where it ended."""
    running, kept = carry
    running, y = step_of(cell, running, x)
    return (running, recurrent.within_lengths(running, kept, step, seq_lengths)), y


def _axis_of_time(cell: RNNCellBase, shape: tuple[int, ...], time_major: bool) -> int:
    axis = len(shape) - (cell.num_feature_axes + 1)
    if axis < 0:
        raise ArgumentShapeError(
            f"an RNN was given an input of shape {shape}; {type(cell).__name__} takes "
            f"{cell.num_feature_axes} axes of features, and there is one of time besides them."
        )
    return 0 if time_major else axis


def _stream_of(layer: Module, rngs: Any) -> RngStream | None:
    """The stream that a layer has for first states."""
    if isinstance(rngs, bool):
        return RngStream(0, tag="carry") if rngs else None
    return kept_stream(rngs, "carry", type(layer).__name__)


def _checked(layer: Any, rngs: Any) -> Any:
    """What is given in a call in the place of the stream of a layer, or else that."""
    if rngs is None:
        return layer.rngs
    if not isinstance(rngs, Rngs | RngStream):
        raise not_streams(rngs, type(layer).__name__)
    return rngs


def _concatenate(a: Array, b: Array) -> Array:
    return jnp.concatenate([a, b], -1)


class Bidirectional(Module):
    """Runs one `RNN` over sequences and one over their reverse, and merges the outputs.

    Args:
        forward_rnn: the one.
        backward_rnn: the other. Where it is the same, the two share parameters.
        merge_fn: from two outputs, in the order of the inputs, to one; by default it puts them
            one after the other along the last axis.
        time_major: see `RNN`.
        return_carry: whether to return both last states, as a pair, as well.
        rngs: see `RNN`; with False, each of the two uses its own.

    Raises:
        RngArgumentError: if `rngs` is something else.

    Example:
        >>> from weft import nnx
        >>> from weft.nnx.nn.cells import GRUCell
        >>> forward, backward = (RNN(GRUCell(3, n, rngs=nnx.Rngs(n))) for n in (4, 6))
        >>> Bidirectional(forward, backward)(jnp.ones((2, 5, 3))).shape
        (2, 5, 10)
    """

    merge_fn: Callable[[Any, Any], Any] = staticmethod(_concatenate)

    def __init__(
        self,
        forward_rnn: RNN,
        backward_rnn: RNN,
        *,
        merge_fn: Callable[[Any, Any], Any] = _concatenate,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: Rngs | RngStream | bool = True,
    ):
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = time_major
        self.return_carry = return_carry
        self.rngs = _stream_of(self, rngs)

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: tuple[Any, Any] | None = None,
        rngs: Streams = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Runs both; arguments and result as of `RNN`.

        Args:
            inputs: the sequences.
            initial_carry: the first states of both, as a pair.
            rngs: streams, or a stream, for both cells to make them with.
            seq_lengths: how many positions of each sequence count.
            return_carry: instead of the attribute.
            time_major: instead of the attribute.
            reverse: without effect, as both directions are run; for the place of an `RNN`.
            keep_order: likewise.

        Raises:
            RngArgumentError: if `rngs` is something else.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        streams = _checked(self, rngs)
        first = (None, None) if initial_carry is None else initial_carry
        run: dict[str, Any] = {
            "rngs": streams.carry if isinstance(streams, Rngs) else streams,
            "seq_lengths": seq_lengths,
            "return_carry": return_carry,
            "time_major": self.time_major if time_major is None else time_major,
        }
        forward = self.forward_rnn(inputs, initial_carry=first[0], reverse=False, **run)
        backward = self.backward_rnn(
            inputs, initial_carry=first[1], reverse=True, keep_order=True, **run
        )
        if not return_carry:
            return jax.tree.map(self.merge_fn, forward, backward)
        (forward_carry, y), (backward_carry, z) = forward, backward
        return (forward_carry, backward_carry), jax.tree.map(self.merge_fn, y, z)
