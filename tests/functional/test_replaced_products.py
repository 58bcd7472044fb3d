"""Products of JAX that a library replaces: layers call the replacement, in their caller's trace.

The default product of linear maps: the layers that take it, and those that have their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft import functional, hierarchy, nnx
from weft import linen as nn
from weft.functional import default_dot_general, fp8_dot_general, int8_dot_general

X = jnp.arange(24.0).reshape(2, 3, 4)
KERNEL = jnp.arange(8.0).reshape(4, 2)

LAYERS = {
    "dense": (jax.lax, "dot_general", lambda x: functional.dense(x, KERNEL)),
    "dense of a matrix": (jax.lax, "dot_general", lambda x: functional.dense(x[0], KERNEL)),
    "project": (jnp, "einsum", lambda x: functional.project("bti,io->bto", x, KERNEL)),
    "attend": (jnp, "dot", lambda x: functional.attend(KERNEL.T, x)),
    "attend of a matrix": (jnp, "dot", lambda x: functional.attend(KERNEL.T, x[0])),
    "conv": (jax.lax, "conv_general_dilated", lambda x: functional.conv(x, KERNEL[None])),
    "attention": (jnp, "einsum", lambda x: functional.attention_logits(x[:, None], x[:, None])),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_runs_in_the_trace_of_the_caller(layer, monkeypatch):
    owner, name, run = LAYERS[layer]
    product, seen, expected = getattr(owner, name), [], run(X)

    def doubled(*args, **kwargs):
        seen.append(2 * product(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(owner, name, doubled)
    for call in (jax.jit(lambda x: (run(x), seen.pop())), lambda x: (run(x), seen.pop())):
        result, of_replacement = call(X)
        np.testing.assert_allclose(result, 2 * expected)
        np.testing.assert_array_equal(result, of_replacement)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(4, use_bias=False)(x), None


def transformed(name):
    """Returns a transformed block, and how many products are nested in it."""
    if name == "scan":
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Block, length=3, **axes)(), 3
    return getattr(nn, name)(Block)(), 1


@pytest.mark.parametrize("name", ["scan", "remat", "jit"])
def test_in_a_transformation_that_was_traced_before(name, monkeypatch):
    model, depth = transformed(name)
    variables = model.init(jax.random.key(0), X, None)
    plain = model.apply(variables, X, None)[0]
    product = jax.lax.dot_general
    for factor in (2, 3):
        with monkeypatch.context() as replaced:
            times = lambda *a, f=factor, **k: f * product(*a, **k)  # noqa: E731
            replaced.setattr(jax.lax, "dot_general", times)
            y = model.apply(variables, X, None)[0]
            np.testing.assert_allclose(y, factor**depth * plain, rtol=1e-6)
    np.testing.assert_array_equal(model.apply(variables, X, None)[0], plain)


def test_in_a_loop_of_objects_that_was_traced_before(monkeypatch):
    layers = nnx.vmap(lambda rngs: nnx.LinearGeneral(4, 4, rngs=rngs))(nnx.Rngs(0).split(3))
    run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    plain = run(X, layers)
    product = jax.lax.dot_general
    with monkeypatch.context() as replaced:
        replaced.setattr(jax.lax, "dot_general", lambda *a, **k: 2 * product(*a, **k))
        np.testing.assert_allclose(run(X, layers), 8 * plain, rtol=1e-5)
    np.testing.assert_array_equal(run(X, layers), plain)


# The default product of linear maps.

Y = jax.device_put(np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32))


def of_linen(make):
    def outputs(**kwargs):
        layer = make(**kwargs)
        variables = nn.Module.init(make(), quick_key(0), Y)
        return lambda: layer.apply(variables, Y)

    return outputs


def of_nnx(make):
    def outputs(**kwargs):
        layer = make(rngs=nnx.Rngs(0), **kwargs)
        return lambda: layer(Y)

    return outputs


def attention_of(make):
    """Returns a function that makes an attention layer with one product for all projections."""

    def layer(dot_general=None, **kwargs):
        return make(qkv_dot_general=dot_general, out_dot_general=dot_general, **kwargs)

    return layer


def of_hierarchy(dot_general=None):
    quantization = None if dot_general is None else dot_general.__name__.split("_")[0]
    cfg = hierarchy.Linear.default_config().set(name="linear", input_dim=4, output_dim=8)
    layer = cfg.set(quantization=quantization).instantiate(parent=None)
    state = layer.initialize_parameters_recursively(jax.random.key(0))
    return lambda: hierarchy.functional(layer, None, state, (Y,), is_training=False)[0]


def of_project(subscripts, make):
    def outputs(dot_general=None):
        layer, kernel = make()
        return lambda: (
            layer() if dot_general is None
            else functional.project(subscripts, Y, kernel, dot_general=dot_general)
        )  # fmt: skip

    return outputs


def linen_einsum():
    layer = nn.Einsum((4, 8), "bti,io->bto", use_bias=False)
    variables = layer.init(quick_key(0), Y)
    return lambda: layer.apply(variables, Y), variables["params"]["kernel"]


def nnx_einsum():
    layer = nnx.Einsum("bti,io->bto", (4, 8), rngs=nnx.Rngs(0))
    return lambda: layer(Y), layer.kernel[...]


LINEAR = {
    "Dense": of_linen(lambda **k: nn.Dense(8, **k)),
    "DenseGeneral": of_linen(lambda **k: nn.DenseGeneral((2, 4), (-1,), (0,), **k)),
    "Einsum": of_project("bti,io->bto", linen_einsum),
    "attention of Linen": of_linen(
        attention_of(lambda **k: nn.MultiHeadDotProductAttention(2, **k))
    ),
    "Linear": of_nnx(lambda **k: nnx.Linear(4, 8, **k)),
    "LinearGeneral": of_nnx(lambda **k: nnx.LinearGeneral((3, 4), 8, axis=(1, 2), **k)),
    "Einsum of NNX": of_project("bti,io->bto", nnx_einsum),
    "attention of NNX": of_nnx(
        attention_of(lambda **k: nnx.MultiHeadAttention(2, 4, decode=False, **k))
    ),
    "hierarchy": of_hierarchy,
}


@pytest.mark.parametrize(
    ("layer", "product"),
    [*((layer, int8_dot_general) for layer in LINEAR), ("hierarchy", fp8_dot_general)],
)
def test_linear_layers_take_the_default(layer, product):
    made, by_hand = LINEAR[layer](), LINEAR[layer](dot_general=product)

    def run():
        return jax.jit(lambda: made())()

    with default_dot_general(product):
        y = run()
        with default_dot_general(None):
            plain = run()
    np.testing.assert_array_equal(y, jax.jit(by_hand)())
    np.testing.assert_array_equal(plain, run())
    assert (y != plain).any()


@pytest.mark.parametrize("name", ["scan", "remat", "jit"])
def test_the_default_in_a_transformation_that_was_traced_before(name):
    model, _ = transformed(name)
    variables = model.init(quick_key(0), Y, None)

    @jax.jit
    def grads(variables):
        def loss(variables):
            return jnp.square(model.apply(variables, Y, None)[0]).sum()

        return jax.grad(loss)(variables)

    plain = grads(variables)
    found = []
    for product in (int8_dot_general, fp8_dot_general, int8_dot_general):
        with default_dot_general(product):
            found.append(grads(variables))
    found.append(grads(variables))
    kernels = [np.asarray(jax.tree.leaves(x)[0]) for x in (plain, *found)]
    same = [[bool((x == y).all()) for x in kernels] for y in kernels]
    numbers = [0, 1, 2, 1, 0]  # of the products, in the order of the calls
    assert same == [[x == y for x in numbers] for y in numbers]


def test_the_default_in_a_loop_of_objects_that_was_traced_before():
    def layers(dot_general=jax.lax.dot_general):
        return nnx.vmap(lambda rngs: nnx.Linear(4, 4, dot_general=dot_general, rngs=rngs))(
            nnx.Rngs(0).split(3)
        )

    traces = []

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def scanned(x, layer):
        return layer(x)

    @nnx.jit
    def run(x, layers):
        traces.append(1)
        return scanned(x, layers)

    plain = run(Y, layers())
    decorated = default_dot_general(int8_dot_general)(run)
    for _ in range(2):
        np.testing.assert_array_equal(decorated(Y, layers()), run(Y, layers(int8_dot_general)))
    np.testing.assert_array_equal(run(Y, layers()), plain)
    assert len(traces) == 3
