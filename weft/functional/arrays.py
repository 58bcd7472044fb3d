"""Helpers of layers for ranks, batch axes, sizes and dtypes, and rounding to fewer bits.

Axes are added explicitly, since JAX's own rank promotion may be forbidden by
`jax_numpy_rank_promotion`. A layer computes in its own dtype, or in the promoted one of its arrays:
a floating-point or complex dtype, even where all inputs are integers.

Rounding to the nearest number loses every update of a parameter that is smaller than half the
distance to the next number: in bfloat16, with 8 significant bits, less than 1/512 of the parameter.
Stochastic rounding keeps them on average: it rounds up with the probability that makes the
expected result exact (Gupta et al., 2015).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key, Num

from weft.errors import ArgumentValueError
from weft.typing import DType

T = TypeVar("T")

# Mesh axes over which one axis of an array is sharded.
SpecEntry = str | Sequence[str] | None

# The sharding of a result, as `out_sharding` of JAX's functions takes it.
OutSharding = NamedSharding | PartitionSpec | None

# `jax.jit(inline=)` that leaves no call in the jaxpr. Where JAX has more than one way, True does.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

# Product of `weft.functional.default_dot_general`, in the keys of JAX's caches of traces. A new
# context invalidates all earlier traces, so it is made where every way of writing begins.
dot_general_context = jax.make_user_context()


def to_ndim(
    x: Num[Array, "*shape"], ndim: int
) -> Num[Array, "*ones_and_shape"]:
    """Returns `x` with axes of size 1 prepended, up to at least `ndim`; scalars stay scalars.

    >>> to_ndim(jnp.ones(3), 2).shape, to_ndim(jnp.array(1.0), 2).shape
    ((1, 3), ())
    """
    x = jnp.asarray(x)
    if 0 < x.ndim < ndim:
        return jax.lax.expand_dims(x, range(ndim - x.ndim))
    return x


def same_ndim(*xs: Num[Array, "..."]) -> list[Num[Array, "..."]]:
    """Returns arrays with axes of size 1 prepended, up to the largest number of axes.

    >>> [x.shape for x in same_ndim(jnp.ones((2, 3)), jnp.ones(3))]
    [(2, 3), (1, 3)]
    """
    ndim = max(map(jnp.ndim, xs))
    return [to_ndim(x, ndim) for x in xs]


def counted(
    x: Num[Array, "*shape"],
    where: Num[Array, "*#shape"] | Bool[Array, "*#shape"] | None,
) -> Num[Array, "*shape"]:
    """Returns `x` with 0 where `where` is 0 or False; None leaves all unchanged.

    What does not count may be NaN or infinite. Its gradient is 0 only if it is replaced before it
    is used: after that, the gradient of what it was used in is 0 times NaN, also for parameters.

    >>> where, x = jnp.array([True, False]), jnp.array([2.0, jnp.inf])
    >>> jax.grad(lambda x: jnp.square(counted(x, where)).sum())(x).tolist()
    [4.0, 0.0]
    """
    if where is None:
        return x
    if where.dtype != bool:
        where = where != 0
    return jnp.where(where, x, jnp.zeros((), x.dtype))


def finite_or_counted(
    x: Num[Array, "*shape"], where: Bool[Array, "*#shape"] | None
) -> Num[Array, "*shape"]:
    """Returns `x` with 0 in place of NaN and infinities where `where` is False; see `counted`.

    For values whose results are returned even though they do not count in a statistic.

    >>> finite_or_counted(jnp.array([jnp.nan, 3.0]), jnp.zeros(2, bool)).tolist()
    [0.0, 3.0]
    """
    if where is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    finite = counted(x, jnp.isfinite(x))
    return jnp.where(where, x, finite)


def explicit_spec(x: Num[Array, "*shape"]) -> tuple[SpecEntry, ...]:
    """Returns the Explicit axes of a mesh over which each axis of `x` is sharded.

    The sharding over such axes is part of the type of an array, and JAX refuses operations whose
    result has none that follows from it.

    >>> explicit_spec(jnp.ones((2, 3)))
    (None, None)
    """
    spec = jax.typeof(x).sharding.spec
    unsharded = [None] * (
        x.ndim - len(spec)
    )  # JAX may leave out entries at the end
    return (*spec, *unsharded)


def num_parts(mesh: jax.sharding.AbstractMesh, entry: SpecEntry) -> int:
    """Returns into how many parts an entry of a layout splits an axis.

    >>> num_parts(jax.sharding.AbstractMesh((2, 3), ("data", "model")), ("data", "model"))
    6
    """
    return math.prod(mesh.shape[name] for name in jax.tree.leaves(entry))


def gathered(x: Num[Array, "*shape"], *axes: int) -> Num[Array, "*shape"]:
    """Returns `x` with whole axes on each device, where Explicit axes of a mesh shard them.

    For operations along an axis that need all of it; JAX refuses them instead of gathering.

    >>> gathered(jnp.ones((2, 3)), -1).shape
    (2, 3)
    """
    spec = list(explicit_spec(x))
    is_sharded = False
    for axis in axes:
        # An axis that `x` lacks is an error of the operation, which says so in its own words.
        if -x.ndim <= axis < x.ndim:
            is_sharded = is_sharded or bool(spec[axis])
            spec[axis] = None
    if not is_sharded:
        return x
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return jax.sharding.reshard(x, sharding)


def sharded_as(
    x: Num[Array, "*shape"], other: Num[Array, "*shape"]
) -> Num[Array, "*shape"]:
    """Returns `x` with the sharding of another array over Explicit axes of a mesh.

    >>> sharded_as(jnp.ones(2), jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    if explicit_spec(x) == explicit_spec(other):
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding)


def reshaped(
    x: Num[Array, "*shape"],
    shape: Sequence[int],
    spec: Sequence[SpecEntry] = (),
) -> Num[Array, "*new_shape"]:
    """Returns `x` in a shape without -1, sharded by `spec` over Explicit axes of a mesh.

    If no such axis shards `x`, `spec` has no effect. Entries of sizes that do not divide evenly
    count as None. JAX derives the sharding of a reshaped array only in simple cases.

    >>> reshaped(jnp.ones((4, 3)), (2, 6), ("data",)).shape
    (2, 6)
    """
    if not any(explicit_spec(x)):
        return x.reshape(shape)
    mesh = jax.typeof(x).sharding.mesh
    entries = []
    for size, entry in zip(shape, spec, strict=False):
        divides_evenly = size % num_parts(mesh, entry) == 0
        entries.append(entry if divides_evenly else None)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return jax.lax.reshape(x, shape, out_sharding=sharding)


def sharded_by_compiler(
    fn: Callable[..., T], *operands: Any, spec: Sequence[SpecEntry]
) -> T:
    """Returns `fn(*operands)`, whose arrays are sharded by `spec` over Explicit axes of a mesh.

    If no such axis shards an array of the operands, `spec` has no effect. Inside, the compiler
    chooses shardings as over Auto axes: for operations whose results have none that JAX derives.

    >>> sharded_by_compiler(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 4)), spec=()).shape
    (2, 4)
    """
    for x in jax.tree.leaves(operands):
        if any(explicit_spec(x)):
            sharding = NamedSharding(
                jax.typeof(x).sharding.mesh, PartitionSpec(*spec)
            )
            on_auto_axes: Any = jax.sharding.auto_axes(
                fn, out_sharding=sharding
            )
            return on_auto_axes(*operands)
    return fn(*operands)


def positions(size: int, ndim: int) -> Num[Array, "*ones size"]:
    """Returns `0, 1, ..., size - 1` along the last of `ndim` axes.

    >>> positions(3, 2).tolist()
    [[0, 1, 2]]
    """
    return to_ndim(jnp.arange(size), ndim)


def platform() -> str:
    """Returns the platform that programs are traced for: "cpu", "gpu" or "tpu".

    It is that of the mesh set by `jax.set_mesh`, whose devices may be absent from this machine;
    without one, JAX's default.

    >>> platform()
    'cpu'
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    return device.platform


def on_one_cpu() -> bool:
    """Returns whether programs run on the CPU, without a mesh of several devices."""
    return jax.sharding.get_abstract_mesh().size <= 1 and platform() == "cpu"


def over_batch_axes(
    fn: Callable[[Array], Array],
    x: Num[Array, "*batch_and_item"],
    item_ndim: int,
) -> Num[Array, "*batch_and_result"]:
    """Calls `fn` with the batch axes of `x` merged into one, and restores them in the result.

    `item_ndim` is the number of axes after the (zero or more) batch axes.

    >>> over_batch_axes(lambda x: x.sum(axis=1), jnp.ones((2, 3, 4, 5)), 2).shape
    (2, 3, 5)
    """
    num_batch_axes = x.ndim - item_ndim
    if num_batch_axes == 1:
        return fn(x)
    batch_shape = x.shape[:num_batch_axes]
    item_shape = x.shape[num_batch_axes:]
    y = fn(x.reshape(math.prod(batch_shape), *item_shape))
    return y.reshape(*batch_shape, *y.shape[1:])


def as_tuple(
    sizes: int | Sequence[int] | np.ndarray | Array,
) -> tuple[int, ...]:
    """Returns sizes or axes as a tuple; a number becomes a tuple of one.

    >>> as_tuple(2), as_tuple(np.arange(2))
    ((2,), (0, 1))
    """
    if isinstance(sizes, np.ndarray | np.generic | Array):
        sizes = sizes.tolist()
    if isinstance(sizes, Iterable):
        return tuple(sizes)
    return (sizes,)


def without_none(**options: Any) -> dict[str, Any]:
    """Returns the arguments that are not None, such as those that a user's function may lack.

    >>> without_none(preferred_element_type=None, out_sharding=1)
    {'out_sharding': 1}
    """
    return {name: value for name, value in options.items() if value is not None}


def check_sizes(layer: str, **sizes: Any) -> None:
    """Raises unless each size is a positive integer, a sequence of these, or None.

    Args:
        **sizes: by the names that users know.

    Raises ArgumentValueError naming the layer and the size.

    >>> check_sizes("Dense", features=3, kernel_size=(2, 2), num_groups=None)
    """
    for name, value in sizes.items():
        if type(value) is int and value > 0:  # fast path of most sizes
            continue
        if isinstance(value, tuple | list):
            is_valid = all(map(_is_size, value))
            expected = "positive integers"
        else:
            is_valid = _is_size(value)
            expected = "a positive integer"
        if not is_valid:
            raise ArgumentValueError(
                f"{layer} was given {name}={value!r}; expected {expected}."
            )


def _is_size(value: Any) -> bool:
    """Returns whether a value may be a size; values of other libraries' types may."""
    if isinstance(value, bool | float | complex | str):
        return False
    if isinstance(value, int | np.integer):
        return bool(value > 0)
    return True


def canonicalize_dtype(
    *args: Any, dtype: DTypeLike | None = None, inexact: bool = True
) -> DType:
    """Returns the dtype of a computation.

    Args:
        *args: arrays or numbers; None is ignored.
        dtype: returned if given; by default the dtype that `args` promote to.
        inexact: whether the dtype must be floating-point or complex; integers alone give float32.

    Raises ArgumentValueError if `dtype` must be inexact but is not, or no dtype can be inferred.

    >>> canonicalize_dtype(jnp.ones(2, jnp.int32)).name
    'float32'
    """
    if dtype is None:
        common = _promoted_dtype([x for x in args if x is not None])
        if inexact and not jnp.issubdtype(common, jnp.inexact):
            return jnp.promote_types(jnp.float32, common)
        return common
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ArgumentValueError(
            f"dtype={jnp.dtype(dtype).name} cannot hold fractions: this computes in a floating-"
            "point or complex dtype. Leave dtype out, or give one such as jnp.float32."
        )
    return dtype


def promote_dtype(
    *args: Any, dtype: DTypeLike | None = None, inexact: bool = True
) -> list[Any]:
    """Returns the arguments as arrays of one dtype; None stays None.

    `dtype` and `inexact` are those of `canonicalize_dtype`.

    Raises:
        ArgumentValueError: see `canonicalize_dtype`.

    >>> x, bias, scale = promote_dtype(jnp.ones(2, jnp.bfloat16), None, 2)
    >>> x.dtype.name, bias, scale.dtype.name
    ('bfloat16', None, 'bfloat16')
    """
    common = _common_dtype(args) if dtype is None else None
    if common is not None and (_is_inexact(common) or not inexact):
        return [*args]  # most often, there is nothing to promote
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    promoted = []
    for x in args:
        if x is not None and not _has_dtype(x, dtype):
            x = jnp.asarray(x, dtype)
        promoted.append(x)
    return promoted


def _aval(x: Any) -> ShapedArray | None:
    """Returns the abstract value of an array, whose attributes are faster than those of a tracer.

    None for other values, such as a variable, which has the attributes of its value.
    """
    return x.aval if hasattr(type(x), "aval") else None


def _has_dtype(x: Any, dtype: DType) -> bool:
    """Returns whether `x` is a JAX array of that dtype, and not weakly typed."""
    aval = _aval(x)
    return aval is not None and not aval.weak_type and aval.dtype == dtype


def _common_dtype(args: Sequence[Any]) -> np.dtype | None:
    """Returns the dtype of JAX arrays that are not weakly typed; None if there is not one."""
    common = None
    for x in args:
        if x is None:
            continue
        aval = _aval(x)
        if aval is None or aval.weak_type:
            return None
        if common is not None and aval.dtype != common:
            return None
        common = aval.dtype
    return common


@functools.lru_cache(maxsize=64)
def _is_inexact(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _promoted_dtype(args: Sequence[Any]) -> np.dtype:
    if not args:
        raise ArgumentValueError(
            "The dtype is unknown: neither a dtype nor an array was given; pass at least one."
        )
    common = _common_dtype(args)
    if common is not None:
        return common  # promotion is slow
    operands = []
    for x in args:
        operands.append(x if hasattr(x, "dtype") else jnp.asarray(x))
    return jnp.result_type(*operands)


def cast_floats(tree: T, dtype: jax.typing.DTypeLike | None) -> T:
    """Casts the floating-point arrays of a tree to a dtype; None leaves all unchanged.

    >>> cast_floats({"x": jnp.ones(2), "n": 3}, "bfloat16")["x"].dtype
    dtype(bfloat16)
    """
    if dtype is None:
        return tree

    def cast(x: T) -> T | jax.Array | np.ndarray:
        if isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(
            x.dtype, jnp.floating
        ):
            return x.astype(dtype)
        return x

    return jax.tree.map(cast, tree)


def stochastic_round(
    x: Float[Array, "*shape"], key: Key[Array, ""]
) -> Float[Array, "*shape"]:
    """Rounds float32 to one of the two nearest bfloat16 numbers, such that the mean is `x`.

    A number that bfloat16 can represent is returned exactly, with its sign also for 0. Infinities
    and NaN are kept, and a finite number never becomes infinite: those beyond the largest bfloat16
    become that. The numbers drawn do not depend on how `x` is sharded.

    Args:
        x: converted to float32.
        key: equal keys round equally.

    >>> x = jnp.full(1000, 1 + 2**-10)  # between 1 and 1 + 2**-7
    >>> rounded = stochastic_round(x, jax.random.key(0))
    >>> sorted(set(rounded.tolist())), round(float(rounded.mean(dtype="float32")), 3)
    ([1.0, 1.0078125], 1.001)
    """
    x = x.astype(jnp.float32)
    # bfloat16 is the upper half of float32. Adding a random lower half to the bits, whose magnitude
    # is ordered as the numbers are, carries into the upper half as often as it should.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + _random_half(
        key, x.shape
    )
    upper_half = (bits >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper_half, jnp.bfloat16)
    # Carrying out of the largest mantissa gives infinity; carrying in that of NaN, other numbers.
    largest = jnp.copysign(jnp.finfo(jnp.bfloat16).max, rounded)
    rounded = jnp.where(jnp.isinf(rounded), largest, rounded)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _random_half(key: Array, shape: tuple[int, ...]) -> Array:
    """Returns 16 random bits for each element, by hashing its index with the key.

    The arithmetic fuses with what uses it, where the generator of JAX would write arrays of twice
    the size of the parameters. The hash is the finalizer of MurmurHash3 (Appleby, 2011), twice.
    """
    first_seed, second_seed = jax.random.bits(key, (2,), jnp.uint32)
    index = jnp.zeros(
        shape, jnp.uint32
    )  # of each element in the flat array, modulo 2**32
    stride = 1
    for axis in reversed(range(len(shape))):
        index_along_axis = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index += index_along_axis * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    hashed = _mixed(index + first_seed)
    hashed = _mixed(hashed ^ second_seed)
    return hashed >> 16


def _mixed(x: Array) -> Array:
    """Returns 32-bit numbers in which each bit depends on all bits of `x`."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
