"""The trace of JAX that is running.

Importing `jax.extend` is slow because it imports Pallas. The first call that needs the trace
imports it and replaces `_find_top_trace`; later calls have no overhead.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.core

TraceState = weakref.ReferenceType[jax.core.Trace]
"""Identity of a trace, comparable without keeping the trace alive."""


def _find_first(operands: tuple[()]) -> Any:
    global _find_top_trace, _eager
    # Another trace may be running, which must not leak into imported modules.
    with jax.core.eval_context():
        from jax.extend.core import find_top_trace

        _eager = find_top_trace(())
    _find_top_trace = find_top_trace
    return find_top_trace(operands)


_find_top_trace: Callable[[tuple[()]], Any] = _find_first
_eager: Any = None


def current_trace() -> TraceState:
    """Returns a reference to the innermost trace of JAX that is running."""
    return weakref.ref(_find_top_trace(()))


def is_tracing() -> bool:
    """Returns whether a trace is running that does not execute operations immediately."""
    return _find_top_trace(()) is not _eager


def at_trace(trace: jax.core.Trace) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose operations belong to an outer running trace."""
    from jax.extend.core import set_current_trace

    return set_current_trace(trace)
