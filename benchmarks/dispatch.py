"""What does a call of a jitted step cost in Python, beside `jax.jit` on nested dicts?

The arrays are so small that Python and the way of the arrays through JAX are what is measured: a
step that trains a chain of layers, by plain descent with 8 and 100 arrays, by Adam with 301. And
for objects, whose call is more than that of `jax.jit`, a function that changes each array and does
little else. All give away what they are given.
"""

import operator
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import optax

from benchmarks.harness import Row, calls, ratios, row
from benchmarks.libraries import libraries
from benchmarks.libraries.library import Library, Step
from benchmarks.libraries.raw import RAW, chain_values

WIDTH = 4
_OBJECTS = (
    "a Python closure that reads 8 slots, calls the jitted function and writes 8 slots, without "
    "any check, measures 1.00–1.08 here: of the 3.6 µs that a call adds, 1.6 are these reads and "
    "writes, 0.3 the check of the trace, 0.2 the call of an object"
)
_FUNCTIONS = (
    "it is `jax.jit` on nested dicts as the base is, and Weft runs no code in a call (see the "
    "counts): what is above 1 is noise"
)


def _compared(
    question: str, library: Library, steps: Callable[[Library], dict[str, Step]]
) -> list[Row]:
    rows = []
    for way, step in steps(library).items():
        name, raw = f"{question}, {library.name}{way} / raw", steps(RAW)[""]
        for _ in range(3):
            np.testing.assert_allclose(step(), raw(), rtol=1e-5, err_msg=f"results differ: {name}")
        rows.append(_row(name, step, raw, library))
    return rows


def _row(question: str, step: Step, raw: Step, library: Library) -> Row:
    start = time.perf_counter()
    jax.block_until_ready(step())
    n = max(5, min(200, int(0.02 / (time.perf_counter() - start))))

    def many(fn: Step) -> None:
        for _ in range(n):
            result = fn()
        jax.block_until_ready(result)

    pairs = 25 if library.is_weft else 15
    quotients, *times = ratios(
        lambda: many(step), lambda: many(raw), pairs=pairs, warmup=3, clock=time.thread_time
    )
    a, b = ([x / n for x in of] for of in times)
    tenth = [statistics.quantiles(of, n=10)[0] for of in (a, b)]
    return row(
        question,
        (quotients, a, b),
        at_most=1.0 if library.is_weft else None,
        note=f"fastest tenth {tenth[0] / tenth[1]:.2f}; "
        f"{calls(step):.0f} against {calls(raw):.0f} Python calls",
        why=_OBJECTS if hasattr(library, "nnx") else _FUNCTIONS,
    )


def run() -> list[Row]:
    """Steps of training in every library, a function that changes arrays in those of objects."""
    rows = []
    for n, tx in ((8, None), (100, None), (301, optax.adam(1e-2))):
        values = chain_values(50 if tx else n // 2, WIDTH)
        steps = operator.methodcaller("training", values, tx)
        for library in libraries():
            rows += _compared(f"dispatch of a train step, {n} arrays", library, steps)
    for n in (8, 1000):
        values = chain_values(n // 2, WIDTH)
        steps = operator.methodcaller("shrinking", values)
        for library in libraries():
            if hasattr(library, "nnx"):
                rows += _compared(f"dispatch of jit over {n:,} arrays", library, steps)
    return rows
