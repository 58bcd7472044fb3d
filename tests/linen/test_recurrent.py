import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.errors import ArgumentShapeError
from weft.linen.recurrent import (
    RNN,
    Bidirectional,
    ConvLSTMCell,
    GRUCell,
    LSTMCell,
    MGUCell,
    OptimizedLSTMCell,
    RNNCellBase,
    SimpleCell,
)

KEY = quick_key(0)
X = draw(0, 2, 3)


@pytest.mark.parametrize(
    "cell", [SimpleCell(4), GRUCell(4), MGUCell(4)], ids=lambda c: type(c).__name__
)
def test_one_step(cell):
    carry = cell.initialize_carry(KEY, X.shape)
    assert carry.tolist() == jnp.zeros((2, 4)).tolist()
    assert cell.num_feature_axes == 1
    (state, y), _ = cell.init_with_output(KEY, carry, X)
    assert state.tolist() == y.tolist()
    assert y.shape == (2, 4)


def test_closed_gates_keep_the_state():
    cell = GRUCell(4, gate_fn=jnp.ones_like)
    carry = jnp.arange(8.0).reshape(2, 4)
    (state, _), _ = cell.init_with_output(KEY, carry, X)
    np.testing.assert_allclose(state, carry)


def test_initial_states_are_drawn_in_param_dtype():
    cell = SimpleCell(4, carry_init=jax.nn.initializers.ones, param_dtype=jnp.bfloat16)
    carry = cell.initialize_carry(KEY, (5, 2, 3))
    assert (carry.shape, carry.dtype, float(carry.min())) == ((5, 2, 4), jnp.bfloat16, 1.0)


def test_missing_cell_method_is_named():
    class Nothing(RNNCellBase):
        pass

    with pytest.raises(NotImplementedError, match="Nothing does not define initialize_carry"):
        Nothing().initialize_carry(KEY, (3,))
    with pytest.raises(NotImplementedError, match="Nothing does not define num_feature_axes"):
        _ = Nothing().num_feature_axes


def test_fused_maps_are_equivalent():
    plain, together = LSTMCell(4), OptimizedLSTMCell(4)
    carry = (jnp.ones((2, 4)), -jnp.ones((2, 4)))
    variables = plain.init(KEY, carry, X)
    ours = together.init(KEY, carry, X)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, variables, ours))
    ((c, h), y), ((other_c, other_h), z) = (
        cell.apply(variables, carry, X) for cell in (plain, together)
    )
    np.testing.assert_allclose(c, other_c, atol=1e-6)
    np.testing.assert_allclose(h, other_h, atol=1e-6)
    assert y.tolist() == h.tolist()
    assert z.tolist() == other_h.tolist()


def test_memory_and_output_use_separate_keys():
    normal = jax.nn.initializers.normal()
    for cell in (LSTMCell(4, carry_init=normal), ConvLSTMCell(4, (3,), carry_init=normal)):
        c, h = cell.initialize_carry(KEY, (2, 5, 3))
        assert c.shape == h.shape == (2, 5, 4)
        assert not jnp.array_equal(c, h)


def test_images_keep_their_size():
    cell = ConvLSTMCell(4, (3, 3))
    assert cell.num_feature_axes == 3
    images = jnp.ones((2, 6, 7, 3))
    carry = cell.initialize_carry(KEY, images.shape)
    ((c, h), _), variables = cell.init_with_output(KEY, carry, images)
    assert c.shape == h.shape == (2, 6, 7, 4)
    assert variables["params"]["hh"]["kernel"].shape == (3, 3, 4, 16)


SEQUENCE = draw(0, 2, 5, 3)
LENGTHS = jnp.array([3, 5])


class Sum(RNNCellBase):
    num_feature_axes = 0

    def initialize_carry(self, rng, input_shape):
        return jnp.zeros(input_shape)

    def __call__(self, carry, x):
        return carry + x, carry + x


def test_loop_matches_cell_steps():
    cell = LSTMCell(4)
    rnn = RNN(cell, return_carry=True)
    (last, y), variables = rnn.init_with_output(KEY, SEQUENCE)
    carry = cell.initialize_carry(KEY, (2, 3))
    for t in range(5):
        carry, out = cell.apply({"params": variables["params"]["cell"]}, carry, SEQUENCE[:, t])
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


def test_empty_sequence_keeps_the_state():
    carry, _ = RNN(Sum(), return_carry=True).apply(
        {}, jnp.ones((2, 3)), seq_lengths=jnp.array([0, 3])
    )
    assert carry.tolist() == [0, 3]


def test_states_at_the_ends_of_many_batch_axes():
    x = jnp.ones((2, 3, 4))
    lengths = jnp.array([[1, 2, 3], [4, 0, 2]])
    carry, _ = RNN(Sum(), return_carry=True).apply({}, x, seq_lengths=lengths)
    assert carry.tolist() == lengths.tolist()


def test_time_major():
    rnn = RNN(GRUCell(4), return_carry=True)
    variables = rnn.init(KEY, SEQUENCE)
    carry, y = rnn.apply(variables, SEQUENCE, seq_lengths=LENGTHS)
    other, z = rnn.apply(variables, SEQUENCE.swapaxes(0, 1), time_major=True, seq_lengths=LENGTHS)
    np.testing.assert_allclose(carry, other)
    np.testing.assert_allclose(y, z.swapaxes(0, 1))


def test_both_directions():
    layer = Bidirectional(RNN(SimpleCell(4)), RNN(SimpleCell(4)), merge_fn=lambda *both: both)
    variables = jax.jit(layer.init)(KEY, SEQUENCE)
    apply = jax.jit(functools.partial(layer.apply, return_carry=True))
    (last, first), (y, z) = apply(variables, SEQUENCE, seq_lengths=LENGTHS)
    np.testing.assert_allclose(last[0], y[0, 2])
    np.testing.assert_allclose(first, z[:, 0])
    back = RNN(SimpleCell(4), reverse=True, keep_order=True)
    alone = jax.jit(back.apply)(
        {"params": variables["params"]["backward_rnn"]}, SEQUENCE, seq_lengths=LENGTHS
    )
    np.testing.assert_allclose(z, alone)


def test_cell_is_traced_once():
    traces = []

    class Counted(SimpleCell):
        def __call__(self, carry, x):
            traces.append(x)
            return super().__call__(carry, x)

    rnn = RNN(Counted(4))
    variables = rnn.init(KEY, SEQUENCE)
    traces.clear()
    jax.jit(rnn.apply)(variables, SEQUENCE)
    assert len(traces) == 1


def test_invalid_lengths_are_named():
    with pytest.raises(ArgumentShapeError, match=r"shape \(3,\), but the input, of shape \(2, 5,"):
        RNN(SimpleCell(4)).init(KEY, SEQUENCE, seq_lengths=jnp.ones(3, int))


@pytest.mark.parametrize(
    ("cell", "with_bias", "without_bias"),
    [
        (SimpleCell, "i", "h"),
        (GRUCell, "ir iz in hn", "hr hz"),
        (LSTMCell, "hi hf hg ho", "ii if ig io"),
        (OptimizedLSTMCell, "hi hf hg ho", "ii if ig io"),
    ],
)
def test_names_and_biases_of_the_maps(cell, with_bias, without_bias):
    cell = cell(4, bias_init=jax.nn.initializers.constant(0.5))
    params = cell.init(KEY, cell.initialize_carry(KEY, X.shape), X)["params"]
    assert sorted(params) == sorted([*with_bias.split(), *without_bias.split()])
    for name, param in params.items():
        assert param["kernel"].shape == (3 if name.startswith("i") else 4, 4)
        assert ("bias" in param) == (name in with_bias.split())
        assert "bias" not in param or (param["bias"] == 0.5).all()


def test_convolutional_lstm_with_one_position_is_an_lstm():
    cell = ConvLSTMCell(4, kernel_size=(1,))
    x, c, h = draw(1, 2, 1, 3), draw(2, 2, 1, 4), draw(3, 2, 1, 4)
    ((new_c, new_h), _), variables = cell.init_with_output(KEY, (c, h), x)
    of_input, of_state = variables["params"]["ih"], variables["params"]["hh"]
    gates = x @ of_input["kernel"] + h @ of_state["kernel"]
    i, g, f, o = jnp.split(gates, 4, axis=-1)
    expected = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    np.testing.assert_allclose(new_c, expected, rtol=1e-5)
    np.testing.assert_allclose(new_h, jax.nn.sigmoid(o) * jnp.tanh(expected), rtol=1e-5)
