"""Host-side run state: the counters of policies, saved as one JSON value."""

from collections.abc import Mapping
from typing import Any

from weft.trainer.python_savables import PythonSavable


class RunState:
    """States of a run's policies by name, for a checkpoint; policies without a state are omitted.

    Policies may change between two starts of a run: a policy without a saved state starts fresh,
    and saved states of removed policies are ignored.
    """

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = {name: p for name, p in parts.items() if isinstance(p, PythonSavable)}

    def get_state(self) -> dict[str, Any]:
        """Returns the states by name."""
        return {name: part.get_state() for name, part in self._parts.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores states that `get_state` returned in this or an earlier start of the run."""
        for name, part in self._parts.items():
            if name in state:
                part.set_state(state[name])
