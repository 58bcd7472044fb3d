"""Types for signatures: aliases, and what a transformation does to the type of a function."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    overload,
)

import jax
import numpy as np
from jax.sharding import PartitionSpec

T = TypeVar("T")
P = ParamSpec("P")
Options = ParamSpec("Options")
Transformation = Callable[Concatenate[Callable[..., Any], Options], Any]
"""Function of a function and of options, such as `jax.jit`."""

Fn = Callable[..., Any]
Tensor = jax.Array
"""Array of JAX."""
Shape = Sequence[int]
"""Sizes of the axes of an array."""
DType = Any
"""What `jnp.dtype` accepts: a NumPy or ml_dtypes scalar type, a dtype, or its name."""
Nested = Union[T, Mapping[str, "Nested[T]"]]  # noqa: UP007 - a recursive alias needs the quoted form
"""Value, or a dict of values, or of such dicts, by name."""
NestedTensor = Nested[Tensor]
"""Array, or nested dict of arrays."""
PyTree = Any
"""Arrays in containers of the user's choice, which JAX knows as pytrees."""
ArrayLike = jax.Array | np.ndarray | float | int | bool
"""What a function that takes an array accepts: an array of JAX or NumPy, or a number."""
MeshAxes = Sequence[str | Sequence[str] | None]
"""For each axis of an array, the mesh axis, or axes, that it is laid over, or None."""

if TYPE_CHECKING:
    # fmt: off
    ActivationName = Literal[
        "linear", "exact_gelu", "quick_gelu", "squared_relu", "nn.celu", "nn.elu", "nn.gelu",
        "nn.glu", "nn.hard_sigmoid", "nn.hard_silu", "nn.hard_swish", "nn.hard_tanh",
        "nn.identity", "nn.leaky_relu", "nn.log_sigmoid", "nn.log_softmax", "nn.mish",
        "nn.relu", "nn.relu6", "nn.selu", "nn.sigmoid", "nn.silu", "nn.soft_sign", "nn.softmax",
        "nn.softplus", "nn.sparse_plus", "nn.squareplus", "nn.standardize", "nn.swish",
        "nn.tanh", "jnp.abs", "jnp.cos", "jnp.exp", "jnp.sin", "jnp.square", "jnp.tanh",
    ]
    # fmt: on
    FeedForwardStructure = Literal[
        "prenorm", "postnorm", "hybridnorm", "hybridnorm_v2", "v2", "nonorm"
    ]
    FanName = Literal["fan_in", "fan_out", "fan_avg"]
    DistributionName = Literal["uniform", "normal", "truncated_normal"]
    QuantizationName = Literal["int8", "fp8", "off"]
    LossName = Literal[
        "cross_entropy", "binary_cross_entropy", "mse", "mae", "huber"
    ]
    MetricName = Literal[
        "accuracy",
        "auc",
        "confusion_matrix",
        "f1",
        "perplexity",
        "precision",
        "recall",
    ]
    OptimizerName = Literal["adam", "adamw", "sgd"]
    PrecisionName = Literal[
        "float32", "mixed_bfloat16", "bfloat16", "int8", "fp8"
    ]
else:
    # Layers check the names themselves, and advise; a config field would refuse them before.
    ActivationName = FeedForwardStructure = FanName = DistributionName = (
        QuantizationName
    ) = str
    LossName = MetricName = OptimizerName = PrecisionName = str

# The names of `flax.typing`, which need not be as precise as those above.
A, C, F, K, M = (
    TypeVar("A"),
    TypeVar("C"),
    TypeVar("F"),
    TypeVar("K"),
    TypeVar("M"),
)
HA = TypeVar("HA", bound=Hashable)
HB = TypeVar("HB", bound=Hashable)
TupleArg = TypeVar("TupleArg", bound=tuple[Any, ...])
Array = jax.Array | Any
PRNGKey = jax.Array
PRNGFoldable = int | str
RNGSequences = dict[str, PRNGKey]
Dtype = jax.typing.DTypeLike | Any
Key = Hashable
Path = str
PathParts = tuple[Key, ...]
Leaf = Any
Collection = Mapping[str, Any]
MutableCollection = dict[str, Any]
VariableDict = Mapping[str, Collection]
MutableVariableDict = dict[str, MutableCollection]
Initializer = jax.nn.initializers.Initializer | Callable[..., Any]
DtypeLikeInexact = Any
PrecisionLike = (
    None
    | str
    | jax.lax.Precision
    | tuple[str, str]
    | tuple[jax.lax.Precision, ...]
)
DotGeneralT = ConvGeneralDilatedT = EinsumT = Callable[..., Array]
PaddingLike = str | int | Sequence[int | tuple[int, int]]
LaxPadding = str | Sequence[tuple[int, int]]
Axis = int | None
Axes = int | Sequence[int]
ScanAxis = int
AxisName = str | tuple[str, ...] | None
LogicalNames = tuple[str | None, ...]
LogicalRules = Sequence[tuple[str, AxisName]]
Sharding = tuple[AxisName, ...]
ArrayPytree = PartitionSpecPytree = LogicalPartitionSpec = (
    LogicalPartitionSpecPytree
) = Any
IsLeafCallable = Callable[[PathParts, Mapping[Any, Any]], bool]


class Missing:
    """Type of `MISSING`, the default of parameters for which None is a value."""


MISSING: Any = Missing()


class ShapeDtype(Protocol):
    """Array or description of one."""

    shape: tuple[int, ...]
    dtype: np.dtype


def has_shape_dtype(x: object) -> TypeGuard[ShapeDtype]:
    """Returns whether an object has a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


class HashableMapping(Mapping[HA, HB]):
    """Mapping that does not change, so that it can be hashed."""

    def __init__(self, mapping: Mapping[HA, HB], copy: bool = True):
        self._mapping = dict(mapping) if copy else mapping

    def __getitem__(self, key: HA) -> HB:
        return self._mapping[key]

    def __iter__(self) -> Iterator[HA]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __hash__(self) -> int:
        return hash(frozenset(self._mapping.items()))

    def __repr__(self) -> str:
        return repr(self._mapping)


__all__ = [
    "ArrayLike",
    "DType",
    "MeshAxes",
    "Nested",
    "NestedTensor",
    "PartitionSpec",
    "PyTree",
    "Shape",
    "Tensor",
]


class SameSignature(Protocol[Options]):
    """Transformation that keeps a function's signature; without a function, a decorator."""

    @overload
    def __call__(
        self,
        f: Callable[P, T],
        /,
        *args: Options.args,
        **options: Options.kwargs,
    ) -> Callable[P, T]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


class Grad(Protocol[Options]):
    """Transformation to a function with the same parameters that returns derivatives."""

    @overload
    def __call__(
        self,
        f: Callable[P, object],
        /,
        *args: Options.args,
        **options: Options.kwargs,
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...


class ValueAndGrad(Protocol[Options]):
    """Transformation to a function with the same parameters that returns a pair with its result."""

    @overload
    def __call__(
        self,
        f: Callable[P, T],
        /,
        *args: Options.args,
        **options: Options.kwargs,
    ) -> Callable[P, tuple[T, Any]]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, T]], Callable[P, tuple[T, Any]]]: ...


def same_signature(
    transformation: Transformation[Options],
) -> SameSignature[Options]:
    """Returns the transformation, typed as one that keeps the signatures of functions."""
    return cast(SameSignature[Options], transformation)


def as_grad(transformation: Transformation[Options]) -> Grad[Options]:
    """Returns the transformation, typed as one like `jax.grad`."""
    return cast(Grad[Options], transformation)


def as_value_and_grad(
    transformation: Transformation[Options],
) -> ValueAndGrad[Options]:
    """Returns the transformation, typed as one like `jax.value_and_grad`."""
    return cast(ValueAndGrad[Options], transformation)
