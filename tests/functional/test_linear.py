import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from weft.errors import ArgumentShapeError, ArgumentValueError, WeftError
from weft.functional import (
    attend,
    broadcast_bias,
    dense,
    dense_general,
    project,
    project_weight_axes,
)

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_dense_names_mismatched_sizes():
    with pytest.raises(ArgumentShapeError, match=r"shape \(4, 5\).*must be \(3,\).*\(2, 3\)"):
        dense(jnp.ones((2, 3)), jnp.ones((4, 5)))
    assert issubclass(ArgumentShapeError, WeftError)
    assert issubclass(ArgumentShapeError, ValueError)


def test_dense_general_custom_dot_general():
    calls = []

    def dot_general(*args, **kwargs):
        calls.append((args[2], kwargs))
        return jax.lax.dot_general(*args, **kwargs)

    x, w, b = array(2, 5, 3), array(2, 3, 4), array(2, 4)
    y = dense_general(
        jnp.array(x), jnp.array(w), jnp.array(b), batch_axes=0, dot_general=dot_general
    )
    np.testing.assert_allclose(y, x @ w + b[:, None], rtol=1e-5, atol=1e-6)
    assert calls == [((((2,), (1,)), ((0,), (0,))), {"precision": None})]


@pytest.mark.parametrize(
    ("subscripts", "ndims", "expected"),
    [
        ("bi,io->bo", (2, 2), ((1,), (1,), 2)),
        ("abc,cde->abed", (3, 3), ((2, 1), (2, 3), 4)),
        ("abc,bcd->adb", (3, 3), ((2, 0), (1, 2), 3)),
        (" ...c, cd -> ...d ", (4, 2), ((1,), (3,), 4)),
        ("...c,...cd->...d", (2, 4), ((0, 1, 3), (0, 1, 2), 3)),
        ("...c,...cd->...d", (4, 3), ((0, 2), (2, 3), 4)),
        ("abc,cd->", (3, 2), ((), (), 0)),
    ],
)
def test_axes_of_a_weight_in_the_result_of_an_einsum(subscripts, ndims, expected):
    assert project_weight_axes(subscripts, *ndims) == expected


@pytest.mark.parametrize("subscripts", ["ab,bc", "ab->a", "a,b,c->abc", ""])
def test_subscripts_need_two_operands_and_result(subscripts):
    with pytest.raises(ArgumentValueError, match=r"an input, a weight and a result, as 'bi,io->bo"):
        project_weight_axes(subscripts, 2, 2)


def test_subscripts_name_each_axis():
    with pytest.raises(ArgumentShapeError, match=r"'io' of .* names 2 axes, .* that has 3"):
        project_weight_axes("bi,io->bo", 2, 3)


def test_spread():
    assert broadcast_bias(jnp.ones((3, 2)), (0, 2), 3).shape == (3, 1, 2)
    assert broadcast_bias(jnp.ones(()), (), 2).shape == (1, 1)
    whole = jnp.ones((3, 1))
    assert broadcast_bias(whole, (0, 1), 2) is whole


def test_result_has_out_sharding():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 3)), P("data"))
        w, b = jnp.ones((3, 6)), jnp.ones(6)
        for spec in (P("data", "model"), P(None, "model")):
            assert dense(x, w, b, out_sharding=spec).sharding.spec == spec
            assert project("bi,io->bo", x, w, b, out_sharding=spec).sharding.spec == spec


def test_custom_einsum():
    def twice(*args, **kwargs):
        assert sorted(kwargs) == ["precision"]
        return 2 * jnp.einsum(*args, **kwargs)

    y = project("bi,io->bo", jnp.ones((2, 3)), jnp.ones((3, 4)), einsum=twice)
    assert y.tolist() == [[6.0] * 4] * 2


@pytest.mark.parametrize("of_bias", ["bool", "int32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16"])
def test_bias_dtype_promotes_like_numpy(dtype, of_bias):
    x, weight, bias = jnp.ones((2, 3), dtype), jnp.ones((3, 2), dtype), jnp.ones(2, of_bias)
    y, expected = dense(x, weight, bias), dense(x, weight) + bias[None]
    assert y.dtype == expected.dtype and (y == expected).all()


PRODUCTS = {
    "dense": (lambda x, w: dense(x, w), (2, 5, 3), (3, 4)),
    "dense_general": (lambda x, w: dense_general(x, w, axis=(2, 3)), (2, 5, 3, 2), (3, 2, 4, 6)),
    "to heads": (lambda x, w: project("...d,dnh->...nh", x, w), (2, 5, 3), (3, 4, 6)),
    "from heads": (lambda x, w: project("btnh,dnh->btd", x, w), (2, 5, 4, 6), (3, 4, 6)),
    "attend": (lambda x, w: attend(w, x), (2, 5, 3), (7, 3)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients_are_those_of_two_matrices_except_on_a_mesh(name):
    # Otherwise XLA's CPU backend transposes gradients of outputs, see `functional/linear.py`.
    fn, x_shape, w_shape = PRODUCTS[name]
    x, w = jnp.array(array(*x_shape)), jnp.array(array(*w_shape))
    # A new function for each trace, which `jit` cannot have in its cache.
    loss = lambda: jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w))), (0, 1)))  # noqa: E731

    def ranks(lowered):
        dots = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
        assert len(dots) == 3
        return {part.count("x") for line in dots for part in line.split("tensor<")[1:]}

    merged = loss()
    assert ranks(merged.lower(x, w)) == {2}
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        separate = loss()
        assert max(ranks(separate.lower(x, w))) > 2
        expected = separate(x, w)
    for a, b in zip(merged(x, w), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_other_einsums_stay_as_they_are():
    x, w = array(2, 5, 4), array(4, 3, 6)
    y = project("btd,dnh->bnth", jnp.array(x), jnp.array(w))
    np.testing.assert_allclose(y, np.einsum("btd,dnh->bnth", x, w), rtol=1e-5, atol=1e-5)
    square = array(3, 3)
    y = project("bti,ij->bj", jnp.array(array(2, 1, 3)), jnp.array(square))
    assert y.shape == (2, 3)
