"""Parts of all layers: parameters, the dtype of the computation, PRNG streams and modes.

A mode is behavior that differs between training, evaluation and decoding: an attribute, set by
`model.train()` and `model.eval()`, and an argument of the call, which takes precedence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, Protocol, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from weft import errors, functional
from weft.core.frozen_dict import FrozenDict
from weft.functional.arrays import OutSharding
from weft.functional.initializers import lecun_normal, zeros
from weft.nnx.module import Module
from weft.nnx.rngs import Rngs, RngStream
from weft.nnx.variables import Param, Variable
from weft.typing import ArrayLike, DType

Initializer = Callable[..., Any]
Metadata = Mapping[str, Any]
T = TypeVar("T")

default_kernel_init = lecun_normal()
NO_METADATA: Metadata = FrozenDict()


def check_sizes(layer: Module, *names: str) -> None:
    """Raises ArgumentValueError if an attribute is not a positive size, sizes of axes, or None."""
    sizes: dict[str, Any] = {}
    for name in names:
        sizes[name] = getattr(layer, name)
    functional.check_sizes(type(layer).__name__, **sizes)


def new_param(
    init: Initializer,
    rngs: Rngs,
    shape: Sequence[int],
    dtype: DType,
    metadata: Metadata = NO_METADATA,
    variable_type: Callable[..., Any] = Param,
) -> Param[Array]:
    """Returns a new variable.

    Args:
        init: initializer; may return a value with metadata, like those of `nnx.with_metadata`.
        rngs: its stream `params` draws the value.
        metadata: metadata of the variable; the initializer's takes precedence.

    Raises InvalidRngError if `rngs` is not `Rngs`.

    >>> new_param(default_kernel_init, Rngs(0), (2, 3), "float32", {"tag": "head"}).shape
    (2, 3)
    """
    value = init(params_key(rngs), shape, dtype)
    # Unpacking a `FrozenDict` takes four Python calls, also an empty one.
    if metadata is NO_METADATA:
        return variable_type(value)
    return variable_type(value, **metadata)


def params_key(rngs: Rngs) -> jax.Array:
    """Returns the next key of the stream `params`.

    Raises InvalidRngError if `rngs` is not `Rngs`.
    """
    if not isinstance(rngs, Rngs):
        raise errors.InvalidRngError(
            f"a layer was given rngs={rngs!r} to draw its parameters; expected streams, such as "
            "rngs=nnx.Rngs(0)."
        )
    return rngs.params()


class PromoteDtype(Protocol):
    """Callable that casts arrays to one dtype, as `promote_dtype` does."""

    def __call__(
        self,
        args: Sequence[ArrayLike | None],
        /,
        *,
        dtype: DType | None = None,
        inexact: bool = True,
    ) -> Any: ...


def promote_dtype(
    args: Sequence[ArrayLike | None],
    /,
    *,
    dtype: DType | None = None,
    inexact: bool = True,
) -> tuple[Any, ...]:
    """Returns the arguments as arrays of one dtype.

    They are arrays or numbers; None stays None. For `dtype` and `inexact` see
    `weft.functional.canonicalize_dtype`.

    Raises ArgumentValueError for a `dtype` that must be inexact and is not, or without arrays.

    >>> x, bias = promote_dtype((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)))
    >>> x.dtype.name, bias.dtype.name
    ('float32', 'float32')
    """
    return tuple(functional.promote_dtype(*args, dtype=dtype, inexact=inexact))


def optional_value(variable: Variable[Array] | None) -> Array | None:
    """Returns the value of a variable; None stays None."""
    return None if variable is None else variable[...]


# The arguments of `KernelModule` that its parameters are made of: initializers of kernel and bias,
# streams, and metadata of kernel and bias.
KernelArguments = tuple[Initializer, Initializer, Rngs, Metadata, Metadata]


class ProductOptions(TypedDict):
    """The options that all products of `weft.functional` have."""

    precision: jax.lax.PrecisionLike
    preferred_element_type: DType | None
    out_sharding: OutSharding


@dataclass(repr=False, eq=False)
class KernelModule(Module):
    """Base class of layers with the parameters `kernel` and `bias`, which may be None."""

    _: KW_ONLY
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: InitVar[Initializer] = default_kernel_init
    bias_init: InitVar[Initializer] = zeros
    promote_dtype: PromoteDtype = promote_dtype
    preferred_element_type: DType | None = None
    rngs: InitVar[Rngs]
    kernel_metadata: InitVar[Metadata] = NO_METADATA
    bias_metadata: InitVar[Metadata] = NO_METADATA

    def _make_parameters(
        self,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None,
        kernel_init: Initializer,
        bias_init: Initializer,
        rngs: Rngs,
        kernel_metadata: Metadata,
        bias_metadata: Metadata,
    ) -> None:
        dtype = self.param_dtype
        self.kernel = new_param(
            kernel_init, rngs, kernel_shape, dtype, kernel_metadata
        )
        bias = None
        if bias_shape is not None:
            bias = new_param(bias_init, rngs, bias_shape, dtype, bias_metadata)
        self.bias = bias

    def _promoted(
        self, inputs: Array, kernel: Array
    ) -> tuple[Array, Array, Array | None]:
        bias = None if self.bias is None else self.bias[...]
        return self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)

    def _product_options(self, out_sharding: OutSharding) -> ProductOptions:
        return {
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
            "out_sharding": out_sharding,
        }


def first_from(*args: T | None, error_msg: str) -> T:
    """Returns the first argument that is not None; `flax.nnx.module` has it for layers of others.

    Raises ArgumentValueError with `error_msg`, if all are None.
    """
    for arg in args:
        if arg is not None:
            return arg
    raise errors.ArgumentValueError(error_msg)


def resolve_mode(layer: Module, name: str, mode: bool | None) -> bool:
    """Returns the mode in which a layer is called: `mode`, or else its attribute `name`.

    Raises MissingModeError if it is neither passed nor set.
    """
    if mode is None:
        mode = getattr(layer, name)
    if mode is None:
        raise errors.MissingModeError(type(layer).__name__, name)
    return mode


def draw_key(
    rngs: Rngs | RngStream | jax.Array | None, name: str, layer: str
) -> jax.Array:
    """Returns a key from PRNG streams, from one stream, or the given key.

    Raises:
        InvalidRngError: if `rngs` is None.
        RngArgumentError: if `rngs` has another type.
        RngStreamNotFoundError: if there is no such stream.

    >>> rngs = Rngs(dropout=0)
    >>> bool(draw_key(rngs, "dropout", "") == draw_key(RngStream(0), "dropout", ""))
    True
    """
    if isinstance(rngs, RngStream):
        return rngs()
    if isinstance(rngs, Rngs):
        return rngs[name]()
    if isinstance(rngs, jax.Array):
        return rngs
    if rngs is None:
        raise errors.InvalidRngError(
            f"{layer} applies dropout but has no PRNG stream; give it rngs=nnx.Rngs({name}=0) "
            "when it is made or called, or call it with deterministic=True."
        )
    raise invalid_rngs_error(rngs, layer)


def fork_stream(
    rngs: Rngs | RngStream | None, name: str, layer: str
) -> RngStream | None:
    """Returns a stream for a layer, forked from PRNG streams or one stream; None stays None.

    Raises:
        RngArgumentError: if `rngs` has another type.
        RngStreamNotFoundError: if there is no such stream.

    >>> fork_stream(Rngs(dropout=0), "dropout", "").tag
    'dropout'
    """
    if rngs is None:
        return None
    if isinstance(rngs, Rngs):
        rngs = rngs[name]
    if not isinstance(rngs, RngStream):
        raise invalid_rngs_error(rngs, layer)
    return rngs.fork()


def invalid_rngs_error(rngs: object, layer: str) -> errors.RngArgumentError:
    """Returns the error about `rngs` of a wrong type."""
    return errors.RngArgumentError(
        f"{layer} was given rngs={rngs!r}; expected PRNG streams such as nnx.Rngs(0), one stream, "
        "or, in a call, a key."
    )
