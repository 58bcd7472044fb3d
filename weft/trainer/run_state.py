"""What a run knows beside arrays: what its policies have counted, saved as one JSON value."""

from collections.abc import Mapping
from typing import Any

from weft.trainer.python_savables import PythonSavable


class RunState:
    """The states of a run's policies, under their names, for a checkpoint.

    A policy that a checkpoint knows nothing of begins anew, and what is there of one that the run
    no longer has is passed over: policies may come and go between two starts of a run.

    Args:
        parts: Policies by name; those without a state are left out.
    """

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = {name: p for name, p in parts.items() if isinstance(p, PythonSavable)}

    def get_state(self) -> dict[str, Any]:
        """The states by name."""
        return {name: part.get_state() for name, part in self._parts.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from saved states.

        Args:
            state: What `get_state` gave, here or in another start of the run.
        """
        for name, part in self._parts.items():
            if name in state:
                part.set_state(state[name])
