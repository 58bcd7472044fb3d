"""Base class of writers for an evaler's model outputs."""

from typing import Any

from weft.hierarchy.module import Module
from weft.typing import Nested


class BaseOutputWriter(Module):
    """Base class of output writers. A subclass defines `write` and, if it buffers, `flush`."""

    def write(self, *, input_batch: Nested[Any], output_batch: Nested[Any]) -> None:
        """Writes the "output" of the metric calculator's `forward` for a batch on the devices."""
        raise NotImplementedError(type(self))

    def flush(self) -> None:
        """Flushes buffers; called after the last batch."""
