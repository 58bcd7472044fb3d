import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import (
    ArgumentShapeError,
    CellDefinitionError,
    InvalidRngError,
    RngArgumentError,
)
from weft.functional.recurrent import gru_step

normal = jax.nn.initializers.normal(1.0)


def test_a_gru_is_the_step_of_functional():
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    h, x = jnp.ones((2, 4)), jnp.arange(6.0).reshape(2, 3)
    expected = gru_step(
        h,
        jnp.split(x @ cell.dense_i.kernel[...] + cell.dense_i.bias[None], 3, -1),
        jnp.split(h @ cell.dense_h.kernel[...], 3, -1),
    )
    carry, y = cell(h, x)
    assert jnp.allclose(y, expected, atol=1e-6) and carry is y and cell.num_feature_axes == 1


def test_a_simple_cell_adds_its_state_if_residual():
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


def test_a_first_state():
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    assert not cell.initialize_carry((2, 5, 3)).any() and cell.rngs is None
    drawn = cell.initialize_carry((2, 3), nnx.Rngs(carry=1), normal)
    assert (drawn == cell.initialize_carry((2, 3), nnx.RngStream(1), normal)).all()
    kept = nnx.GRUCell(3, 4, carry_init=normal, keep_rngs=True, rngs=nnx.Rngs(0))
    first, second = kept.initialize_carry((3,)), kept.initialize_carry((3,))
    assert first.shape == (4,) and (first != second).all() and kept.rngs.count[...] == 2


def test_a_first_state_that_cannot_be_drawn():
    cell = nnx.GRUCell(3, 4, carry_init=normal, rngs=nnx.Rngs(0))
    with pytest.raises(
        InvalidRngError, match=r"GRUCell draws its first state but .* keep_rngs=True"
    ):
        cell.initialize_carry((2, 3))
    with pytest.raises(RngArgumentError, match="GRUCell was given rngs=3; expected PRNG streams"):
        cell.initialize_carry((2, 3), 3)


def test_inputs_and_states_that_do_not_fit():
    cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError, match=r"in_features=3 .* an input of shape \(2, 5\)"):
        cell(jnp.ones((2, 4)), jnp.ones((2, 5)))
    with pytest.raises(ArgumentShapeError, match=r"in_features=4 .* an input of shape \(2, 3\)"):
        cell(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(InvalidRngError, match=r"rngs=0 to draw its parameters"):
        nnx.SimpleCell(3, 4, rngs=0)  # pyright: ignore[reportArgumentType]


def test_a_cell_of_ones_own_that_misses_a_method():
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
