"""Which JAX trace is running."""

from typing import Any

from jax.extend.core import get_opaque_trace_state

from weft.errors import JaxTransformError

TraceState = Any


def current_trace() -> TraceState:
    """The running trace, as something that can be compared and does not keep it alive."""
    return get_opaque_trace_state(convention="flax")


def check_trace_level(base_level: TraceState) -> None:
    """Refuses to go on in another trace.

    Args:
        base_level: what `current_trace` was where the state was made that is about to change.

    Raises:
        JaxTransformError: if another trace is running.
    """
    if base_level != current_trace():
        raise JaxTransformError()
