"""What an evaler hands its model's outputs to, batch by batch."""

from typing import Any

from weft.hierarchy.module import Module
from weft.typing import Nested


class BaseOutputWriter(Module):
    """Base of the writers of outputs. A subclass defines `write` and, if it buffers, `flush`."""

    def write(self, *, input_batch: Nested[Any], output_batch: Nested[Any]) -> None:
        """Writes the outputs of one batch.

        Args:
            input_batch: The batch, on the devices.
            output_batch: What the metric calculator's `forward` gave as its output.
        """
        raise NotImplementedError(type(self))

    def flush(self) -> None:
        """Is called after the last batch."""
