"""Metrics that add up over batches, devices and iterations."""

import jax.numpy as jnp

from weft import struct
from weft.typing import Tensor


class WeightedScalar(struct.PyTreeNode):
    """A mean with the weight it stands for; two add up to the mean over both.

    Attributes:
        mean: the mean.
        weight: how much it counts, such as the number of examples.

    Example:
        >>> total = WeightedScalar(1.0, 1.0) + WeightedScalar(4.0, 2.0)
        >>> float(total.mean), float(total.weight)
        (3.0, 3.0)
    """

    mean: Tensor | float
    weight: Tensor | float

    def __add__(self, other: "WeightedScalar") -> "WeightedScalar":
        weight = self.weight + other.weight
        total = self.mean * self.weight + other.mean * other.weight
        # Nothing weighs nothing: the mean of no examples is 0, not NaN.
        return WeightedScalar(jnp.where(weight > 0, total / jnp.maximum(weight, 1e-30), 0), weight)
