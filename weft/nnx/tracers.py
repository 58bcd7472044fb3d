"""The trace in which an object was created."""

import dataclasses

import weft.core.tracing
from weft.core.tracing import current_trace


@dataclasses.dataclass(frozen=True)
class TraceState:
    """Trace that runs when the object is created."""

    jax_trace: weft.core.tracing.TraceState = dataclasses.field(default_factory=current_trace)

    def is_valid(self) -> bool:
        """Returns whether the trace still runs."""
        return self.jax_trace == current_trace()
