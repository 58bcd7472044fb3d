"""Which JAX trace is running.

`jax.extend` says it, which takes long to import, for it brings Pallas in. So it is imported when a
trace is asked for first, by the function that stands in the place of `find_top_trace` until then;
later calls cost no more than with an import at the top.
"""

from collections.abc import Callable
from typing import Any

import jax.core

from weft.errors import JaxTransformError

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


def current_trace() -> TraceState:
    """The running trace, as something that can be compared and does not keep it alive."""
    # Outside of any trace, where time matters, that is known at a third of the price.
    if _find_top_trace(()) is _eager:
        return _eager_state
    return _trace_state(convention="flax")


def is_tracing() -> bool:
    """Whether a trace is running in which operations are not carried out at once."""
    return _find_top_trace(()) is not _eager


def check_trace_level(base_level: TraceState) -> None:
    """Refuses to go on in another trace.

    Args:
        base_level: what `current_trace` was where the state was made that is about to change.

    Raises:
        JaxTransformError: if another trace is running.
    """
    if base_level != current_trace():
        raise JaxTransformError()
