"""Asks a question in a process of its own, so that no answer depends on what was asked before.

There it has room for Python's frames, or a time would depend on how deep its calls happen to lie:
tracing a scan with raw JAX takes up to 1.9 times as long (see `weft.lifting.trace_cache`).
"""

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from benchmarks.frame import results
from benchmarks.frame.results import Answer
from weft.lifting.trace_cache import with_large_frame


def ask(name: str) -> Answer:
    """Runs one question.

    Args:
        name: of a file in `benchmarks`.

    Raises:
        Exception: what the question raises; its process ends with it.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_answer, name).result()
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()  # it would be waited for
            raise


def _answer(name: str) -> Answer:
    module = importlib.import_module(f"benchmarks.{name}")
    words = " ".join((module.__doc__ or "").split("\n\n")[0].split())
    rows = with_large_frame(module.run)  # before a device is used, for settings of the process
    return Answer.of(words, results.here(), rows)
