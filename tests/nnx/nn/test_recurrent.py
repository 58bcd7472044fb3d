import jax
import jax.numpy as jnp
import optax
import pytest

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, CellDefinitionError, InvalidRngError, RngArgumentError

X = draw(0, 2, 5, 3)


def gru(seed=0, hidden=4, **kwargs):
    return nnx.GRUCell(3, hidden, rngs=nnx.Rngs(seed), **kwargs)


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
