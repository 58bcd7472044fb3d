import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.linen.cells import GRUCell, MGUCell, RNNCellBase, SimpleCell

KEY = jax.random.key(0)
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


def test_gates_that_are_shut_keep_the_state():
    cell = GRUCell(4, gate_fn=jnp.ones_like)
    carry = jnp.arange(8.0).reshape(2, 4)
    (state, _), _ = cell.init_with_output(KEY, carry, X)
    np.testing.assert_allclose(state, carry)


def test_first_states_are_drawn_and_have_the_dtype_of_parameters():
    cell = SimpleCell(4, carry_init=jax.nn.initializers.ones, param_dtype=jnp.bfloat16)
    carry = cell.initialize_carry(KEY, (5, 2, 3))
    assert (carry.shape, carry.dtype, float(carry.min())) == ((5, 2, 4), jnp.bfloat16, 1.0)


def test_what_a_cell_must_define_is_named():
    class Nothing(RNNCellBase):
        pass

    with pytest.raises(NotImplementedError, match="Nothing does not define initialize_carry"):
        Nothing().initialize_carry(KEY, (3,))
    with pytest.raises(NotImplementedError, match="Nothing does not define num_feature_axes"):
        _ = Nothing().num_feature_axes
