"""Base class of writers for an evaler's model outputs."""

from typing import Any

from weft.hierarchy.module import Module
from weft.typing import Nested


class BaseOutputWriter(Module):
    """Base class of output writers. A subclass defines `write` and, if it buffers, `flush`."""

    def write(self, *, input_batch: Nested[Any], output_batch: Nested[Any]) -> None:
        """Writes the outputs of one batch.

        Args:
            input_batch: The batch, on the devices.
            output_batch: The "output" of the metric calculator's `forward`.
        """
        raise NotImplementedError(type(self))

    def flush(self) -> None:
        """Flushes buffers; called after the last batch."""
