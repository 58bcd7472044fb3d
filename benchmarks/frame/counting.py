"""What a call costs in Python, counted: no other program disturbs a count, so tests assert them.

A function is counted after it was called once, when all that is made once has been made.

Python's minor versions differ in what they call and execute for the same program. Comprehensions
are functions of their own until 3.11 and no longer, so they are never counted as calls.
Instructions become fewer from version to version (a call is two of them in 3.11 and one later, two
loads in a row are one from 3.13), so a bound that holds on 3.11 holds after it.
"""

import collections
import gc
import re
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

_COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>"})


def calls(fn: Callable[[], Any], n: int = 10, *, of: str = "") -> float:
    """How many Python functions a call enters, in files whose path begins with `of`."""
    here, entered = sys._getframe(), 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal entered
        if event == "call" and frame.f_back is not here:
            code = frame.f_code
            entered += code.co_name not in _COMPREHENSIONS and code.co_filename.startswith(of)

    fn()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(n):
            fn()
    finally:
        sys.setprofile(before)
    return entered / n


def instructions(fn: Callable[[], Any], *, of: str = "") -> int:
    """How many bytecode instructions a call executes, in files whose path begins with `of`."""
    here, executed = sys._getframe(), 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal executed
        if not frame.f_code.co_filename.startswith(of):
            return None
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, frame.f_back is not here
        executed += event == "opcode"
        return trace

    fn()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    finally:
        sys.settrace(before)
    return executed


def kept(fn: Callable[[], Any], n: int = 20) -> float:
    """How many blocks of memory a call leaves behind, in Python's allocator."""
    fn(), fn()
    with _no_collections():
        before = sys.getallocatedblocks()
        for _ in range(n):
            fn()
        return (sys.getallocatedblocks() - before) / n


def peak(fn: Callable[[], Any]) -> int:
    """How many bytes of Python's objects a call holds at most beyond those that were there."""
    fn()
    with _no_collections():
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            fn()
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()


class _no_collections:
    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: Any) -> None:
        gc.enable()


def equations(jaxpr: Any) -> int:
    """How many equations a jaxpr has, with those of the jaxprs inside of it."""
    from jax.extend.core import jaxprs_in_params

    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(1 + sum(map(equations, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def operations(text: str) -> collections.Counter[str]:
    """How often each operation stands in a StableHLO text."""
    return collections.Counter(re.findall(r"(?<!#)\bstablehlo\.(\w+)", text))
