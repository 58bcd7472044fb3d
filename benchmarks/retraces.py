"""How often is a step traced for things that are equal, and is an answer ever another's?

All are counts. Fresh models: 20 equal new ones. Fresh closures: 20 different functions
of the same code in a model; an answer that is not its own function's is wrong. Fresh optimizers: 20
equal ones. Stale: after a change of structure that a cached call might overlook.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import Row, counted
from benchmarks.libraries import libraries, nnx_modules
from benchmarks.libraries.library import chain_input
from benchmarks.libraries.linen import Linen
from benchmarks.libraries.raw import RAW, chain_values
from weft import nnx as weft_nnx
from weft.config import config_for_function
from weft.trainer.optimizers import adam_optimizer

FRESH = 20
_VALUES = chain_values(2, 8)
_X = chain_input(_VALUES)
Count = int | None


def _nnx_models(library: Any) -> int:
    """Traces for new, equal models."""
    traces, expected = [], RAW.chain(_VALUES)(_X)

    @library.nnx.jit
    def call(model: Any, x: Any) -> Any:
        traces.append(1)
        return model(x)

    for _ in range(FRESH):
        np.testing.assert_allclose(call(library.chain(_VALUES).params, _X), expected, rtol=1e-5)
    return len(traces)


def _nnx_optimizers(library: Any) -> int:
    """Traces of a step for new, equal optimizers."""
    nnx, traces = library.nnx, []

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    model = library.chain(_VALUES).params
    for _ in range(FRESH):
        step(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), _X)
    return len(traces)


def _nnx_closures(library: Any) -> int:
    """Counts new functions in an attribute that return another one's answer."""
    nnx = library.nnx

    class Scaled(nnx.Module):
        def __init__(self, by: int):
            self.w, self.fn = nnx.Param(jnp.ones(2)), lambda x: x * by

        def __call__(self, x: Any) -> Any:
            return self.fn(x) * self.w[...]

    call = nnx.jit(lambda model, x: model(x))
    return sum(float(call(Scaled(i), jnp.ones(2))[0]) != i for i in range(FRESH))


def _linen_models(library: Linen) -> int:
    """Counts like those of objects; the module is constant, its variables are passed."""
    traces, expected = [], RAW.chain(_VALUES)(_X)

    @functools.partial(jax.jit, static_argnums=0)
    def call(model: Any, variables: Any, x: Any) -> Any:
        traces.append(1)
        return model.apply(variables, x)

    for _ in range(FRESH):
        program = library.chain(_VALUES)
        model = program.make().__self__
        np.testing.assert_allclose(call(model, program.params, _X), expected, rtol=1e-5)
    return len(traces)


def _linen_closures(library: Linen) -> int:
    """Counts like those of objects, for a module whose call is under Linen's own jit."""
    nn = library.nn

    class Scaled(nn.Module):
        fn: Callable[[Any], Any]

        @nn.jit
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return self.fn(x) * self.param("w", nn.initializers.ones, (2,))

    variables, x = {"params": {"w": jnp.ones(2)}}, jnp.ones(2)

    def answer(by: int) -> float:
        return float(Scaled(lambda x: x * by).apply(variables, x)[0])

    return sum(answer(i) != i for i in range(FRESH))


def _equinox_models() -> int:
    """Counts like those of objects."""
    eqx = importlib.import_module("equinox")
    equinox = importlib.import_module("benchmarks.libraries.equinox").Equinox()
    traces, expected = [], RAW.chain(_VALUES)(_X)

    @eqx.filter_jit
    def call(model: Any, x: Any) -> Any:
        traces.append(1)
        return jax.vmap(model)(x)

    for _ in range(FRESH):
        np.testing.assert_allclose(call(equinox.chain(_VALUES).params, _X), expected, rtol=1e-5)
    return len(traces)


def _equinox_closures() -> int:
    """Counts like those of objects."""
    eqx = importlib.import_module("equinox")

    class Scaled(eqx.Module):
        w: Any
        fn: Callable[[Any], Any]

        def __call__(self, x: Any) -> Any:
            return self.fn(x) * self.w

    call, x = eqx.filter_jit(lambda model, x: model(x)), jnp.ones(2)

    def answer(by: int) -> float:
        return float(call(Scaled(jnp.ones(2), lambda x: x * by), x)[0])

    return sum(answer(i) != i for i in range(FRESH))


def _held_optimizers(nnx: Any, make: Callable[[], Any]) -> int:
    """Traces of a step for objects that hold new optimizers."""
    traces = []

    class Training(nnx.Module):
        def __init__(self):
            self.w, self.optimizer = nnx.Param(jnp.ones(2)), make()

    @nnx.jit
    def step(training: Any) -> None:
        traces.append(1)
        training.w[...] *= 0.5

    for _ in range(FRESH):
        step(Training())
    return len(traces)


def _jitted_optimizers() -> int:
    """Traces of a step of `jax.jit` for optimizers of optax, which hold new functions."""
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(optimizer: Any, params: Any) -> Any:
        traces.append(1)
        return jax.tree.map(jnp.sin, params)

    for _ in range(FRESH):
        step(optax.adam(1e-3), {"w": jnp.ones(2)})
    return len(traces)


def _stale(library: Any, cached: bool) -> int:
    """Returns how many of three changes of a model a call overlooks that was made or run before
    them.
    """
    nnx = library.nnx

    class Model(nnx.Module):
        def __init__(self):
            self.by, self.first, self.more = 2.0, nnx.Param(jnp.ones(2)), None

        def __call__(self, x: Any) -> Any:
            more = 0.0 if self.more is None else self.more[...]
            return self.by * x * self.first[...] + more

    def change_attribute(model: Any) -> None:
        model.by = 3.0

    def replace_variable(model: Any) -> None:
        model.first = nnx.Param(jnp.full(2, 5.0))

    def add_variable(model: Any) -> None:
        model.more = nnx.data(nnx.Param(jnp.ones(2)))

    def overlooked(change: Callable[[Any], None]) -> bool:
        model, x = Model(), jnp.ones(2)
        call = nnx.jit(lambda model, x: model(x))
        call = nnx.cached_partial(call, model) if cached else functools.partial(call, model)
        call(x)
        change(model)
        # To be refused is not to be overlooked.
        with contextlib.suppress(ValueError, TypeError):
            return not np.allclose(call(x), model(x))
        return False

    return sum(map(overlooked, (change_attribute, replace_variable, add_variable)))


def _counts() -> Iterator[tuple[str, str, Count, int]]:
    """Yields questions, libraries, what was counted and what Weft must reach."""
    models, closures = (
        f"traces for {FRESH} equal new models",
        f"wrong answers of {FRESH} new closures",
    )
    optimizers = f"traces for {FRESH} equal new optimizers"
    objects = [library for library in libraries() if library.name in nnx_modules()]
    linens = [library for library in libraries() if isinstance(library, Linen)]
    for library in objects:
        yield models, library.name, _nnx_models(library), 1
        yield closures, library.name, _nnx_closures(library), 0
        yield optimizers, library.name, _nnx_optimizers(library), 1
        for way, cached in (("", False), (", cached_partial", True)):
            question = "changes of structure overlooked, of 3"
            yield question, library.name + way, _stale(library, cached), 0
    for library in linens:
        yield models, library.name, _linen_models(library), 1
        yield closures, library.name, _linen_closures(library), 0
    with contextlib.suppress(ImportError):
        yield models, "Equinox", _equinox_models(), 1
        yield closures, "Equinox", _equinox_closures(), 0
    of_config = config_for_function(adam_optimizer).set(
        learning_rate=1e-3, b1=0.9, b2=0.95, eps=1e-8
    )
    yield optimizers, "Weft, by config", _held_optimizers(weft_nnx, of_config.instantiate), 1
    yield optimizers, "raw JAX and optax", _jitted_optimizers(), 1


def run() -> list[Row]:
    """Reports each count once."""
    return [
        counted(f"{question}, {name}", count, at_most=at_most if name.startswith("Weft") else None)
        for question, name, count, at_most in _counts()
    ]
