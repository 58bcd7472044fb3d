"""Python cost of modules, counted: calls of Weft's functions, and objects held.

Times depend on the machine, these counts do not. The bounds are a tenth above what was counted on
Python 3.11; for how counts depend on its version, see `benchmarks.frame.counting`.
"""

import functools
import gc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft
from benchmarks.frame.counting import calls, instructions
from tests.linen.modules import KEY
from weft import linen as nn

X = jnp.ones((2, 4))
WEFT = weft.__path__[0]


class Scale(nn.Module):
    """One parameter, and no operation of JAX."""

    @nn.compact
    def __call__(self, x):
        self.param("scale", nn.initializers.ones, x.shape[-1:])
        return x


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Scale(name="b")(Scale(name="a")(x))


class Stack(nn.Module):
    n: int
    layer: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x):
        for i in range(self.n):
            x = self.layer(name=f"layer{i}")(x)
        return x, gc.get_count()[0]


def per_layer(run_of, layer, count):
    """Returns the cost of each further layer."""
    return (count(run_of(12, layer)) - count(run_of(4, layer))) / 8


def traced(n, layer):
    """Traces a stack of layers; returns how many objects there are when all of them have run."""
    stack = Stack(n, layer)
    variables = stack.init_with_output(KEY, X)[1]

    def run():
        held = []

        def apply(x):
            y, objects = stack.apply(variables, x)
            held.append(objects)
            return y

        jax.eval_shape(apply, X)
        return held[0]

    return run


def calls_of_weft(run):
    return calls(run, 1, of=WEFT)


def instructions_of_weft(run):
    return instructions(run, of=WEFT)


def objects_held(run):
    run()
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        return run() - before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("layer", "of_calls", "of_instructions"),
    [(Scale, 56, 1150), (Pair, 152, 3190), (nn.jit(Pair), 148, 3450)],
    ids=["one parameter", "two submodules", "under jit"],
)
def test_each_layer_that_is_traced(layer, of_calls, of_instructions):
    assert per_layer(traced, layer, calls_of_weft) <= of_calls
    assert per_layer(traced, layer, instructions_of_weft) <= of_instructions


def test_each_layer_of_an_eager_call():
    def eager(n, layer):
        stack = Stack(n, functools.partial(layer, 4))
        variables = stack.init_with_output(KEY, X)[1]
        return lambda: stack.apply(variables, X)

    assert per_layer(eager, nn.Dense, calls_of_weft) <= 110
    assert per_layer(eager, nn.Dense, instructions_of_weft) <= 2840


def test_jitted_train_step():
    stack, tx = Stack(50, functools.partial(nn.Dense, 4)), optax.adam(1e-3)
    shapes = jax.eval_shape(stack.init, KEY, X)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), shapes)

    @jax.jit
    def step(params, state, x):
        loss = lambda params: stack.apply(params, x)[0].sum()  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    arguments = params, tx.init(params), X
    # It is a function of dicts: nothing of Weft runs but while it is traced.
    assert calls(lambda: step(*arguments), of=WEFT) == 0
    assert calls(lambda: step(*arguments)) <= 2


def test_objects_of_each_layer():
    assert (objects_held(traced(20, Scale)) - objects_held(traced(4, Scale))) / 16 <= 11
