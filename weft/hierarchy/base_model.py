"""Interface between a trainer and a model."""

from collections.abc import Mapping
from typing import Any

from weft.hierarchy.base_layer import BaseLayer
from weft.typing import Tensor


class BaseModel(BaseLayer):
    """Layer that computes a loss from a batch. A subclass defines `forward`."""

    def forward(self, input_batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss, a scalar, and a dict of auxiliary outputs such as logits."""
        raise NotImplementedError(type(self))
