import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen.embed import Embed

KEY = jax.random.key(0)
IDS = jnp.array([[0, 3, 1]])


def test_fields_may_be_given_by_position():
    layer = Embed(5, 4, jnp.bfloat16, jnp.float16)
    assert (layer.dtype, layer.param_dtype) == (jnp.bfloat16, jnp.float16)


def test_each_id_has_a_vector():
    y, variables = Embed(5, 4).init_with_output(KEY, IDS)
    np.testing.assert_array_equal(y[0], variables["params"]["embedding"][IDS[0]])


def test_an_id_that_is_not_in_the_table_shows():
    y, _ = Embed(5, 4).init_with_output(KEY, jnp.array([4, 5]))
    assert jnp.isnan(y).any(axis=-1).tolist() == [False, True]


def test_queries_are_compared_with_each_vector():
    layer = Embed(5, 4)
    variables = layer.init(KEY, IDS)
    query = jax.random.normal(KEY, (2, 3, 4))
    table = layer.bind(variables).embedding
    logits = layer.apply(variables, query, method="attend")
    np.testing.assert_allclose(logits, query @ table.T, rtol=1e-5, atol=1e-5)


def test_what_is_not_needed_is_not_traced():
    layer = Embed(5, 4)
    jaxpr = jax.make_jaxpr(lambda v, x: layer.apply(v, x, method="attend"))(
        layer.init(KEY, IDS), jnp.ones((2, 4))
    )
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["dot_general"]


def test_ids_are_integers():
    with pytest.raises(ArgumentValueError, match=r"\(the outermost module\) was .* dtype float32"):
        Embed(5, 4).init(KEY, jnp.ones(2))


def test_queries_have_the_size_of_vectors():
    with pytest.raises(ArgumentShapeError, match=r"size 4; expected .* \(..., 4\), .* is \(2, 3\)"):
        Embed(5, 4).init(KEY, jnp.ones((2, 3)), method="attend")
