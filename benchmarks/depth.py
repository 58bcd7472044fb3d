"""What does depth cost: of a stack of layers, and of transformations inside one another?

Curves of the time to trace a decoder of 2 to 96 layers (unrolled, each block under its own jit,
scanned), to make it abstractly, and to trace a block in 0 to 6 transformations. And in one number:
does a deeper repeated stack take longer to trace and compile?
"""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._growth import Growth, in_rounds
from benchmarks.harness import Curve, Row, ratios, row
from benchmarks.libraries import libraries
from benchmarks.libraries.library import Library, Program
from benchmarks.libraries.raw import RAW, X, decoder_values
from weft.hierarchy.attention import RepeatedTransformerLayer
from weft.hierarchy.module import functional

DEPTHS, ROUNDS = (2, 6, 24, 48, 96), {"unrolled": 3, "jitted": 5, "scanned": 5}
NESTED = ("vmap", "scan", "remat", "vmap", "scan", "remat")
_FORMS = {
    "unrolled": "a decoder, unrolled",
    "jitted": "a decoder, each block under its own jit",
    "scanned": "a scanned decoder",
}


def _build(num_layers: int) -> Callable[[], None]:
    cfg = RepeatedTransformerLayer.default_config().set(
        name="stack", input_dim=64, num_layers=num_layers
    )
    cfg.layer.self_attention.attention.set(num_heads=4)
    cfg.layer.feed_forward.set(hidden_dim=256)
    stack = cfg.instantiate(parent=None)
    shapes = jax.eval_shape(stack.initialize_parameters_recursively, jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, 32, 64), jnp.float32)

    def build() -> None:
        def loss(params: Any, x: Any) -> Any:
            outputs, _ = functional(stack, jax.random.key(0), params, {"data": x}, is_training=True)
            return outputs.data.sum()

        # A new function, so that neither the trace nor the executable is found in a cache.
        jax.jit(jax.value_and_grad(loss)).lower(shapes, x).compile()

    return build


def _flat() -> list[Row]:
    measured = ratios(_build(48), _build(12))
    rows = [row("trace and compile 48 / 12 repeated layers", measured, at_most=1.1)]
    for library in libraries():
        programs = [library.scanned(decoder_values(n)) for n in (48, 12)]
        if None not in programs:
            measured = ratios(
                *(lambda p=p: _traced_cold(p, X) for p in programs),
                clock=time.thread_time,
                collect=True,
            )
            question = f"trace a scan of 48 / 12 layers, {library.name}"
            rows.append(row(question, measured, at_most=1.1 if library.is_weft else None))
    return rows


def _traced(program: Program, x: Any) -> None:
    program.trace(x)


def _traced_cold(program: Program, x: Any) -> None:
    jax.clear_caches()
    program.trace(x)


def _by_depth(form: str) -> Curve:
    growth = Growth(RAW.name)
    trace = _traced if form == "unrolled" else _traced_cold
    for n in DEPTHS:
        values = decoder_values(n)
        programs = {library.name: getattr(library, form)(values) for library in (RAW, *libraries())}
        fns = {
            name: functools.partial(trace, program, X)
            for name, program in programs.items()
            if program is not None
        }
        growth.add(n, in_rounds(fns, rounds=ROUNDS[form], warmup=n == DEPTHS[0]))
    return growth.curve(
        f"trace_by_depth_{form}",
        f"Time to trace {_FORMS[form]}",
        x="layers",
        per="layer",
        clock="CPU time of Python",
        unit="ms",
    )


def _init_by_depth() -> Curve:
    growth = Growth(RAW.name)
    for n in (2, 6, 24, 96):
        # Flax's objects take a time that grows as the square: minutes at 96 layers.
        made = {x.name: x.shapes(n) for x in (RAW, *libraries()) if n <= 24 or x.name != "Flax NNX"}
        growth.add(n, in_rounds(made, rounds=3, warmup=n == 2))
    return growth.curve(
        "init_by_depth",
        "Time to make a decoder abstractly",
        x="layers",
        per="layer",
        clock="CPU time of Python",
        unit="ms",
    )


def _nested(library: Library, values: Any, deep: int) -> Program | None:
    return library.transformed(next(iter(values.values())), NESTED[:deep])


def _by_nesting() -> Curve:
    """Measures relative to raw JAX, in loops or maps that each add an axis of length 2."""
    values, growth = decoder_values(1), Growth(RAW.name)
    for deep in range(len(NESTED) + 1):
        axes = sum(kind != "remat" for kind in NESTED[:deep])
        x = jnp.broadcast_to(X, (2,) * axes + X.shape)
        raw = _nested(RAW, values, deep)
        assert raw is not None
        programs = {RAW.name: raw}
        for library in libraries():
            if (program := _nested(library, values, deep)) is not None:
                programs[library.name] = program
                if deep in (0, len(NESTED)):
                    np.testing.assert_allclose(
                        program(x), raw(x), rtol=1e-3, atol=1e-4, err_msg=library.name
                    )
        fns = {name: (lambda p=p, x=x: _traced_cold(p, x)) for name, p in programs.items()}
        growth.add(deep, in_rounds(fns, rounds=5))
    said = [
        f"{line}: {first[2]:.2f} × raw JAX without any, {last[2]:.2f} × in {len(NESTED)}"
        for line, (first, *_, last) in growth.relative.items()
    ]
    lines = {
        line: [(x, ratio) for x, _, ratio, _ in points] for line, points in growth.relative.items()
    }
    lines = {RAW.name: [(x, 1.0) for x, _ in growth.seconds[RAW.name]], **lines}
    return Curve(
        "trace_by_nesting",
        "Time to trace a block in nested transformations",
        "transformations (vmap, scan, remat, vmap, scan, remat)",
        "CPU time of Python, times of raw JAX",
        lines,
        said,
        growth.relative,
    )


def run() -> list[Row | Curve]:
    """Returns the curves, and whether a scan is flat in its length."""
    gc.freeze()  # existing objects are skipped by each collection
    return [*_flat(), *map(_by_depth, _FORMS), _init_by_depth(), _by_nesting()]
