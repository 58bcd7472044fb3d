"""What a module costs in Python, counted: calls of Weft's functions, and objects that it holds.

Times depend on the machine, these counts do not. The bounds are a tenth above what was counted.
"""

import gc
import sys

import jax
import jax.numpy as jnp
import pytest

import weft
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
    layer: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        for i in range(self.n):
            x = self.layer(name=f"layer{i}")(x)
        return x, gc.get_count()[0]


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
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(WEFT)

    run()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


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
    ("layer", "at_most"),
    [(Scale, 56), (Pair, 152), (nn.jit(Pair), 163)],
    ids=["one parameter", "two submodules", "under jit"],
)
def test_calls_for_each_layer(layer, at_most):
    per_layer = (calls_of_weft(traced(12, layer)) - calls_of_weft(traced(4, layer))) / 8
    assert per_layer <= at_most


def test_objects_of_each_layer():
    assert (objects_held(traced(20, Scale)) - objects_held(traced(4, Scale))) / 16 <= 10
