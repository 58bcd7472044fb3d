import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw, quick_key
from weft.core import init
from weft.core.nn import conv, conv_transpose, embedding
from weft.errors import ArgumentShapeError, ArgumentValueError

KEY = quick_key(0)


def test_out_of_range_id_is_nan():
    table, _ = init(embedding)(jax.random.key(0), 7, 4)
    assert jnp.isnan(table.lookup(jnp.array([100]))).all()
    assert (table.lookup([1, -1]) == table.table[jnp.array([1, 6])]).all()


def test_ids_are_integers():
    table, _ = init(embedding)(jax.random.key(0), 7, 4)
    with pytest.raises(ArgumentValueError, match="ids of dtype float32; expected integers"):
        table.lookup(jnp.ones(2))


X = draw(0, 2, 7, 3)


def test_bad_arguments():
    with pytest.raises(
        ArgumentShapeError, match=r"the same spatial axes, but their shapes are \(2"
    ):
        init(conv)(KEY, jnp.ones((2, 7, 3)), 4, (3, 3))
    with pytest.raises(ArgumentShapeError, match=r"their shapes are \(7, 3\) and \(3, 3, 4\)"):
        init(conv_transpose)(KEY, jnp.ones((7, 3)), 4, (3,))
    with pytest.raises(ArgumentValueError, match="give the padding as numbers"):
        init(conv)(KEY, X, 4, (3,), input_dilation=(2,))
    with pytest.raises(ArgumentShapeError, match=r"each of 2 group\(s\), but x has 3 channels"):
        init(conv)(KEY, X, 4, (3,), feature_group_count=2)
    with pytest.raises(ArgumentShapeError, match="4 output channels, which cannot be shared out"):
        init(conv)(KEY, X, 4, (3,), feature_group_count=3)
    with pytest.raises(ArgumentValueError, match="'FULL' is neither one of VALID, SAME"):
        init(conv)(KEY, X, 4, (3,), padding="FULL")
    with pytest.raises(ArgumentValueError, match=r"padding=\(1,\) is neither .* \(left, right\)"):
        init(conv_transpose)(KEY, X, 4, (3,), padding=(1,))
