"""Python cost of objects, counted: the Python functions that are entered, not the time.

Times depend on the machine, these counts do not. The bounds are a tenth above what was counted, so
JAX's own functions may become a few more; for how counts depend on Python's version, see
`benchmarks.frame.counting`. What a call does for each array it does in C.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft
from benchmarks.frame.counting import calls, instructions, kept, peak
from weft import nnx

X = jnp.ones((2, 4))
WEFT = weft.__path__[0]
NUMBERS = itertools.count()


def calls_of_weft(run):
    return calls(run, 1, of=WEFT)


def instructions_of_weft(run):
    return instructions(run, of=WEFT)


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
@pytest.mark.parametrize("n", [1, 8])
def test_jitted_step(n, donated):
    model = Stack(n)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    jitted = nnx.jit(step, donate_argnums=donated)
    jitted(model, optimizer, X)
    # However many arrays there are.
    assert calls(lambda: jitted(model, optimizer, X)) <= 7
    assert calls(lambda: jitted(model, optimizer, X), of=WEFT) <= 3


def test_jitted_step_of_known_objects():
    jitted = nnx.jit(lambda model, x: model(x))
    models = [Stack(2) for _ in range(2)]
    for model in models:
        jitted(model, X)
    switched = calls(lambda: [jitted(model, X) for model in models], 1)
    assert switched <= 95


def test_step_of_trees():
    model = Stack(20)
    jitted = jax.jit(lambda model, x: model(x))
    # 22 objects and 42 variables are taken apart, and nothing else is done for them.
    assert calls(lambda: jitted(model, X), 1, of=WEFT) <= 710


COSTS = {
    "read a variable": (lambda v, m: v[...], 1),
    "read it by method": (lambda v, m: v.get_value(), 1),
    "read an attribute": (lambda v, m: m.n, 0),
    "write a variable": (lambda v, m: v.__setitem__(..., v._value), 8),
    "write it by method": (lambda v, m: v.set_value(v._value), 7),
    "write it by attribute": (lambda v, m: setattr(v, "value", v._value), 10),
    "write a static attribute": (lambda v, m: setattr(m, "n", 2), 6),
    "write a variable as attribute": (lambda v, m: setattr(m, "v", v), 6),
    "make a variable": (lambda v, m: nnx.Param(v._value), 12),
}


@pytest.mark.parametrize(("run", "at_most"), COSTS.values(), ids=COSTS)
def test_reads_and_writes(run, at_most):
    module, variable = nnx.Module(), nnx.Param(jnp.ones(2))
    module.n, module.v = 1, variable
    assert calls(functools.partial(run, variable, module)) <= at_most


def test_writing_same_dtype_and_shape_skips_jax():
    variable, value = nnx.Param(jnp.ones(2)), jnp.zeros(2)
    variable[...] = value
    assert variable.get_value() is value
    weak = jnp.array(1.0) * 1.0
    variable[...] = jnp.broadcast_to(weak, (2,))
    assert not variable.get_value().weak_type
    for other in (2, np.float64(2), np.ones(2), jnp.ones(2, "int32"), [2, 2]):
        variable[...] = other
        assert variable.get_value().dtype == jnp.float32 and variable.shape == (2,)


def per_layer(run_of, count):
    """Returns the cost of each further layer."""
    return (count(run_of(12)) - count(run_of(4))) / 8


def traced(n):
    model = Stack(n)

    def run():
        new = next(NUMBERS)  # makes the function unequal to earlier ones
        nnx.jit(lambda model, x: (model(x), new)).trace(model, X)

    return run


def traced_in_jits(n):
    """Traces each layer under its own jit, which is traced once for all of them."""
    model = Stack(n)
    call = nnx.jit(lambda layer, x: layer(x))

    def apply(model, x):
        for layer in model.layers:
            x = call(layer, x)
        return x

    def run():
        new = next(NUMBERS)
        nnx.jit(lambda model, x: (apply(model, x), new)).trace(model, X)

    run()
    return run


def scanned(n):
    model = nnx.vmap(lambda _: Stack(n))(jnp.arange(2))

    def run():
        new = next(NUMBERS)
        looped = nnx.scan(
            lambda x, model: (model(x), new)[0], in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        nnx.jit(lambda model, x: (looped(x, model), new)).trace(model, X)

    return run


def eager(n):
    model = Stack(n)
    return lambda: model(X)


def made(n):
    return lambda: nnx.eval_shape(lambda: Stack(n))


@pytest.mark.parametrize(
    ("run_of", "of_calls", "of_instructions"),
    [
        (traced, 105, 3680),
        (traced_in_jits, 159, 5220),
        (scanned, 203, 6300),
        (eager, 35, 700),
        (made, 182, 5900),
    ],
    ids=["traced", "traced in jits of their own", "scanned", "called eagerly", "made abstractly"],
)
def test_each_layer(run_of, of_calls, of_instructions):
    assert per_layer(run_of, calls_of_weft) <= of_calls
    assert per_layer(run_of, instructions_of_weft) <= of_instructions


@pytest.mark.parametrize(
    ("run_of", "of_calls", "of_instructions"),
    [(traced, 968, 28000), (traced_in_jits, 1064, 33000), (scanned, 2054, 59800)],
    ids=["traced", "traced in jits of their own", "scanned"],
)
def test_whole_trace(run_of, of_calls, of_instructions):
    assert calls_of_weft(run_of(4)) <= of_calls
    assert instructions_of_weft(run_of(4)) <= of_instructions


@pytest.mark.parametrize("run_of", [made, traced, scanned])
def test_cost_per_layer_is_constant(run_of):
    costs = [calls_of_weft(run_of(n)) for n in (4, 8, 16, 32)]
    assert costs[3] - costs[2] <= 1.05 * 4 * (costs[1] - costs[0])


class Pairs(nnx.Module):
    """Layers of a kernel and a bias each: 2 n arrays."""

    def __init__(self, n):
        self.layers = [Pair() for _ in range(n)]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(x @ layer.kernel[...] + layer.bias[None])
        return x


class Pair(nnx.Module):
    def __init__(self):
        self.kernel, self.bias = nnx.Param(jnp.ones((4, 4))), nnx.Param(jnp.ones(4))


def of_jit(n):
    """Returns a call of a jitted function that changes n arrays; the number of these."""
    model = Pairs(n // 2)

    def shrink(model):
        for layer in model.layers:
            layer.kernel[...] *= 0.999
            layer.bias[...] *= 0.999

    jitted = nnx.jit(shrink, donate_argnums=0)
    return lambda: jitted(model), n


def of_training(n):
    model = Pairs(n // 2)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    return lambda: jitted(model, optimizer, X), 3 * n + 2


@pytest.mark.parametrize("n", [8, 40])
@pytest.mark.parametrize("make", [of_jit, of_training])
def test_cost_per_array(make, n):
    run, arrays = make(n)
    assert calls(run, of=WEFT) <= 3
    # It is read and written, and nothing is called for it.
    assert instructions(run, of=WEFT) <= 150 + 6.6 * arrays
    assert kept(run, of=WEFT) == 0


def test_call_keeps_no_more_than_with_dicts():
    run, n = of_jit(100)
    values = {f"layer{i}": (jnp.ones((4, 4)), jnp.ones(4)) for i in range(n // 2)}
    shrink = jax.jit(lambda values: jax.tree.map(lambda x: x * 0.999, values), donate_argnums=0)

    def raw():
        nonlocal values
        values = shrink(values)

    assert peak(run) <= 1.1 * peak(raw)
