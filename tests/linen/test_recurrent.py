import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.errors import ArgumentShapeError
from weft.linen.recurrent import (
    RNN,
    ConvLSTMCell,
    LSTMCell,
    OptimizedLSTMCell,
    RNNCellBase,
    SimpleCell,
)

KEY = quick_key(0)
X = draw(0, 2, 3)


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


SEQUENCE = draw(0, 2, 5, 3)


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
