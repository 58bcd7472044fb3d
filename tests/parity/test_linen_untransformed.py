"""Transformations of JAX itself around modules in `init`, where Flax runs them."""

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import linen as weft_nn

X = jnp.arange(6.0).reshape(3, 2) / 10
AROUND = {
    "vmap": lambda f, x: jax.vmap(f)(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: jax.vjp(f, x)[0],
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "linearize": lambda f, x: jax.linearize(f, x)[0],
    "jacrev": lambda f, x: jax.jacrev(f)(x),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
    "vmap in grad": lambda f, x: jax.grad(lambda x: jax.vmap(f)(x).sum())(x),
}


@pytest.mark.parametrize("around", AROUND)
def test_values_are_those_of_flax(around):
    def run(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                norm = nn.BatchNorm(use_running_average=True)
                dense = nn.Dense(2)
                return AROUND[around](lambda x: jnp.sin(dense(norm(x))), x)

        y, variables = Model().init_with_output(jax.random.key(0), X)
        return y, variables, Model().apply(variables, X)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        run(weft_nn),
        run(flax_nn),
    )


def test_unlike_flax_no_tracer_leaks_where_jax_stages_a_function():
    def run(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                dense = nn.Dense(2)
                return jax.jit(lambda x: dense(x))(x)

        return Model().init(jax.random.key(0), X)["params"]["Dense_0"]["kernel"]

    assert isinstance(run(flax_nn), jax.core.Tracer)
    assert isinstance(run(weft_nn), jax.Array) and not isinstance(run(weft_nn), jax.core.Tracer)
