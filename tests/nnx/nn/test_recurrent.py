import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, CellDefinitionError, InvalidRngError, RngArgumentError
from weft.functional.recurrent import gru_step
from weft.nnx.nn.recurrent import flip_sequences

X = draw(0, 2, 5, 3)


def gru(seed=0, hidden=4, **kwargs):
    return nnx.GRUCell(3, hidden, rngs=nnx.Rngs(seed), **kwargs)


def reference(cell, x):
    """Runs a cell over one sequence of shape `(time, features)` in Python."""
    carry, outputs = cell.initialize_carry(x.shape[1:]), []
    for step in x:
        carry, y = cell(carry, step)
        outputs.append(y)
    return carry, jnp.stack(outputs)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=2), st.booleans(), st.booleans())
def test_sequences_are_independent(lengths, reverse, keep_order):
    cell = gru()
    layer = nnx.RNN(cell, return_carry=True, reverse=reverse, keep_order=keep_order)
    carry, y = layer(X, seq_lengths=jnp.array(lengths))
    for i, n in enumerate(lengths):
        x = X[i, :n][::-1] if reverse else X[i, :n]
        last, outputs = jax.jit(functools.partial(reference, cell))(x)
        outputs = outputs[::-1] if reverse and keep_order else outputs
        np.testing.assert_allclose(y[i, :n], outputs, atol=1e-5)
        np.testing.assert_allclose(carry[i], last, atol=1e-5)


@pytest.mark.parametrize(("reverse", "keep_order"), [(False, False), (True, False), (True, True)])
def test_orders_without_lengths(reverse, keep_order):
    cell = gru()
    y = nnx.RNN(cell)(X[0], reverse=reverse, keep_order=keep_order)
    _, outputs = jax.jit(functools.partial(reference, cell))(X[0, ::-1] if reverse else X[0])
    np.testing.assert_allclose(y, outputs[::-1] if keep_order else outputs, atol=1e-5)


def test_time_first_and_several_batch_axes():
    layer = nnx.RNN(gru(), time_major=True)
    x = jax.random.normal(jax.random.key(1), (5, 2, 6, 3))
    y = layer(x)
    assert y.shape == (5, 2, 6, 4)
    other = layer(jnp.moveaxis(x, 0, 2), time_major=False)
    np.testing.assert_allclose(jnp.moveaxis(other, 2, 0), y, atol=1e-6)
    lengths = jnp.ones((2, 6), int)
    carry, _ = layer(x, seq_lengths=lengths, return_carry=True)
    np.testing.assert_allclose(carry, y[0], atol=1e-6)


def test_empty_sequence_keeps_initial_state():
    layer = nnx.RNN(gru(), return_carry=True)
    carry, _ = layer(X, initial_carry=jnp.full((2, 4), 7.0), seq_lengths=jnp.array([0, 5]))
    assert (carry[0] == 7).all() and (carry[1] != 7).all()


class Counter(nnx.RNNCellBase):
    """Counts its steps, and draws."""

    num_feature_axes = 1

    def __init__(self):
        self.steps = nnx.Variable(jnp.array(0))
        self.bias = nnx.BatchStat(jnp.arange(5.0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros(input_shape)

    def __call__(self, carry, inputs):
        self.steps[...] += 1
        return carry + self.bias.mean(), self.drop(jnp.ones_like(inputs))


def test_state_of_a_cell_is_carried_by_default():
    cell = Counter()
    y = nnx.RNN(cell)(X)
    assert cell.steps[...] == 5 and not (y[:, 0] == y[:, 1]).all()
    nnx.RNN(cell)(X)
    assert cell.steps[...] == 10


def test_state_axes_share_or_stack_state():
    carry, _ = nnx.RNN(Counter(), return_carry=True)(X)
    assert (carry == 5 * 2).all()
    for axes in (
        {nnx.BatchStat: 0, ...: nnx.Carry},
        nnx.StateAxes({nnx.BatchStat: 0, ...: nnx.Carry}),
    ):
        carry, _ = nnx.RNN(Counter(), return_carry=True, state_axes=axes)(X)
        assert (carry == 10).all()
    shared = nnx.StateAxes({nnx.BatchStat: None, ...: nnx.Carry})
    assert nnx.RNN(Counter(), state_axes=shared)(X).shape == X.shape


@pytest.mark.parametrize("only", ["dropout", ..., [nnx.RngState]], ids=["tag", "all", "list"])
def test_stream_may_repeat_keys_at_each_step(only):
    cell = Counter()
    layer = nnx.RNN(cell, broadcast_rngs=only)
    y, again = layer(X), layer(X)
    assert (y == y[:, :1]).all() and not (y == again).all() and cell.drop.rngs.count[...] == 2
    carry, same = layer(X, return_carry=True, seq_lengths=jnp.array([2, 5]))
    assert (same == same[:, :1]).all() and carry[0, 0] == 4


def test_initial_states_use_layer_stream():
    normal = nnx.initializers.normal()
    layer = nnx.RNN(gru(carry_init=normal))
    first, second = layer(X), layer(X)
    assert (first != second).any() and layer.rngs.count[...] == 2 and layer.rngs.tag == "carry"
    assert (layer(X, rngs=nnx.Rngs(3)) == layer(X, rngs=nnx.Rngs(carry=3))).all()
    kept = nnx.RNN(gru(carry_init=normal, keep_rngs=True), rngs=False)
    assert kept.rngs is None and (kept(X) != kept(X)).any()
    of_stream = nnx.RNN(gru(), rngs=nnx.RngStream(3))
    assert of_stream.rngs.tag == "default"


def test_both_directions():
    forward, backward = nnx.RNN(gru(0)), nnx.RNN(gru(1, 6))
    layer = nnx.Bidirectional(forward, backward, return_carry=True)
    lengths = jnp.array([2, 5])
    (first, second), y = layer(X, seq_lengths=lengths)
    options = {"seq_lengths": lengths, "return_carry": True}
    a, ya = forward(X, **options)
    b, yb = backward(X, reverse=True, keep_order=True, **options)
    assert (first == a).all() and (second == b).all()
    assert (y == jnp.concatenate([ya, yb], -1)).all()
    summed = nnx.Bidirectional(forward, forward, merge_fn=jnp.add)
    assert summed(X, initial_carry=(jnp.ones((2, 4)), jnp.zeros((2, 4)))).shape == (2, 5, 4)
    assert nnx.Bidirectional.merge_fn(jnp.ones(1), jnp.ones(2)).shape == (3,)


def test_layer_learns_under_jit_with_an_optimizer():
    model = nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 0.5) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(30)]
    assert losses[-1] < losses[0] / 3 and len(traces) == 1 and int(optimizer.step) == 30


def test_flipped_sequences():
    x = jnp.arange(8).reshape(2, 4)
    assert flip_sequences(x, jnp.array([2, 4]), 1, False).tolist() == [[1, 0, 3, 2], [7, 6, 5, 4]]
    assert flip_sequences(x.T, None, 1, True).tolist() == x.T[::-1].tolist()


def test_mismatched_sequences_and_lengths():
    layer = nnx.RNN(gru())
    for lengths in (jnp.array([1, 2, 3]), jnp.ones((2, 1), int)):
        with pytest.raises(ArgumentShapeError, match=r"seq_lengths has shape \(.*give one length"):
            layer(X, seq_lengths=lengths)
    with pytest.raises(ArgumentShapeError, match=r"an RNN was given an input of shape \(3,\); GRU"):
        layer(jnp.ones(3))


def test_invalid_streams():
    for make in (
        lambda: nnx.RNN(gru(), rngs="a"),
        lambda: nnx.RNN(gru())(X, rngs=3),
        lambda: nnx.Bidirectional(nnx.RNN(gru()), nnx.RNN(gru()), rngs=1.5),
        lambda: nnx.Bidirectional(nnx.RNN(gru()), nnx.RNN(gru()))(X, rngs="a"),
    ):
        with pytest.raises(RngArgumentError, match=r"was given rngs=.*; expected PRNG streams"):
            make()


normal = jax.nn.initializers.normal(1.0)


def test_gru_is_the_step_of_functional():
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    h, x = jnp.ones((2, 4)), jnp.arange(6.0).reshape(2, 3)
    expected = gru_step(
        h,
        jnp.split(x @ cell.dense_i.kernel[...] + cell.dense_i.bias[None], 3, -1),
        jnp.split(h @ cell.dense_h.kernel[...], 3, -1),
    )
    carry, y = cell(h, x)
    assert jnp.allclose(y, expected, atol=1e-6) and carry is y and cell.num_feature_axes == 1


def test_simple_cell_adds_its_state_if_residual():
    plain = nnx.SimpleCell(3, 4, activation_fn=jnp.negative, rngs=nnx.Rngs(0))
    residual = nnx.SimpleCell(3, 4, activation_fn=jnp.negative, residual=True, rngs=nnx.Rngs(0))
    h, x = jnp.ones((2, 4)), jnp.ones((2, 3))
    assert jnp.allclose(plain(h, x)[1] - residual(h, x)[1], h, atol=1e-6)


@pytest.mark.parametrize("kind", [nnx.GRUCell, nnx.SimpleCell], ids=lambda kind: kind.__name__)
def test_parameters_of_low_precision(kind):
    cell = kind(3, 4, param_dtype=jnp.bfloat16, dtype=None, rngs=nnx.Rngs(0))
    carry = cell.initialize_carry((2, 3))
    assert carry.dtype == cell.dense_h.kernel.dtype == jnp.bfloat16
    assert cell(carry, jnp.ones((2, 3), jnp.bfloat16))[1].dtype == jnp.bfloat16


def test_initial_state():
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    assert not cell.initialize_carry((2, 5, 3)).any() and cell.rngs is None
    drawn = cell.initialize_carry((2, 3), nnx.Rngs(carry=1), normal)
    assert (drawn == cell.initialize_carry((2, 3), nnx.RngStream(1), normal)).all()
    kept = nnx.GRUCell(3, 4, carry_init=normal, keep_rngs=True, rngs=nnx.Rngs(0))
    first, second = kept.initialize_carry((3,)), kept.initialize_carry((3,))
    assert first.shape == (4,) and (first != second).all() and kept.rngs.count[...] == 2


def test_invalid_initial_state():
    cell = nnx.GRUCell(3, 4, carry_init=normal, rngs=nnx.Rngs(0))
    with pytest.raises(
        InvalidRngError, match=r"GRUCell draws its first state but .* keep_rngs=True"
    ):
        cell.initialize_carry((2, 3))
    with pytest.raises(RngArgumentError, match="GRUCell was given rngs=3; expected PRNG streams"):
        cell.initialize_carry((2, 3), 3)


def test_mismatched_inputs_and_states():
    cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError, match=r"in_features=3 .* an input of shape \(2, 5\)"):
        cell(jnp.ones((2, 4)), jnp.ones((2, 5)))
    with pytest.raises(ArgumentShapeError, match=r"in_features=4 .* an input of shape \(2, 3\)"):
        cell(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(InvalidRngError, match=r"rngs=0 to draw its parameters"):
        nnx.SimpleCell(3, 4, rngs=0)  # pyright: ignore[reportArgumentType]


def test_custom_cell_missing_a_method():
    class Mine(nnx.RNNCellBase):
        pass

    for call, name in (
        (lambda cell: cell.initialize_carry((1,)), "initialize_carry"),
        (lambda cell: cell(1, 2), "__call__"),
        (lambda cell: cell.num_feature_axes, "num_feature_axes"),
    ):
        with pytest.raises(
            CellDefinitionError, match=f"Mine does not define {name}; a cell defines"
        ):
            call(Mine())


def one_map_of(cell):
    """Returns an `OptimizedLSTMCell` with the parameters of an `LSTMCell`."""
    new = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
    of_input = [cell.ii, cell.if_, cell.ig, cell.io]
    of_state = [cell.hi, cell.hf, cell.hg, cell.ho]
    new.dense_i.kernel[...] = jnp.concatenate([m.kernel[...] for m in of_input], -1)
    new.dense_h.kernel[...] = jnp.concatenate([m.kernel[...] for m in of_state], -1)
    new.dense_h.bias[...] = jnp.concatenate([m.bias[...] for m in of_state], -1)
    return new


def test_fused_gates_are_equivalent():
    cell = nnx.LSTMCell(3, 4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    fast, x = one_map_of(cell), jnp.arange(6.0).reshape(2, 3)
    carry = other = cell.initialize_carry((2, 3))
    for _ in range(2):
        carry, y = cell(carry, x)
        other, z = fast(other, x)
    assert jnp.allclose(y, z, atol=1e-6) and jnp.allclose(carry[0], other[0], atol=1e-6)
    assert y is carry[1] and cell.num_feature_axes == fast.num_feature_axes == 1


@pytest.mark.parametrize("kind", [nnx.LSTMCell, nnx.OptimizedLSTMCell], ids=lambda k: k.__name__)
def test_memory_and_output_keys_differ(kind):
    cell = kind(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    c, h = cell.initialize_carry((2, 3), nnx.Rngs(0), nnx.initializers.normal())
    assert c.shape == h.shape == (2, 4) and (c != h).any() and c.dtype == jnp.bfloat16
    (c, h), y = cell((c, h), jnp.ones((2, 3), jnp.bfloat16))
    assert c.dtype == y.dtype == jnp.bfloat16
    with pytest.raises(ArgumentShapeError, match=r"an input of shape \(2, 5\)"):
        cell((c, h), jnp.ones((2, 5)))
