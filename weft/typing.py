"""Type aliases for signatures."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union

import jax
import numpy as np
from jax.sharding import PartitionSpec

T = TypeVar("T")

Tensor = jax.Array
Shape = Sequence[int]
DType = Any  # whatever `jnp.dtype` accepts: a NumPy or ml_dtypes scalar type, a dtype, its name
Nested = Union[T, Mapping[str, "Nested[T]"]]  # noqa: UP007 - a recursive alias needs the quoted form
NestedTensor = Nested[Tensor]
ArrayLike = jax.Array | np.ndarray | float | int | bool
# One entry per axis: the mesh axis, or axes, that the axis is laid over, or None.
MeshAxes = Sequence[str | Sequence[str] | None]

__all__ = [
    "ArrayLike",
    "DType",
    "MeshAxes",
    "Nested",
    "NestedTensor",
    "PartitionSpec",
    "Shape",
    "Tensor",
]
