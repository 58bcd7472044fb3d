"""Asks a question in a process of its own, so that no answer depends on what was asked before.

There it has room for Python's frames, or a time would depend on how deep its calls happen to lie:
tracing a scan with raw JAX takes up to 1.9 times as long. CPython allocates frames in chunks of
16 KB, enough for 60 to 100 calls. A call that finds its chunk full allocates another one and frees
it on return; if that boundary lies within a trace, thousands of its calls do so.
"""

import importlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from benchmarks.frame import results
from benchmarks.frame.results import Answer
from benchmarks.harness import Row


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
    rows = _with_room_for_frames(module.run)  # before a device is used, for settings of the process
    return Answer.of(words, results.here(), rows)


def _with_room_for_frames(run: Callable[[], list[Row]]) -> list[Row]:
    """Calls a function from a frame of 512 KB, whose chunk has as much room for further frames."""

    def call() -> list[Row]:
        return run()

    call.__code__ = call.__code__.replace(co_stacksize=1 << 16)
    return call()
