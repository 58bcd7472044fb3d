import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError
from weft.linen.cells import GRUCell, RNNCellBase, SimpleCell
from weft.linen.lstm import LSTMCell
from weft.linen.rnn import RNN, Bidirectional

KEY = jax.random.key(0)
X = draw(0, 2, 5, 3)
LENGTHS = jnp.array([3, 5])


class Sum(RNNCellBase):
    num_feature_axes = 0

    def initialize_carry(self, rng, input_shape):
        return jnp.zeros(input_shape)

    def __call__(self, carry, x):
        return carry + x, carry + x


def test_a_loop_is_the_cell_step_by_step():
    cell = LSTMCell(4)
    rnn = RNN(cell, return_carry=True)
    (last, y), variables = rnn.init_with_output(KEY, X)
    carry = cell.initialize_carry(KEY, (2, 3))
    for t in range(5):
        carry, out = cell.apply({"params": variables["params"]["cell"]}, carry, X[:, t])
        np.testing.assert_allclose(y[:, t], out, atol=1e-6)
    np.testing.assert_allclose(last, carry, atol=1e-6)


def test_orders():
    x = jnp.array([1.0, 2.0, 4.0])
    run = lambda **kwargs: RNN(Sum(), return_carry=True).apply({}, x, **kwargs)  # noqa: E731
    cases = [
        ({}, 7, [1, 3, 7]),
        ({"reverse": True}, 7, [4, 6, 7]),
        ({"reverse": True, "keep_order": True}, 7, [7, 6, 4]),
        ({"seq_lengths": jnp.array(2)}, 3, [1, 3, 7]),
        ({"seq_lengths": jnp.array(2), "reverse": True}, 3, [2, 3, 7]),
        ({"seq_lengths": jnp.array(2), "reverse": True, "keep_order": True}, 3, [3, 2, 7]),
        ({"initial_carry": jnp.array(10.0)}, 17, [11, 13, 17]),
    ]
    for kwargs, carry, y in cases:
        found = run(**kwargs)
        assert (float(found[0]), found[1].tolist()) == (carry, y), kwargs


def test_no_position_leaves_the_first_state():
    carry, _ = RNN(Sum(), return_carry=True).apply(
        {}, jnp.ones((2, 3)), seq_lengths=jnp.array([0, 3])
    )
    assert carry.tolist() == [0, 3]


def test_states_at_the_ends_of_many_batch_axes():
    x = jnp.ones((2, 3, 4))
    lengths = jnp.array([[1, 2, 3], [4, 0, 2]])
    carry, _ = RNN(Sum(), return_carry=True).apply({}, x, seq_lengths=lengths)
    assert carry.tolist() == lengths.tolist()


def test_time_can_come_first():
    rnn = RNN(GRUCell(4), return_carry=True)
    variables = rnn.init(KEY, X)
    carry, y = rnn.apply(variables, X, seq_lengths=LENGTHS)
    other, z = rnn.apply(variables, X.swapaxes(0, 1), time_major=True, seq_lengths=LENGTHS)
    np.testing.assert_allclose(carry, other)
    np.testing.assert_allclose(y, z.swapaxes(0, 1))


def test_both_directions():
    layer = Bidirectional(RNN(SimpleCell(4)), RNN(SimpleCell(4)), merge_fn=lambda *both: both)
    variables = layer.init(KEY, X)
    (last, first), (y, z) = layer.apply(variables, X, seq_lengths=LENGTHS, return_carry=True)
    np.testing.assert_allclose(last[0], y[0, 2])
    np.testing.assert_allclose(first, z[:, 0])
    back = RNN(SimpleCell(4), reverse=True, keep_order=True)
    alone = back.apply({"params": variables["params"]["backward_rnn"]}, X, seq_lengths=LENGTHS)
    np.testing.assert_allclose(z, alone)


def test_the_cell_is_traced_once():
    traces = []

    class Counted(SimpleCell):
        def __call__(self, carry, x):
            traces.append(x)
            return super().__call__(carry, x)

    rnn = RNN(Counted(4))
    variables = rnn.init(KEY, X)
    traces.clear()
    jax.jit(rnn.apply)(variables, X)
    assert len(traces) == 1


def test_lengths_that_do_not_fit_are_named():
    with pytest.raises(ArgumentShapeError, match=r"shape \(3,\), but the input, of shape \(2, 5,"):
        RNN(SimpleCell(4)).init(KEY, X, seq_lengths=jnp.ones(3, int))
