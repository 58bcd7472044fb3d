"""What does it cost to trace a decoder in each API, compared with functions of nested dicts?

Its layers unrolled; unrolled with each block under its own jit; scanned; and in three
transformations at once. CPU time of the Python thread, garbage collected before each measurement.
Last, scanned at the worst depth of Python's stack against the best: Python keeps frames in pieces,
and for a call at the end of a piece it asks the system for the next (see `frame/runner.py`).
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Row, ratios, row
from benchmarks.libraries import libraries
from benchmarks.libraries.library import Library, Program
from benchmarks.libraries.raw import BATCHES, RAW, X, decoder_values

LAYERS = 12
_OF_ONE = 45  # pairs where one block is traced, which takes so little that noise would tell more
_IN_JIT = {12: 0.35, 24: 0.20, 48: 0.13}
_OBJECTS = (
    "; in addition, the model is split and merged in the trace, where calls cannot rely on an "
    "epoch and compare the objects of each block with those of the previous call"
)


def traced(
    question: str,
    library: Library,
    program: Program | None,
    raw: Program,
    *,
    at_most: float,
    x: Any = X,
    cold: bool = False,
    why: str = "",
    pairs: int = 15,
) -> list[Row]:
    """Returns the row of a program's trace against that of raw JAX; `cold`: from empty caches."""
    if program is None:
        return []
    question = f"{question}, {library.name} / raw"
    np.testing.assert_allclose(
        program(x), raw(x), rtol=1e-3, atol=1e-4, err_msg=f"results differ: {question}"
    )

    gc.collect()
    gc.freeze()  # existing objects, as of earlier rows, are skipped by each collection

    def trace(program: Program) -> None:
        if cold:
            jax.clear_caches()
        program.trace(x)

    measured = ratios(
        lambda: trace(program),
        lambda: trace(raw),
        pairs=pairs,
        clock=time.thread_time,
        collect=True,
    )
    return [row(question, measured, at_most=at_most if library.is_weft else None, why=why)]


def _by_jit(n: int) -> list[Row]:
    """Returns the rows of blocks under their own jit, against raw JAX without one."""
    values, rows = decoder_values(n), []
    for library in (RAW, *libraries()):
        floor = (
            f"raw JAX in the same form takes {rows[0].median:.2f}, which is the floor"
            if rows
            else ""
        )
        if library.name.endswith("NNX"):
            floor += _OBJECTS
        rows += traced(
            f"trace {n} layers, each in a jit",
            library,
            library.jitted(values),
            RAW.unrolled(values),
            at_most=_IN_JIT[n],
            cold=True,
            why=floor,
        )
    return rows


def _at_depths(library: Library, program: Program | None) -> list[Row]:
    """Returns the row of a program traced at the depth of the stack where that takes longest."""
    if program is None:
        return []

    def trace() -> None:
        jax.clear_caches()
        program.trace(X)

    def seconds(depth: int) -> float:
        gc.collect()
        start = time.thread_time()
        _below(depth, trace)
        return time.thread_time() - start

    def measure() -> Row:
        gc.collect()
        gc.freeze()
        found = {depth: [] for depth in range(0, 100, 10)}
        for _ in range(5):
            for depth, times in found.items():
                times.append(seconds(depth))
        worst, best = (
            functools.partial(_below, of(found, key=lambda d: statistics.median(found[d])), trace)
            for of in (max, min)
        )
        measured = ratios(worst, best, clock=time.thread_time, collect=True)
        question = f"trace a scan of {LAYERS} layers at the worst depth, {library.name} / its best"
        return row(question, measured, at_most=None)

    # A thread has a stack of its own, which begins with a piece of the usual size.
    with ThreadPoolExecutor(1) as pool:
        return [pool.submit(measure).result()]


def _below(depth: int, fn: Callable[[], Any]) -> Any:
    """Calls a function under that many further calls."""
    return fn() if depth == 0 else _below(depth - 1, fn)


def run() -> list[Row]:
    """Measures each library in the four forms, and scanned at several depths."""
    rows = []
    for n in (12, 24, 48):
        values = decoder_values(n)
        for library in libraries():
            unrolled, raw = library.unrolled(values), RAW.unrolled(values)
            rows += traced(f"trace {n} layers", library, unrolled, raw, at_most=1.2)
        rows += _by_jit(n)
    values = decoder_values(LAYERS)
    for library in libraries():
        question, scanned = f"trace a scan of {LAYERS} layers", library.scanned(values)
        raw = RAW.scanned(values)
        rows += traced(question, library, scanned, raw, at_most=1.15, cold=True, pairs=_OF_ONE)
    for library in libraries():
        question, nested = "trace vmap(scan(remat(block)))", library.nested(values)
        rows += traced(
            question,
            library,
            nested,
            RAW.nested(values),
            at_most=2.0,
            x=BATCHES,
            cold=True,
            pairs=_OF_ONE,
        )
    for library in (*libraries(), RAW):
        rows += _at_depths(library, library.scanned(values))
    return rows
