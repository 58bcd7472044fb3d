import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.functional.recurrent import (
    check_lengths,
    flip_sequences,
    gru_step,
    lstm_step,
    mgu_step,
    run_layer,
    within_lengths,
)

RNG = np.random.default_rng(0)


def draw(count):
    return [jnp.array(RNG.normal(size=(2, 4)).astype(np.float32)) for _ in range(count)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_lstm():
    c, i, f, g, o = draw(5)
    memory, output = lstm_step(c, i, f, g, o)
    expected = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    close(memory, expected)
    close(output, sigmoid(o) * np.tanh(expected))
    memory, output = lstm_step(c, i, f, g, o, gate_fn=jnp.ones_like, activation_fn=jnp.negative)
    close((memory, output), (c - g, g - c))
    memory, output = lstm_step(c, i, f, g, o, max_cell_value=0.1)
    close(memory, np.clip(expected, -0.1, 0.1))
    close(output, sigmoid(o) * np.tanh(memory))


def test_gru():
    h, *maps = draw(7)
    state = gru_step(h, maps[:3], maps[3:])
    (ir, iz, i_new), (hr, hz, h_new) = maps[:3], maps[3:]
    keep = sigmoid(iz + hz)
    close(state, (1 - keep) * np.tanh(i_new + sigmoid(ir + hr) * h_new) + keep * h)
    close(gru_step(h, maps[:3], maps[3:], gate_fn=jnp.ones_like), h)


@pytest.mark.parametrize("reset_gate", [True, False])
def test_mgu(reset_gate):
    h, *maps = draw(5)
    state = mgu_step(h, maps[:2], maps[2:], reset_gate=reset_gate)
    forget = sigmoid(maps[0] + maps[2])
    new = np.tanh(maps[1] + (forget if reset_gate else 1) * maps[3])
    close(state, (1 - forget) * new + forget * h)


@pytest.mark.parametrize("time_major", [False, True])
def test_sequences_are_flipped_up_to_their_ends(time_major):
    x = jnp.arange(24).reshape(2, 4, 3)
    given = x.swapaxes(0, 1) if time_major else x
    axis = 0 if time_major else 1
    lengths = jnp.array([3, 4])
    flipped = flip_sequences(given, lengths, axis=axis)
    by_batch = flipped.swapaxes(0, 1) if time_major else flipped
    assert by_batch[0].tolist() == x[0][jnp.array([2, 1, 0, 3])].tolist()
    assert by_batch[1].tolist() == x[1, ::-1].tolist()
    assert flip_sequences(flipped, lengths, axis=axis).tolist() == given.tolist()
    assert flip_sequences(given, axis=axis).tolist() == jnp.flip(given, axis).tolist()


def test_one_sequence_and_many_batch_axes():
    x = jnp.arange(4)
    assert flip_sequences(x, jnp.array(2), axis=0).tolist() == [1, 0, 3, 2]
    many = jnp.broadcast_to(x, (2, 3, 4))
    lengths = jnp.array([[1, 2, 3], [4, 0, 2]])
    flipped = flip_sequences(many, lengths, axis=2)
    assert flipped[0, 2].tolist() == [2, 1, 0, 3]
    assert flipped[1, 0].tolist() == [3, 2, 1, 0]


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
