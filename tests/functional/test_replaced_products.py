"""Products of JAX that a library replaces: layers call the replacement, in their caller's trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import functional, nnx
from weft import linen as nn

X = jnp.arange(24.0).reshape(2, 3, 4)
KERNEL = jnp.arange(8.0).reshape(4, 2)

LAYERS = {
    "dense": (jax.lax, "dot_general", lambda x: functional.dense(x, KERNEL)),
    "project": (jnp, "einsum", lambda x: functional.project("bti,io->bto", x, KERNEL)),
    "attend": (jnp, "dot", lambda x: functional.attend(KERNEL.T, x)),
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
