"""Which JAX trace is running."""

from typing import Any

import jax
from jax.extend.core import find_top_trace, get_opaque_trace_state

from weft.errors import JaxTransformError

TraceState = Any


with jax.ensure_compile_time_eval():
    _EAGER = find_top_trace(())
    _EAGER_STATE = get_opaque_trace_state(convention="flax")


def current_trace() -> TraceState:
    """The running trace, as something that can be compared and does not keep it alive."""
    # Outside of any trace, where time matters, that is known at a third of the price.
    if find_top_trace(()) is _EAGER:
        return _EAGER_STATE
    return get_opaque_trace_state(convention="flax")


def is_tracing() -> bool:
    """Whether a trace is running in which operations are not carried out at once."""
    return find_top_trace(()) is not _EAGER


def check_trace_level(base_level: TraceState) -> None:
    """Refuses to go on in another trace.

    Args:
        base_level: what `current_trace` was where the state was made that is about to change.

    Raises:
        JaxTransformError: if another trace is running.
    """
    if base_level != current_trace():
        raise JaxTransformError()
