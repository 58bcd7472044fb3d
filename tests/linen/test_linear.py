import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw, quick_key
from weft.errors import ArgumentShapeError, ArgumentValueError, ParameterGivenTwiceError
from weft.linen.linear import Dense, DenseGeneral, Einsum, Embed
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = quick_key(0)
X = draw(0, 2, 3, 4)


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


@pytest.mark.parametrize("layer", [Dense(2), DenseGeneral(2)], ids=["Dense", "DenseGeneral"])
@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"x": X, "y": X}, r"a dict with the keys \['x', 'y'\]; give it one array"),
        (None, "None; give it one array"),
        ("x", "'x'; give it one array"),
    ],
    ids=["dict", "None", "text"],
)
def test_inputs_that_are_no_arrays_are_named(layer, inputs, text):
    with pytest.raises(ArgumentShapeError, match=f"the outermost module. was given {text}"):
        layer.init(KEY, inputs)


def test_invalid_subscripts_are_named():
    with pytest.raises(ArgumentValueError, match="an input, a weight and a result"):
        Einsum((4, 5), "ab,bc").init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=r"'bc' of .* names 2 axes, .* has 3"):
        Einsum((4, 5, 6), "abi,bc->ac").init(KEY, X)
    with pytest.raises(ParameterGivenTwiceError, match="'einsum_str' was given"):
        Einsum((4, 5)).init(KEY, X)


IDS = jnp.array([[0, 3, 1]])


def test_out_of_range_id_is_nan():
    y, _ = Embed(5, 4).init_with_output(KEY, jnp.array([4, 5]))
    assert jnp.isnan(y).any(axis=-1).tolist() == [False, True]


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
