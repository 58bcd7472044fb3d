import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.errors import ArgumentShapeError, ArgumentValueError, ParameterGivenTwiceError
from weft.functional import arrays as mathematics
from weft.linen import linear
from weft.linen.linear import Dense, DenseGeneral, Einsum, Embed
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = quick_key(0)
X = draw(0, 2, 3, 4)


def test_fields_may_be_positional():
    layer = Dense(5, False, jnp.bfloat16)
    assert (layer.features, layer.use_bias, layer.dtype) == (5, False, jnp.bfloat16)
    assert DenseGeneral(5, (0, 1), (2,)).batch_dims == (2,)
    assert Einsum((4, 5), "ab,bc->ac", False).use_bias is False


def test_dense_is_a_product_and_a_bias():
    y, variables = Dense(5, bias_init=jax.nn.initializers.ones).init_with_output(KEY, X)
    np.testing.assert_allclose(y, X @ variables["params"]["kernel"] + 1, rtol=1e-5, atol=1e-6)


def test_dense_general_init_uses_matrix_fans():
    params = DenseGeneral((20, 10), axis=(0, 1)).init(KEY, jnp.ones((30, 20)))["params"]
    assert params["kernel"].shape == (30, 20, 20, 10)
    assert params["kernel"].std() == pytest.approx((30 * 20) ** -0.5, rel=0.05)


def test_each_position_of_batch_axes_has_parameters():
    layer = DenseGeneral(5, batch_dims=(0,))
    y, variables = layer.init_with_output(KEY, X)
    kernel = variables["params"]["kernel"]
    np.testing.assert_allclose(y, jnp.einsum("abc,acd->abd", X, kernel), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(kernel[0], kernel[1])


def test_map_to_no_axis():
    y, variables = DenseGeneral((), axis=(1, 2)).init_with_output(KEY, X)
    assert (y.shape, variables["params"]["kernel"].shape) == ((2,), (3, 4))


def test_no_unneeded_operations():
    params = Dense(5, use_bias=False).init(KEY, X)
    jaxpr = jax.make_jaxpr(Dense(5, use_bias=False).apply)(params, X[0])
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["dot_general"]


def test_dense_of_a_number():
    with pytest.raises(ArgumentShapeError, match=r"\(the outermost module\).*has none.*shape is"):
        Dense(3).init(KEY, 1.0)


class Model(Module):
    layer: Module

    @compact
    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_dims": (1,)}, r"layer has batch_dims=\(1,\); expected the first axes, \(0,\)"),
        ({"axis": 3}, r"layer has axis=3; expected different axes.*shape is \(2, 3, 4\)"),
        ({"axis": (1, -2)}, r"has axis=\(1, -2\); expected different axes"),
        ({"axis": 0, "batch_dims": 0}, r"axis=0; expected.*none of batch_dims=0"),
    ],
)
def test_mismatched_axes_are_named(kwargs, message):
    with pytest.raises(ArgumentShapeError, match=message):
        Model(DenseGeneral(3, **kwargs)).init(KEY, X)


def test_invalid_subscripts_are_named():
    with pytest.raises(ArgumentValueError, match="an input, a weight and a result"):
        Einsum((4, 5), "ab,bc").init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=r"'bc' of .* names 2 axes, .* has 3"):
        Einsum((4, 5, 6), "abi,bc->ac").init(KEY, X)
    with pytest.raises(ParameterGivenTwiceError, match="'einsum_str' was given"):
        Einsum((4, 5)).init(KEY, X)


IDS = jnp.array([[0, 3, 1]])


def test_embed_fields_may_be_positional():
    layer = Embed(5, 4, jnp.bfloat16, jnp.float16)
    assert (layer.dtype, layer.param_dtype) == (jnp.bfloat16, jnp.float16)


def test_each_id_has_a_vector():
    y, variables = Embed(5, 4).init_with_output(KEY, IDS)
    np.testing.assert_array_equal(y[0], variables["params"]["embedding"][IDS[0]])


def test_out_of_range_id_is_nan():
    y, _ = Embed(5, 4).init_with_output(KEY, jnp.array([4, 5]))
    assert jnp.isnan(y).any(axis=-1).tolist() == [False, True]


def test_queries_are_compared_with_each_vector():
    layer = Embed(5, 4)
    variables = layer.init(KEY, IDS)
    query = jax.random.normal(KEY, (2, 3, 4))
    table = layer.bind(variables).embedding
    logits = layer.apply(variables, query, method="attend")
    np.testing.assert_allclose(logits, query @ table.T, rtol=1e-5, atol=1e-5)


def test_embed_does_not_trace_unneeded_operations():
    layer = Embed(5, 4)
    jaxpr = jax.make_jaxpr(lambda v, x: layer.apply(v, x, method="attend"))(
        layer.init(KEY, IDS), jnp.ones((2, 4))
    )
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["transpose", "dot_general"]


def test_ids_are_integers():
    with pytest.raises(ArgumentValueError, match=r"\(the outermost module\) was .* dtype float32"):
        Embed(5, 4).init(KEY, jnp.ones(2))


def test_queries_have_the_size_of_vectors():
    with pytest.raises(ArgumentShapeError, match=r"size 4; expected .* \(..., 4\), .* is \(2, 3\)"):
        Embed(5, 4).init(KEY, jnp.ones((2, 3)), method="attend")


def test_reexported_from_functional():
    assert linear.promote_dtype is mathematics.promote_dtype


def test_float32_parameters_promote_half_precision_input():
    x, kernel, bias = linear.promote_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2), None)
    assert (x.dtype, kernel.dtype, bias) == (jnp.float32, jnp.float32, None)
