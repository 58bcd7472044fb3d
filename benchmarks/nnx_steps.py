"""How often is a step of objects traced, is it ever another's, and how much memory does it take?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._nnx_models import mlp_of, pure, raw_mlp
from benchmarks._peers import libraries
from benchmarks.harness import Row, counted

FRESH, WIDTH = 20, 256


def _step(nnx, traces):
    def step(model, optimizer, x):
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return step


def _fresh_models(nnx) -> int:
    """Traces for models that are made anew, and are equal."""
    traces, x = [], jnp.ones((4, 8))

    @nnx.jit
    def call(model, x):
        traces.append(1)
        return model(x)

    of = mlp_of(nnx)
    for seed in range(FRESH):
        model = of(rngs=nnx.Rngs(seed))
        np.testing.assert_allclose(call(model, x), raw_mlp(pure(nnx, model), x), rtol=1e-5)
    return len(traces)


def _fresh_optimizers(nnx) -> int:
    """Traces of a step for optimizers that are made anew, and are equal."""
    traces, x = [], jnp.ones((4, 8))
    model = mlp_of(nnx)(rngs=nnx.Rngs(0))
    step = nnx.jit(_step(nnx, traces))
    for _ in range(FRESH):
        step(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), x)
    return len(traces)


def _wrong_answers(nnx) -> int:
    """How many of the functions that are an attribute, each made anew, give another's answer."""

    class Scaled(nnx.Module):
        def __init__(self, by):
            self.w, self.fn = nnx.Param(jnp.ones(2)), lambda x: x * by

        def __call__(self, x):
            return self.fn(x) * self.w[...]

    call = nnx.jit(lambda model, x: model(x))
    x = jnp.ones(2)
    return sum(float(call(Scaled(float(i)), x)[0]) != i for i in range(FRESH))


@dataclasses.dataclass
class _Memory:
    arguments: int
    peak: int


def _memory(lowered) -> _Memory:
    """Of a compiled step: what goes in, and that with what comes out and is needed meanwhile."""
    of = lowered.compile().memory_analysis()
    new = of.output_size_in_bytes - of.alias_size_in_bytes
    return _Memory(
        of.argument_size_in_bytes, of.argument_size_in_bytes + new + of.temp_size_in_bytes
    )


def _live() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def _training(nnx) -> tuple[float, float]:
    """The peak memory of a step that gives away its model, by that by hand; what stays alive."""
    x, tx = jnp.ones((4, WIDTH)), optax.adam(1e-3)
    model = mlp_of(nnx, WIDTH)(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = jax.tree.map(jnp.copy, pure(nnx, model))

    def raw(both, x):
        params, state = both
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(raw_mlp(params, x) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    step = nnx.jit(_step(nnx, []), donate_argnums=(0, 1))
    by_hand = jax.jit(raw, donate_argnums=0)
    both = (params, tx.init(params))
    peaks = (
        _memory(step.lower(model, optimizer, x)).peak,
        _memory(by_hand.lower(both, x)).peak,
    )
    before = _live()
    for _ in range(2):
        loss, (both, of_raw) = step(model, optimizer, x), by_hand(both, x)
        np.testing.assert_allclose(loss, of_raw, rtol=1e-4)
    del loss, of_raw
    return peaks[0] / peaks[1], _live() / before


def _unchanged(nnx) -> float:
    """The memory of a call that changes one count and gives away nothing, by that of the model."""
    model = mlp_of(nnx, WIDTH)(rngs=nnx.Rngs(0))
    model.count = nnx.Variable(jnp.array(0))

    def call(model, x):
        model.count[...] += 1
        return model(x)

    memory = _memory(nnx.jit(call).lower(model, jnp.ones((4, WIDTH))))
    return memory.peak / memory.arguments


def _of(library, nnx, is_weft) -> list[Row]:
    peak, live = _training(nnx)
    questions = {
        f"traces for {FRESH} equal models made anew": (_fresh_models(nnx), 1),
        f"traces for {FRESH} equal optimizers made anew": (_fresh_optimizers(nnx), 1),
        f"wrong answers of {FRESH} closures made anew": (_wrong_answers(nnx), 0),
        "peak memory of a donated step of Adam / raw": (peak, 1.02),
        "arrays alive after it / before": (live, 1.0),
        "peak memory of a call that changes a count / arguments": (_unchanged(nnx), 1.05),
    }
    return [
        counted(f"{question}, {library}", value, at_most=at_most if is_weft else None)
        for question, (value, at_most) in questions.items()
    ]


def run() -> list[Row]:
    """Traces, answers and memory, each counted."""
    libs = libraries()
    return [r for name, nnx in libs.items() for r in _of(name, nnx, name.startswith("Weft"))]
