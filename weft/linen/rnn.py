"""Recurrence over sequences: a cell in a loop, and two of them in opposite directions.

The loop is a lifted scan, so a cell's parameters are shared by all steps; what else it has can be
carried or be stacked along a new axis. With `seq_lengths`, the state that is returned is that after
a sequence's last position that counts; outputs behind it mean nothing.
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
    """Runs a cell over sequences.

    Attributes:
        cell: the cell; its variables are those of the submodule `cell`.
        time_major: whether time is the first axis; otherwise it comes after the batch axes, in
            front of the cell's `num_feature_axes`.
        return_carry: whether to return the last state as well.
        reverse: whether to run from the last position to the first.
        keep_order: of a reverse run, whether outputs are in the order of the inputs.
        unroll: how many steps are compiled into one iteration of the loop.
        variable_axes: see `scan`, as for the other attributes.
        variable_broadcast: the collections that all steps share.
        variable_carry: the collections that each step hands to the next.
        split_rngs: the PRNG streams of which each step has keys of its own.

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
        """Runs the cell.

        Args:
            inputs: the sequences; of shape `(time, *batch, *features)` if `time_major`.
            initial_carry: the first state; by default the one that the cell makes.
            init_key: the PRNG key for the cell to make it with.
            seq_lengths: how many positions of each sequence count; all by default.
            return_carry: instead of the attribute.
            time_major: instead of the attribute.
            reverse: instead of the attribute.
            keep_order: instead of the attribute.

        Returns:
            The outputs, or the last state and the outputs.

        Raises:
            ArgumentShapeError: if `seq_lengths` are not those of the sequences.
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
    """A step of all sequences, beside which the state is kept that each had where it ended."""
    running, kept = carry
    running, y = cell(running, x)
    return (running, within_lengths(running, kept, step, seq_lengths)), y


def _concatenate(a: Array, b: Array) -> Array:
    return jnp.concatenate([a, b], -1)


class Bidirectional(Module):
    """Runs one `RNN` over sequences and one over their reverse, and merges the outputs.

    Attributes:
        forward_rnn: the one, a submodule of this name.
        backward_rnn: the other. Where it is the same module, the two share parameters.
        merge_fn: from two outputs, in the order of the inputs, to one; by default it puts them
            one after the other along the last axis.
        time_major: see `RNN`.
        return_carry: whether to return both last states, as a pair, as well.

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
        """Runs both; arguments and result as of `RNN`.

        Args:
            inputs: the sequences.
            initial_carry: the first states of both, as a pair.
            init_key: for both cells to make them with.
            seq_lengths: how many positions of each sequence count.
            return_carry: instead of the attribute.
            time_major: instead of the attribute.
            reverse: without effect, as both directions are run; for the place of an `RNN`.
            keep_order: likewise.
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
