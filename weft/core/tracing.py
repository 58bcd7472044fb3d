"""Which JAX trace is running.

`jax.extend` says it, which takes long to import, for it brings Pallas in. So it is imported when a
trace is asked for first, by the function that stands in the place of `find_top_trace` until then;
later calls cost no more than with an import at the top.
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
"""A trace, as something that can be compared and does not keep it alive."""


def _find_first(operands: tuple[()]) -> Any:
    global _find_top_trace, _eager
    # Perhaps a trace is running, which is not the one that is asked for, and of which nothing may
    # stay in what is imported.
    with jax.core.eval_context():
        from jax.extend.core import find_top_trace

        _eager = find_top_trace(())
    _find_top_trace = find_top_trace
    return find_top_trace(operands)


_find_top_trace: Callable[[tuple[()]], Any] = _find_first
_eager: Any = None


def current_trace() -> TraceState:
    """The running trace."""
    return weakref.ref(_find_top_trace(()))


def is_tracing() -> bool:
    """Whether a trace is running in which operations are not carried out at once."""
    return _find_top_trace(()) is not _eager


def at_trace(trace: jax.core.Trace) -> contextlib.AbstractContextManager[Any]:
    """A context in which operations belong to a trace further out, which is still running."""
    from jax.extend.core import set_current_trace

    return set_current_trace(trace)


def with_room_in_trace(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls a function, where a trace is running as `with_room` does."""
    return with_room(fn, *args, **kwargs) if is_tracing() else fn(*args, **kwargs)


def check_trace_level(base_level: TraceState) -> None:
    """Refuses to go on in another trace.

    Args:
        base_level: what `current_trace` was where the state was made that is about to change.

    Raises:
        JaxTransformError: if another trace is running.
    """
    if base_level != current_trace():
        of_jax = running_transformation()
        raise JaxTransformError(of_jax=of_jax, lifted=lifted_names(of_jax))
