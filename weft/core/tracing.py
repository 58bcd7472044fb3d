"""Access to the running JAX trace.

Importing `jax.extend` is slow because it imports Pallas. The first call that needs the trace
imports it and replaces `find_top_trace`; later calls have no overhead.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax.core

from weft.core.raw_transformations import lifted_names, running_transformation
from weft.errors import JaxTransformError
from weft.lifting.stack import with_room

T = TypeVar("T")

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
    """Returns the running trace."""
    return weakref.ref(_find_top_trace(()))


def is_tracing() -> bool:
    """Returns whether a trace is running that does not execute operations immediately."""
    return _find_top_trace(()) is not _eager


def at_trace(trace: jax.core.Trace) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose operations belong to an outer running trace."""
    from jax.extend.core import set_current_trace

    return set_current_trace(trace)


def with_room_in_trace(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls a function, by `with_room` if a trace is running."""
    return with_room(fn, *args, **kwargs) if is_tracing() else fn(*args, **kwargs)


def check_trace_level(base_level: TraceState) -> None:
    """Raises JaxTransformError unless the trace `base_level`, in which state was created, runs."""
    if base_level != current_trace():
        of_jax = running_transformation()
        raise JaxTransformError(of_jax=of_jax, lifted=lifted_names(of_jax))
