"""Transformations of JAX itself around modules in `init`, where Flax runs them."""

import functools

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
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
def test_values_match_flax(around):
    def run(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                norm = nn.BatchNorm(use_running_average=True)
                dense = nn.Dense(2)
                return AROUND[around](lambda x: jnp.sin(dense(norm(x))), x)

        y, variables = Model().init_with_output(quick_key(0), X)
        return y, variables, Model().apply(variables, X)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *jax.jit(lambda: (run(weft_nn), run(flax_nn)))(),
    )


def test_unlike_flax_tracers_do_not_leak_from_staged_functions():
    def run(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                dense = nn.Dense(2)
                return jax.jit(lambda x: dense(x))(x)

        return Model().init(quick_key(0), X)["params"]["Dense_0"]["kernel"]

    assert isinstance(run(flax_nn), jax.core.Tracer)
    assert isinstance(run(weft_nn), jax.Array) and not isinstance(run(weft_nn), jax.core.Tracer)


def lifted_functions(nn):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("scale", nn.initializers.normal(), (2,))
            return jnp.sin(nn.Dense(2)(x))

        def draw(self):
            return jax.random.normal(self.make_rng("params"), (2,))

    class Step(Block):
        @nn.compact
        def __call__(self, x, _=None):
            return nn.Dense(2)(x), None

    params, split = {"params": 0}, {"params": True}
    scan = nn.scan(Step, params, split_rngs=split, length=3)
    shared = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False}, length=3)
    vmap = nn.vmap(Block, params, split, in_axes=None, axis_size=3)

    def branch(block, x):
        return block(x)

    def twice(block, x):
        return 2 * block(x)

    def map_in(variables):
        return jax.tree.map(lambda v: v * 2, variables)

    def map_out(variables):
        return jax.tree.map(lambda v: v / 2, variables)

    return {
        "scan": (scan, lambda m, x: m(x, None)[0]),
        "shared scan": (shared, lambda m, x: m(x, None)[0]),
        "vmap": (vmap, lambda m, x: m(x).sum(0)),
        "remat": (nn.remat(Block), lambda m, x: m(x)),
        "jit": (nn.jit(Block), lambda m, x: m(x)),
        "cond": (Block, lambda m, x: nn.cond(True, branch, twice, m, x)),
        "map_variables": (
            nn.map_variables(Block, "params", map_in, map_out, init=True),
            lambda m, x: m(x),
        ),
    }


RAW = {
    "vmap": lambda f, x: jax.vmap(f)(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: f(x))(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), None, x)[1],
    "while_loop": lambda f, x: jax.lax.while_loop(
        lambda s: s[0] < 1, lambda s: (s[0] + 1, f(s[1])), (jnp.int32(0), x)
    )[1],
}
STAGED = ("jit", "checkpoint", "scan", "while_loop")  # where a tracer leaks in Flax


@functools.cache
def lifted_inside(nn, lifted, around):
    """Returns results and variables of a lifted function inside a transformation, or in none."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            cls, call = lifted_functions(nn)[lifted]
            layer = cls(name="layer")
            y = RAW.get(around, lambda f, x: f(x))(lambda x: call(layer, x), x)
            # The keys that follow depend on how many were drawn; Flax counts both branches.
            after = 0 if lifted == "cond" else layer.draw()
            return y, after, nn.Dense(2)(y)

    y, variables = Model().init_with_output(quick_key(0), X)
    rngs = {"params": quick_key(1)}
    return y, variables, Model().apply(variables, X, rngs=rngs)


@pytest.mark.parametrize(
    ("lifted", "around"),
    [
        *((lifted, around) for lifted in lifted_functions(weft_nn) for around in ("vmap", "scan")),
        *(("vmap", around) for around in RAW if around not in ("vmap", "scan")),
    ],
)
def test_lifted_functions_create_equal_variables(lifted, around):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        lifted_inside(weft_nn, lifted, around),
        lifted_inside(flax_nn, lifted, None if around in STAGED else around),
    )
