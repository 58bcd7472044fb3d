"""What objects cost in Python, counted: the Python functions that are entered, not the time.

Times depend on the machine, these counts do not. The bounds are a tenth above what was counted, so
JAX's own functions may become a few more. What a call does for each array it does in C.
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft
from weft import nnx

X = jnp.ones((2, 4))
WEFT = weft.__path__[0]
NUMBERS = itertools.count()


def entered(run, of=""):
    """How many Python functions a call enters, in files whose path begins with `of`."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(of)

    run()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls - (not of)  # without `run` itself


class Stack(nnx.Module):
    def __init__(self, n):
        rngs = nnx.Rngs(0)
        self.layers = [nnx.Linear(4, 4, rngs=rngs) for _ in range(n)]
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.norm(x)


def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: model(x).sum())(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("donated", [None, (0, 1)], ids=["kept", "donated"])
@pytest.mark.parametrize("n", [1, 20])
def test_a_jitted_step(n, donated):
    model = Stack(n)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    jitted = nnx.jit(step, donate_argnums=donated)
    jitted(model, optimizer, X)
    # However many arrays there are.
    assert entered(lambda: jitted(model, optimizer, X)) <= 8
    assert entered(lambda: jitted(model, optimizer, X), WEFT) <= 4


def test_a_jitted_step_of_objects_that_were_met_before():
    jitted = nnx.jit(lambda model, x: model(x))
    models = [Stack(2) for _ in range(2)]
    for model in models:
        jitted(model, X)
    switched = entered(lambda: [jitted(model, X) for model in models])
    assert switched <= 95


def test_a_step_of_trees():
    model = Stack(20)
    jitted = jax.jit(lambda model, x: model(x))
    # 22 objects and 42 variables are taken apart, and nothing else is done for them.
    assert entered(lambda: jitted(model, X), WEFT) <= 710


COSTS = {
    "read a variable": (lambda v, m: v[...], 1),
    "read it by method": (lambda v, m: v.get_value(), 1),
    "read an attribute": (lambda v, m: m.n, 0),
    "write a variable": (lambda v, m: v.__setitem__(..., v._value), 14),
    "write it by method": (lambda v, m: v.set_value(v._value), 7),
    "write it by attribute": (lambda v, m: setattr(v, "value", v._value), 9),
    "write a static attribute": (lambda v, m: setattr(m, "n", 2), 6),
    "write a variable as attribute": (lambda v, m: setattr(m, "v", v), 6),
    "make a variable": (lambda v, m: nnx.Param(v._value), 12),
}


@pytest.mark.parametrize(("run", "at_most"), COSTS.values(), ids=COSTS)
def test_reads_and_writes(run, at_most):
    module, variable = nnx.Module(), nnx.Param(jnp.ones(2))
    module.n, module.v = 1, variable
    assert entered(functools.partial(run, variable, module)) <= at_most + 1  # and the lambda


def test_writing_what_has_the_dtype_and_shape_runs_nothing_of_jax():
    variable, value = nnx.Param(jnp.ones(2)), jnp.zeros(2)
    variable[...] = value
    assert variable.get_value() is value
    weak = jnp.array(1.0) * 1.0
    variable[...] = jnp.broadcast_to(weak, (2,))
    assert not variable.get_value().weak_type
    for other in (2, np.float64(2), np.ones(2), jnp.ones(2, "int32"), [2, 2]):
        variable[...] = other
        assert variable.get_value().dtype == jnp.float32 and variable.shape == (2,)


def per_layer(run_of, of=""):
    """What each further layer costs."""
    return (entered(run_of(12), of) - entered(run_of(4), of)) / 8


def traced(n):
    model = Stack(n)

    def run():
        new = next(NUMBERS)  # makes the function one that is like none before
        nnx.jit(lambda model, x: (model(x), new)).trace(model, X)

    return run


def test_each_layer_that_is_traced():
    assert per_layer(traced, WEFT) <= 200


def test_each_layer_of_an_eager_call():
    def eager(n):
        model = Stack(n)
        return lambda: model(X)

    assert per_layer(eager, WEFT) <= 33


def test_each_layer_that_is_made_abstractly():
    def made(n):
        return lambda: nnx.eval_shape(lambda: Stack(n))

    assert per_layer(made, WEFT) <= 225
    # Linear in the number of layers.
    costs = [entered(made(n), WEFT) for n in (4, 8, 16, 32)]
    assert costs[3] - costs[2] <= 1.05 * 4 * (costs[1] - costs[0])
