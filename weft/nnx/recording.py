"""The values with which variables are made in the body of a loop or in a branch.

A loop carries a variable that its body makes from its first value on, which may have changed by the
end of the body. So it is noted when the variable is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from weft.core.tracing import current_trace

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Recording:
    """The first values of the variables that one run of a function makes.

    Args:
        counts: the counts of keys in the function's arguments.
    """

    def __init__(self, counts: Sequence[Any]):
        self._counts, self._trace = counts, current_trace()
        self._made: dict[int, tuple[Any, Any, list[Any]]] = {}

    def note(self, variable: Any, value: Any, counts: Mapping[int, Any] = _NOTHING) -> None:
        """Notes that a variable was made here.

        Args:
            variable: the variable.
            value: its first value.
            counts: what counts of keys were when it was made, by id, if not what they are now.
        """
        if variable._trace != self._trace:
            return  # what has a trace of its own has a recording of its own
        key = id(variable)
        self._made.pop(key, None)
        # The variable is kept, so that no other one has its id.
        values = [counts.get(id(count), count._value) for count in self._counts]
        self._made[key] = variable, value, values

    def __contains__(self, variable: Any) -> bool:
        return id(variable) in self._made

    def first_value(self, variable: Any) -> Any:
        """Returns a variable's first value, or its present one if it was not recorded."""
        known = self._made.get(id(variable))
        return variable._value if known is None else known[1]

    def counts_after(self, variables: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Returns the counts of keys, with their values when the last of `variables` was made."""
        wanted = set(map(id, variables))
        values = next((v for key, (_, _, v) in reversed(self._made.items()) if key in wanted), None)
        return [] if values is None else [*zip(self._counts, values, strict=True)]

    def __enter__(self) -> None:
        self._outer, RECORDING.now = RECORDING.now, self

    def __exit__(self, *_: object) -> None:
        RECORDING.now = self._outer


class _Now(threading.local):
    """The recording that is open in this thread."""

    now: Recording | None = None


RECORDING = _Now()
