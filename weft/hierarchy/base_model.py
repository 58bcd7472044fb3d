"""What a trainer needs of a model."""

from collections.abc import Mapping
from typing import Any

from weft.hierarchy.base_layer import BaseLayer
from weft.typing import Tensor


class BaseModel(BaseLayer):
    """A layer that makes a loss from a batch. A subclass defines `forward`."""

    def forward(self, input_batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Computes the loss.

        Args:
          input_batch: a batch of examples, as the input gives it.

        Returns:
          The loss, a scalar, and whatever else is of use, such as logits.
        """
        raise NotImplementedError(type(self))
