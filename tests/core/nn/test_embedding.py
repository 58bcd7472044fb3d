import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.core import init
from weft.core.nn import embedding
from weft.errors import ArgumentValueError


def test_rows_are_looked_up_and_compared_with():
    table, variables = init(embedding)(jax.random.key(0), 7, 4)
    rows = variables["params"]["table"]
    np.testing.assert_array_equal(table.lookup(jnp.array([[3, 1]])), rows[jnp.array([[3, 1]])])
    np.testing.assert_allclose(table.attend(rows), rows @ rows.T, rtol=1e-5)


def test_an_id_that_is_not_there_shows():
    table, _ = init(embedding)(jax.random.key(0), 7, 4)
    assert jnp.isnan(table.lookup(jnp.array([100]))).all()
    assert (table.lookup([1, -1]) == table.table[jnp.array([1, 6])]).all()


def test_ids_are_integers():
    table, _ = init(embedding)(jax.random.key(0), 7, 4)
    with pytest.raises(ArgumentValueError, match="ids of dtype float32; expected integers"):
        table.lookup(jnp.ones(2))
