"""Python costs of a call, counted: other programs do not disturb counts, so tests assert them.

A function is counted after its first call, when all one-time work is done.

Python's minor versions differ in what they call and execute for the same program. Comprehensions
are functions of their own until 3.11 and no longer, so they are never counted as calls.
Instructions become fewer from version to version (a call is two of them in 3.11 and one later, two
loads in a row are one from 3.13), so a bound that holds on 3.11 holds after it.
"""

import collections
import contextlib
import gc
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

_COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>"})


class Calls:
    """Counts the Python functions entered inside of a `with` by this thread.

    Those that the block itself calls are not counted, nor those in files whose path does not begin
    with `of`.
    """

    def __init__(self, of: str = ""):
        self.count, self._of = 0, of

    def __enter__(self) -> "Calls":
        self._block, self._before = sys._getframe(1), sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(self._before)
        del self._block

    def _event(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_back is not self._block:
            code = frame.f_code
            self.count += code.co_name not in _COMPREHENSIONS and code.co_filename.startswith(
                self._of
            )


class Instructions:
    """Counts the bytecode instructions executed inside of a `with` by this thread.

    Those of the block itself and of what it calls are not counted, nor those in files whose path
    does not begin with `of`.
    """

    def __init__(self, of: str = ""):
        self.count, self._of = 0, of

    def __enter__(self) -> "Instructions":
        self._block, self._before = sys._getframe(1), sys.gettrace()
        sys.settrace(self._event)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)
        del self._block

    def _event(self, frame: Any, event: str, _: Any) -> Any:
        if event == "opcode":
            self.count += 1
        elif event == "call":
            if frame.f_back is self._block or not frame.f_code.co_filename.startswith(self._of):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._event


def calls(fn: Callable[[], Any], n: int = 10, *, of: str = "") -> float:
    """Returns how many Python functions in files under `of` a call of `fn` enters, without `fn`."""
    fn()
    with Calls(of) as counter:
        for _ in range(n):
            fn()
    return counter.count / n


def instructions(fn: Callable[[], Any], *, of: str = "") -> int:
    """Returns how many bytecode instructions a call of `fn` executes, besides its own, in files
    under `of`.
    """
    fn()
    with Instructions(of) as counter:
        fn()
    return counter.count


def kept(fn: Callable[[], Any], n: int = 20, *, of: str = "") -> float:
    """Returns how many blocks of memory that were allocated by files under `of` each call leaves
    behind, those among them that only a garbage collection would free.
    """

    def blocks() -> int:
        for _ in range(n):
            fn()
        traces = tracemalloc.take_snapshot().traces
        return sum(trace.traceback[0].filename.startswith(of) for trace in traces)

    fn()
    with _traced_memory():
        # Replaced objects exist after the first calls, and do not grow with further calls.
        return (-blocks() + blocks()) / n


def peak(fn: Callable[[], Any]) -> int:
    """Returns the peak number of bytes of Python objects that a call allocates."""
    fn()
    with _traced_memory():
        before = tracemalloc.get_traced_memory()[0]
        fn()
        return tracemalloc.get_traced_memory()[1] - before


@contextlib.contextmanager
def _traced_memory() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


def equations(jaxpr: Any) -> int:
    """Returns how many equations a jaxpr has, with those of the jaxprs inside of it."""
    from jax.extend.core import jaxprs_in_params

    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(1 + sum(map(equations, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def operations(text: str) -> collections.Counter[str]:
    """Returns number of occurrences of each operation in a StableHLO text."""
    return collections.Counter(re.findall(r"(?<!#)\bstablehlo\.(\w+)", text))
