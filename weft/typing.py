"""Types for signatures: aliases, and what a transformation does to the type of a function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Union, cast, overload

import jax
import numpy as np
from jax.sharding import PartitionSpec

T = TypeVar("T")
P = ParamSpec("P")
Options = ParamSpec("Options")
_Transformation = Callable[Concatenate[Callable[..., Any], Options], Any]

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


class SameSignature(Protocol[Options]):
    """Transformation that keeps a function's signature; without a function, a decorator."""

    @overload
    def __call__(
        self, f: Callable[P, T], /, *args: Options.args, **options: Options.kwargs
    ) -> Callable[P, T]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


class Grad(Protocol[Options]):
    """Transformation to a function with the same parameters that returns derivatives."""

    @overload
    def __call__(
        self, f: Callable[P, object], /, *args: Options.args, **options: Options.kwargs
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...


class ValueAndGrad(Protocol[Options]):
    """Transformation to a function with the same parameters that returns a pair with its result."""

    @overload
    def __call__(
        self, f: Callable[P, T], /, *args: Options.args, **options: Options.kwargs
    ) -> Callable[P, tuple[T, Any]]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, T]], Callable[P, tuple[T, Any]]]: ...


def same_signature(transformation: _Transformation[Options]) -> SameSignature[Options]:
    """Returns the transformation, typed as one that keeps the signatures of functions."""
    return cast(SameSignature[Options], transformation)


def as_grad(transformation: _Transformation[Options]) -> Grad[Options]:
    """Returns the transformation, typed as one like `jax.grad`."""
    return cast(Grad[Options], transformation)


def as_value_and_grad(transformation: _Transformation[Options]) -> ValueAndGrad[Options]:
    """Returns the transformation, typed as one like `jax.value_and_grad`."""
    return cast(ValueAndGrad[Options], transformation)
