"""Which JAX trace is running.

`jax.extend` says it, which takes long to import, for it brings Pallas in. So it is imported when a
trace is asked for first, by the function that stands in the place of `find_top_trace` until then;
later calls cost no more than with an import at the top.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax.core

from weft.errors import JaxTransformError
from weft.lifting.stack import with_room

T = TypeVar("T")

TraceState = Any


def _find_first(operands: tuple[()]) -> Any:
    global _find_top_trace, _trace_state, _eager, _eager_state
    # Perhaps a trace is running, which is not the one that is asked for, and of which nothing may
    # stay in what is imported.
    with jax.core.eval_context():
        from jax.extend.core import find_top_trace, get_opaque_trace_state

        _eager, _eager_state = find_top_trace(()), get_opaque_trace_state(convention="flax")
    _find_top_trace, _trace_state = find_top_trace, get_opaque_trace_state
    return find_top_trace(operands)


_find_top_trace: Callable[[tuple[()]], Any] = _find_first
_trace_state: Any = None
_eager: Any = None
_eager_state: Any = None
_latest: tuple[Callable[[], Any], TraceState] = (lambda: None, None)


def current_trace() -> TraceState:
    """The running trace, as something that can be compared and does not keep it alive."""
    global _latest
    # It is asked for at each write, and making the answer takes three times as long as this.
    trace = _find_top_trace(())
    if trace is _eager:
        return _eager_state
    of, state = _latest
    if of() is not trace:
        state = _trace_state(convention="flax")
        _latest = weakref.ref(trace), state
    return state


def is_tracing() -> bool:
    """Whether a trace is running in which operations are not carried out at once."""
    return _find_top_trace(()) is not _eager


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
        raise JaxTransformError()
