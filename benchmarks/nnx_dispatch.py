"""What does a call of a jitted function of objects cost, beside `jax.jit` on nested dicts?

The function changes every array and does little else, so that Python and the way of the arrays
through JAX are what is measured. Both sides are given the same values, give away what they were
given, and must come to the same values.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._peers import libraries
from benchmarks.harness import Row, calls, ratios, row

WIDTH, RATE = 4, 1e-3
X = jnp.ones((2, WIDTH))


def nested(n):
    """`n` arrays, the kernels and biases of layers, as nested dicts."""
    kernels = jax.random.normal(jax.random.key(0), (n // 2, WIDTH, WIDTH)) / WIDTH
    return {
        f"layer{i:03}": {"bias": np.zeros(WIDTH, np.float32), "kernel": np.asarray(kernel)}
        for i, kernel in enumerate(kernels)
    }


def model_of(nnx, params):
    """The same as modules."""

    class Layer(nnx.Module):
        def __init__(self, values):
            self.kernel = nnx.Param(jnp.array(values["kernel"]))
            self.bias = nnx.Param(jnp.array(values["bias"]))

        def __call__(self, x):
            return jnp.tanh(x @ self.kernel[...] + self.bias[...])

    class Model(nnx.Module):
        def __init__(self):
            for name, values in params.items():
                setattr(self, name, Layer(values))

        def __call__(self, x):
            for name in params:
                x = getattr(self, name)(x)
            return x

    return Model()


def _values(nnx, model):
    """The values of a model as nested dicts."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _shrink(params, x):
    return jax.tree.map(lambda p: p * 0.999, params), x + 1


def _shrink_model(params, model, x):
    for name in params:
        layer = getattr(model, name)
        layer.kernel[...] *= 0.999
        layer.bias[...] *= 0.999
    return x + 1


def _shrinking(nnx, params):
    """The ways to call the function on a model: by name, how to step, and the model."""
    fn = functools.partial(_shrink_model, params)
    jit = functools.partial(nnx.jit, fn, donate_argnums=0)
    ways = {"": jit()}
    if nnx.__name__ == "flax.nnx":
        ways[", tree mode"] = jit(graph=False)
    steps = {}
    for way, jitted in ways.items():
        model = model_of(nnx, params)
        steps[way] = functools.partial(jitted, model, X), model
    model = model_of(nnx, params)
    cached = nnx.cached_partial(nnx.jit(fn, donate_argnums=0), model)
    steps[", cached_partial"] = functools.partial(cached, X), model
    return steps


def _raw_loss(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)


def _raw_train(tx):
    def step(both, x):
        params, state = both
        loss, grads = jax.value_and_grad(_raw_loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return step


def _training(nnx, params):
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def made():
        model = model_of(nnx, params)
        return model, nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)

    jit = functools.partial(nnx.jit, step, donate_argnums=(0, 1))
    steps = {}
    for way, options in {"": {}, ", tree mode": {"graph": False}}.items():
        if way and nnx.__name__ != "flax.nnx":
            continue
        model, optimizer = made()
        steps[way] = functools.partial(jit(**options), model, optimizer, X), model
    model, optimizer = made()
    steps[", cached_partial"] = (
        functools.partial(nnx.cached_partial(jit(), model, optimizer), X),
        model,
    )
    return steps


class _Raw:
    """A jitted function of nested dicts, which keeps what it has made of them."""

    def __init__(self, fn, state):
        self.fn, self.state = jax.jit(fn, donate_argnums=0), jax.tree.map(jnp.array, state)

    def step(self):
        self.state, result = self.fn(self.state, X)
        return result


def _compared(question, make, make_raw, params) -> list[Row]:
    rows = []
    for library, nnx in libraries().items():
        for way, (step, model) in make(nnx, params).items():
            rows.append(_row(f"{question}, {library}{way} / raw", nnx, step, model, make_raw()))
    return rows


def _row(question, nnx, step, model, raw) -> Row:
    for _ in range(3):
        losses = step(), raw.step()
        np.testing.assert_allclose(*losses, rtol=1e-5, err_msg=question)
    params = raw.state[0] if isinstance(raw.state, tuple) else raw.state
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=question),
        _values(nnx, model),
        params,
    )
    is_weft = nnx.__name__.startswith("weft")
    n = max(10, 2000 // len(jax.tree.leaves(raw.state))) if is_weft else 5

    def many(fn):
        for _ in range(n):
            result = fn()
        jax.block_until_ready(result)

    pairs = 60 if is_weft else 15
    quotients, *times = ratios(
        lambda: many(step), lambda: many(raw.step), pairs=pairs, warmup=3, clock=time.thread_time
    )
    a, b = ([x / n for x in of] for of in times)
    tenth = [statistics.quantiles(of, n=10)[0] for of in (a, b)]
    return row(
        question,
        (quotients, a, b),
        at_most=1.0 if is_weft else None,
        note=f"fastest tenth {tenth[0] / tenth[1]:.2f}; "
        f"{calls(step):.0f} against {calls(raw.step):.0f} Python calls",
    )


def run() -> list[Row]:
    """A function that changes 8, 100 and 1,000 arrays, and a step of Adam with 301."""
    rows = []
    for n in (8, 100, 1000):
        params = nested(n)
        question = f"dispatch of jit over {n:,} arrays"
        rows += _compared(question, _shrinking, functools.partial(_Raw, _shrink, params), params)
    params, tx = nested(100), optax.adam(RATE)
    make_raw = lambda: _Raw(_raw_train(tx), (params, tx.init(params)))  # noqa: E731
    return rows + _compared("dispatch of a train step, 301 arrays", _training, make_raw, params)
