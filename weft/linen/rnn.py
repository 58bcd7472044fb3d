"""Recurrence over sequences: a cell in a loop, in one or both directions.

The loop is a lifted scan, so all steps share a cell's parameters; other variables can be carried or
stacked along a new axis. With `seq_lengths`, the returned state is that after a sequence's last
valid position, and later outputs are meaningless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft.core.filters import Filter
from weft.core.frozen_dict import FrozenDict
from weft.core.lift import broadcast
from weft.functional.recurrent import check_lengths, flip_sequences, within_lengths
from weft.linen.cells import RNNCellBase
from weft.linen.module import Module
from weft.linen.transforms import scan

__all__ = ["RNN", "Bidirectional"]


class RNN(Module):
    """Layer that applies a cell to sequences.

    Attributes:
        cell: the cell; its variables are in the submodule `cell`.
        time_major: whether time is the first axis; otherwise it precedes the `num_feature_axes`.
        return_carry: whether to return the last state too.
        reverse: whether to run from the last position to the first.
        keep_order: whether a reverse run returns outputs in the order of the inputs.
        unroll: number of steps per compiled iteration.
        variable_axes, variable_broadcast, variable_carry, split_rngs: see `scan`.

    Example:
        >>> from weft import linen as nn
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
    variable_broadcast: Filter = "params"
    variable_carry: Filter = False
    split_rngs: Mapping[Any, bool] = FrozenDict({"params": False})

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: Any = None,
        init_key: Array | None = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Runs the cell; options override the attributes of the same name.

        Args:
            inputs: the sequences, of shape `(time, *batch, *features)` if `time_major`.
            initial_carry: the first state; by default the cell's.
            init_key: PRNG key for the cell's first state.
            seq_lengths: number of valid positions of each sequence; all by default.

        Returns:
            The outputs, or the last state and the outputs.

        Raises:
            ArgumentShapeError: if `seq_lengths` does not match the sequences.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        axis = 0 if time_major else inputs.ndim - (self.cell.num_feature_axes + 1)
        if seq_lengths is not None:
            check_lengths(inputs.shape, seq_lengths, axis)
        if initial_carry is None:
            key = jax.random.key(0) if init_key is None else init_key
            shape = (*inputs.shape[:axis], *inputs.shape[axis + 1 :])
            initial_carry = self.cell.initialize_carry(key, shape)
        flips = reverse and seq_lengths is not None
        if flips:
            inputs = flip_sequences(inputs, seq_lengths, axis=axis)
        loop = functools.partial(
            scan,
            variable_axes=self.variable_axes,
            variable_broadcast=self.variable_broadcast,
            variable_carry=self.variable_carry,
            split_rngs=self.split_rngs,
            out_axes=axis,
            reverse=reverse and not flips,
            unroll=self.unroll,
        )
        if return_carry and seq_lengths is not None:
            steps = jnp.arange(inputs.shape[axis])
            (_, carry), outputs = loop(_step_of_lengths, in_axes=(axis, 0, broadcast))(
                self.cell, (initial_carry, initial_carry), inputs, steps, seq_lengths
            )
        else:
            carry, outputs = loop(_step, in_axes=axis)(self.cell, initial_carry, inputs)
        if reverse and keep_order == flips:
            outputs = jax.tree.map(lambda y: flip_sequences(y, seq_lengths, axis=axis), outputs)
        return (carry, outputs) if return_carry else outputs


def _step(cell: RNNCellBase, carry: Any, x: Array) -> tuple[Any, Any]:
    return cell(carry, x)


def _step_of_lengths(
    cell: RNNCellBase, carry: tuple[Any, Any], x: Array, step: Array, seq_lengths: Array
) -> tuple[tuple[Any, Any], Any]:
    """Computes a step of all sequences, keeping the final state of those that have ended."""
    running, kept = carry
    running, y = cell(running, x)
    return (running, within_lengths(running, kept, step, seq_lengths)), y


def _concatenate(a: Array, b: Array) -> Array:
    return jnp.concatenate([a, b], -1)


class Bidirectional(Module):
    """Layer that applies one `RNN` forward and one backward, and merges the outputs.

    Attributes:
        forward_rnn, backward_rnn: the submodules; may be the same module, to share parameters.
        merge_fn: merges outputs in the order of the inputs; by default concatenates the last axis.
        return_carry: whether to return both last states, as a pair.

    Example:
        >>> from weft import linen as nn
        >>> layer = nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(6)))
        >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))
        >>> y.shape
        (2, 5, 10)
    """

    forward_rnn: RNN
    backward_rnn: RNN
    merge_fn: Callable[[Any, Any], Any] = _concatenate
    time_major: bool = False
    return_carry: bool = False

    def __call__(
        self,
        inputs: Float[Array, "*batch_time_features"],
        *,
        initial_carry: tuple[Any, Any] | None = None,
        init_key: Array | None = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Runs both; see `RNN` for the other arguments and the result.

        Args:
            initial_carry: pair of first states.
            reverse, keep_order: ignored, for compatibility with `RNN`.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        keys = (None, None) if init_key is None else jax.random.split(init_key)
        first = (None, None) if initial_carry is None else initial_carry
        run = {
            "seq_lengths": seq_lengths,
            "return_carry": return_carry,
            "time_major": self.time_major if time_major is None else time_major,
        }
        forward = self.forward_rnn(
            inputs, initial_carry=first[0], init_key=keys[0], reverse=False, **run
        )
        backward = self.backward_rnn(
            inputs, initial_carry=first[1], init_key=keys[1], reverse=True, keep_order=True, **run
        )
        if not return_carry:
            return jax.tree.map(self.merge_fn, forward, backward)
        (forward_carry, y), (backward_carry, z) = forward, backward
        return (forward_carry, backward_carry), jax.tree.map(self.merge_fn, y, z)
