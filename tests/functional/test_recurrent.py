import types

import jax
import jax.numpy as jnp
import pytest

from weft.errors import ArgumentShapeError
from weft.functional.recurrent import (
    check_lengths,
    flip_sequences,
    run_layer,
    within_lengths,
)


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_return_the_states_at_the_ends(reverse):
    def cell(carry, x):
        new = {"sum": carry["sum"] + x, "count": carry["count"] + 1}
        return new, new["sum"]

    cell.num_feature_axes = 1
    layer = types.SimpleNamespace(
        cell=cell, return_carry=True, time_major=False, reverse=reverse, keep_order=True
    )

    def loop(step, carry, xs, axis, reverse):
        xs = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), xs)
        carry, y = jax.lax.scan(lambda c, x: step(cell, c, x), carry, xs, reverse=reverse)
        return carry, jnp.moveaxis(y, 0, axis)

    first = {"sum": jnp.zeros((3, 1)), "count": jnp.zeros(3)}
    x = jnp.array([[1.0, 2, 3, 4]] * 3)[..., None]
    names = ("return_carry", "time_major", "reverse", "keep_order")
    carry, y = run_layer(layer, loop, None, x, first, jnp.array([0, 1, 3]), **dict.fromkeys(names))
    assert carry["count"].tolist() == [0, 1, 3]
    assert carry["sum"].ravel().tolist() == [0, 1, 6]
    assert y[2, :3].ravel().tolist() == ([6, 5, 3] if reverse else [1, 3, 6])


def test_states_stay_after_sequence_end():
    new = {"h": jnp.ones((3, 2)), "count": jnp.ones(3)}
    old = jax.tree.map(jnp.zeros_like, new)
    kept = within_lengths(new, old, jnp.array(1), jnp.array([0, 1, 2]))
    assert kept["count"].tolist() == [0, 0, 1]
    assert kept["h"].tolist() == [[0, 0], [0, 0], [1, 1]]


def test_lengths_must_match_batch():
    check_lengths((2, 5, 3), jnp.ones(2), 1)
    check_lengths((5, 2, 3), jnp.ones(2), 0)
    message = r"seq_lengths has shape \(3,\), but the input, of shape \(2, 5, 3\) .* axis 1"
    with pytest.raises(ArgumentShapeError, match=message):
        check_lengths((2, 5, 3), jnp.ones(3), 1)
    with pytest.raises(ArgumentShapeError, match="one length for each sequence"):
        flip_sequences(jnp.ones((2, 5, 3)), jnp.array(4), axis=1)
