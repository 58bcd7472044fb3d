"""Products of 8 bits with scales of each call: values, gradients, and the layers that take them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from weft import linen, nnx
from weft.errors import ArgumentValueError
from weft.functional import fp8_dot_general, int8_dot_general, project

PRODUCTS = {"int8": int8_dot_general, "fp8": fp8_dot_general}
NUMBERS = ((3, 1), (0, 2)), ((2,), (1,))  # contracted and batch axes, in another order


def operands(dtype=np.float32):
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=size) for size in ((5, 4, 2, 6), (6, 2, 4, 3), (2, 5, 3)))
    x[1] *= 1e4  # the scale of a row is its own in int8
    x[2] = 0
    return [jnp.asarray(a, dtype) for a in (x, w, g)]


def rounded(x, product, dtype, axes):
    x = np.asarray(x, np.float32)
    if product == "fp8":
        scale = np.abs(x).max() / np.float32(ml_dtypes.finfo(dtype).max)
        return (x / scale).astype(dtype).astype(np.float64) * scale
    scale = np.abs(x).max(axes, keepdims=True) / np.float32(127)
    scale = np.where(scale == 0, np.float32(1), scale)
    return np.round(x / scale).astype(np.float64) * scale


@pytest.mark.parametrize("product", PRODUCTS)
def test_values_and_gradients_are_those_of_rounded_operands(product):
    x, w, g = operands()
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    subscripts = "bkni,inkj->nbj"  # of NUMBERS: contracted k and i, batch n

    def q(a, axes, dtype=e4m3):
        return rounded(a, product, dtype, axes)

    @jax.jit
    def product_and_gradients(x, w, g):
        y, pullback = jax.vjp(lambda x, w: PRODUCTS[product](x, w, NUMBERS), x, w)
        return y, *pullback(g)

    y, of_x, of_w = product_and_gradients(x, w, g)
    expected = np.einsum(subscripts, q(x, (1, 3)), q(w, (0, 2)))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)

    expected = np.einsum("nbj,inkj->bkni", q(g, 2, e5m2), q(w, 3))
    np.testing.assert_allclose(of_x, expected, rtol=1e-5, atol=1e-4)
    if product == "int8":  # the gradient of weights has no rounded operands
        expected = np.einsum("nbj,bkni->inkj", np.float64(g), np.float64(x))
    else:
        expected = np.einsum("nbj,bkni->inkj", q(g, None, e5m2), q(x, None))
    np.testing.assert_allclose(of_w, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("product", "at_most"), [("int8", 0.02), ("fp8", 0.15)])
def test_gradients_are_close_to_those_of_full_precision(product, at_most):
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((64, 32), (32, 16)))

    def grads(dot_general):
        def loss(x, w):
            y = dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return jnp.sin(y / 4).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)[1]

    for of_8, of_16 in zip(grads(PRODUCTS[product]), grads(lax.dot_general), strict=True):
        assert of_8.dtype == of_16.dtype == jnp.bfloat16
        error = jnp.linalg.norm((of_8 - of_16).astype(jnp.float32))
        assert 0 < error < at_most * jnp.linalg.norm(of_16.astype(jnp.float32))


@pytest.mark.parametrize(
    ("subscripts", "shape"),
    [("...i,iab->...ab", (6, 3, 7)), ("bkni,dni->bkd", (3, 2, 6)), ("bkni,nid->bknd", (2, 6, 3))],
)
def test_projections_keep_the_weight_second(subscripts, shape):
    # Its gradient is the one without rounding.
    x, w = operands()[0], jnp.ones(shape)

    def loss(w, **kwargs):
        return project(subscripts, x, w, **kwargs).sum()

    @jax.jit
    def both(w):
        values = [project(subscripts, x, w, dot_general=f) for f in (None, int8_dot_general)]
        return values, jax.grad(loss)(w, dot_general=int8_dot_general), jax.grad(loss)(w)

    values, of_8, expected = both(w)
    np.testing.assert_allclose(of_8, expected, rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(*values, rtol=0.05, atol=400)


def test_undefined_numbers_stay_undefined():
    for product in PRODUCTS.values():
        for bad in (np.nan, np.inf):
            y = product(jnp.array([[1.0, bad]]), jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
            assert not np.isfinite(y)


@pytest.mark.parametrize("product", PRODUCTS)
def test_layers_of_linen_and_nnx_train_in_8_bits(product):
    dot_general = PRODUCTS[product]
    x = jax.random.normal(jax.random.key(0), (32, 4))
    y = x @ jax.random.normal(jax.random.key(1), (4, 3))
    of_linen = linen.Dense(3, dot_general=dot_general)
    of_nnx = nnx.Linear(4, 3, dot_general=dot_general, rngs=nnx.Rngs(0))
    graph, state = nnx.split(of_nnx)
    for forward, params in (
        (of_linen.apply, of_linen.init(jax.random.key(2), x)),
        (lambda params, x: nnx.merge(graph, params)(x), state),
    ):

        def loss(params, forward=forward):
            return jnp.square(forward(params, x) - y).mean()

        step = jax.jit(jax.value_and_grad(loss))
        before = loss(params)
        for _ in range(40):
            _, grads = step(params)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        assert loss(params) < 0.02 * before


def test_mistakes_are_explained():
    matrices = ((1,), (0,)), ((), ())
    for name, product in PRODUCTS.items():
        with pytest.raises(
            ArgumentValueError, match=f"rhs of {name}_dot_general has the dtype int"
        ):
            product(jnp.ones((2, 2)), jnp.ones((2, 2), int), matrices)
        with pytest.raises(ArgumentValueError, match="has no out_sharding, but got 1"):
            product(jnp.ones((2, 2)), jnp.ones((2, 2)), matrices, out_sharding=1)
