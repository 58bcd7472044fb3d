"""Recurrence over sequences: a cell in a scan, and two in opposite directions.

`state_axes` selects the cell's state that all steps share, that is carried, or that is stacked
along an axis; by default all is carried, so that a cell can count and draw. With `seq_lengths`, the
returned state is that after a sequence's last valid position, and outputs after it are undefined.
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
    """Reverses sequences; padding after the end of a sequence stays there.

    Args:
        seq_lengths: number of valid positions per sequence; None for all.
        num_batch_dims: number of batch axes.
        time_major: whether time is the first axis; otherwise it follows the batch axes.

    Raises:
        ArgumentShapeError: if the lengths do not match the sequences.

    Example:
        >>> flip_sequences(jnp.array([[1, 2, 3, 0]]), jnp.array([3]), 1, False).tolist()
        [[3, 2, 1, 0]]
    """
    axis = 0 if time_major else num_batch_dims
    return recurrent.flip_sequences(inputs, seq_lengths, axis=axis)


class RNN(Module):
    """Layer that runs a cell over sequences.

    Args:
        time_major: whether time is the first axis; otherwise it follows the batch axes and precedes
            the cell's `num_feature_axes`.
        return_carry: whether to return the last state as well.
        reverse: whether to run from the last position to the first.
        keep_order: whether the outputs of a reverse run are in the order of the inputs.
        unroll: number of steps compiled into one loop iteration.
        state_axes: for parts of the cell's state, by filter: `nnx.Carry`, None to share it between
            steps, or the axis of per-step state; by default all is carried.
        broadcast_rngs: filter of the cell's PRNG streams that yield the same keys at each step.
        rngs: streams whose `carry` draws the first states; True for a stream of seed 0, False for
            none.

    Raises:
        RngArgumentError: if `rngs` has another type.

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
        """Runs the cell; arguments other than the first override the attributes of the same name.

        Args:
            inputs: sequences; of shape `(time, *batch, *features)` if `time_major`.
            initial_carry: first state; by default from the cell's `initialize_carry`.
            seq_lengths: number of valid positions per sequence; all by default.
            rngs: streams, or a stream, that draw the first state instead of the layer's own.

        Returns:
            The outputs, or the last state and the outputs.
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
    """Applies a step to all sequences, and keeps the state that each had where it ended."""
    running, kept = carry
    running, y = step_of(cell, running, x)
    return (running, recurrent.within_lengths(running, kept, step, seq_lengths)), y


def _axis_of_time(cell: RNNCellBase, shape: tuple[int, ...], time_major: bool) -> int:
    axis = len(shape) - (cell.num_feature_axes + 1)
    if axis < 0:
        raise ArgumentShapeError(
            f"an RNN was given an input of shape {shape}; {type(cell).__name__} takes "
            f"{cell.num_feature_axes} feature axes, in addition to the time axis."
        )
    return 0 if time_major else axis


def _stream_of(layer: Module, rngs: Any) -> RngStream | None:
    if isinstance(rngs, bool):
        return RngStream(0, tag="carry") if rngs else None
    return kept_stream(rngs, "carry", type(layer).__name__)


def _checked(layer: Any, rngs: Any) -> Any:
    if rngs is None:
        return layer.rngs
    if not isinstance(rngs, Rngs | RngStream):
        raise not_streams(rngs, type(layer).__name__)
    return rngs


def _concatenate(a: Array, b: Array) -> Array:
    return jnp.concatenate([a, b], -1)


class Bidirectional(Module):
    """Layer that runs one `RNN` over sequences and one over their reverse, and merges the outputs.

    Args:
        backward_rnn: runs on the reverse; may be `forward_rnn`, to share parameters.
        merge_fn: merges the two outputs, in the order of the inputs; by default concatenates them
            along the last axis.
        time_major: see `RNN`.
        return_carry: whether to return both last states, as a pair, as well.
        rngs: see `RNN`; with False, each `RNN` uses its own.

    Raises:
        RngArgumentError: if `rngs` has another type.

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
        """Runs both; other arguments and result as for `RNN`.

        Args:
            initial_carry: pair of first states.
            rngs: streams, or a stream, that draw both first states.
            reverse: no effect, like `keep_order`; accepted for compatibility with `RNN`.
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
