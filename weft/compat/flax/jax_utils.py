"""Helpers for arrays replicated over devices, padded batches and scans over any axes."""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.core.partial_eval import partial_eval_or_shapes
from weft.errors import ArgumentShapeError, ArgumentValueError, warn_deprecated

_AXIS = "_device_put_sharded"  # what users of Flax find in the shardings


def _device_sharding(devices: Sequence[Any], axis_name: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (axis_name,)), PartitionSpec(axis_name))


def replicate(tree: object, devices: Sequence[Any] | None = None, axis_name: str = _AXIS) -> Any:
    """Returns a copy of each array on each device, as one array with a first axis over them.

    `devices` are by default all of this process.

    >>> replicate({"w": jnp.ones(3)}, jax.devices()[:1])["w"].shape
    (1, 3)
    """
    devices = jax.local_devices() if devices is None else devices
    sharding = _device_sharding(devices, axis_name)
    n = len(devices)

    def copies(x: object) -> jax.Array:
        x = jnp.asarray(x)[None]
        on_each = [jax.device_put(x, device) for device in devices]
        return jax.make_array_from_single_device_arrays((n, *x.shape[1:]), sharding, on_each)

    return jax.tree.map(copies, tree)


def unreplicate(tree: object) -> Any:
    """Returns the copies of the first device, without the device axis.

    >>> unreplicate(replicate({"w": jnp.ones(3)}))["w"].shape
    (3,)
    """

    def first(x: Any) -> Any:
        shards = getattr(x, "addressable_shards", None)
        # Taken from the first device alone, so that no other one holds the result.
        if shards and shards[0].data.shape[0] == 1 and shards[0].index[0].start in (0, None):
            return shards[0].data[0]
        return x[0]

    return jax.tree.map(first, tree)


def pmean(xs: object, axis_name: str) -> Any:
    """Returns the mean of each array of a pytree over a mapped axis; deprecated: `jax.lax.pmean`.

    >>> jax.vmap(lambda x: pmean(x, "i"), axis_name="i")(jnp.arange(3.0)).tolist()
    [1.0, 1.0, 1.0]
    """
    warn_deprecated("jax_utils.pmean", "use jax.lax.pmean")
    return lax.pmean(xs, axis_name)


def partial_eval_by_shape(
    fn: Callable[..., Any], input_spec: Iterable[Any], *args: object, **kwargs: object
) -> Any:
    """Returns the results of a function that do not depend on its inputs, and the others' shapes.

    Args:
        fn: called as `fn(*inputs, *args, **kwargs)`.
        input_spec: for each input its shape, `(shape, dtype)` or `jax.ShapeDtypeStruct`; the dtype
            is float32 by default.

    Raises ArgumentValueError if a spec has another form.

    >>> partial_eval_by_shape(lambda x: (x, jnp.ones(x.shape[1:])), [((4, 2), "int32")])
    (ShapeDtypeStruct(shape=(4, 2), dtype=int32), Array([1., 1.], dtype=float32))
    """
    inputs = [_shape_struct(spec) for spec in input_spec]
    # The trace closes over the other arguments, which may be anything.
    return partial_eval_or_shapes(lambda *inputs: fn(*inputs, *args, **kwargs), *inputs)


def _shape_struct(spec: Any) -> jax.ShapeDtypeStruct:
    if hasattr(spec, "shape") and hasattr(spec, "dtype"):
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    if isinstance(spec, tuple | list):
        if len(spec) == 2 and isinstance(spec[0], tuple | list):
            return jax.ShapeDtypeStruct(tuple(spec[0]), spec[1])
        if all(isinstance(n, int) for n in spec):
            return jax.ShapeDtypeStruct(tuple(spec), jnp.float32)
    raise ArgumentValueError(
        f"input_spec has {spec!r}; expected a shape as (2, 3), or a shape and a dtype as "
        "((2, 3), jnp.float32)."
    )


def prefetch_to_device(
    iterator: Iterable[Any], size: int, devices: Sequence[Any] | None = None, axis_name: str = _AXIS
) -> Iterator[Any]:
    """Copies an iterator's elements to the devices ahead of time.

    Args:
        iterator: yields pytrees of arrays `(devices, ...)`.
        size: number of elements in flight; 2 lets copying and computing overlap.
        devices: by default all of this process.

    Raises:
        ArgumentValueError: if `size` is less than 1.
        ArgumentShapeError: if a first axis does not match the devices.

    >>> batches = [np.ones((jax.local_device_count(), 4)) for _ in range(3)]
    >>> len(list(prefetch_to_device(batches, 2)))
    3
    """
    if size < 1:
        raise ArgumentValueError(f"size={size}: nothing would ever be copied; give 1 or more.")
    sharding = _device_sharding(jax.local_devices() if devices is None else devices, axis_name)

    def copied(path: jax.tree_util.KeyPath, x: jax.Array | np.ndarray) -> jax.Array:
        if not np.ndim(x) or x.shape[0] % sharding.mesh.size:
            raise ArgumentShapeError(
                f"the array at {jax.tree_util.keystr(path) or 'the root'} has shape "
                f"{np.shape(x)}; its first axis must be that of the {sharding.mesh.size} devices: "
                "see weft.training.common_utils.shard."
            )
        return jax.device_put(x, sharding)

    def ahead() -> Iterator[Any]:
        waiting = deque()
        for tree in iterator:
            waiting.append(jax.tree_util.tree_map_with_path(copied, tree))
            if len(waiting) == size:
                yield waiting.popleft()
        yield from waiting

    return ahead()


def scan_in_dim(
    body_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: object,
    xs: object,
    axis: int | Sequence[int] = (0,),
    unroll: int | Sequence[int] = (1,),
    keepdims: bool = False,
) -> tuple[Any, Any]:
    """Scans over any axes like `jax.lax.scan`, the last axis fastest.

    Args:
        body_fn: `(carry, x) -> (carry, y)`.
        axis: the axes, which the arrays of `y` get at the same places.
        unroll: number of iterations to unroll per axis; padded with 1 on the left.
        keepdims: whether `body_fn` takes and returns arrays with these axes, of size 1.

    Raises:
        ArgumentValueError: if `unroll` is longer than `axis`.
        ArgumentShapeError: if an array lacks such an axis.

    >>> x = jnp.arange(6.0).reshape(2, 3)
    >>> _, y = scan_in_dim(lambda c, x: (c + x, c + x), jnp.zeros(2), x, axis=1)
    >>> y.tolist()
    [[0.0, 1.0, 3.0], [3.0, 7.0, 12.0]]
    """
    axis = (axis,) if isinstance(axis, int) else tuple(axis)
    unroll = (unroll,) if isinstance(unroll, int) else tuple(unroll)
    front = tuple(range(len(axis)))
    if len(unroll) > len(axis) and any(n != 1 for n in unroll):
        raise ArgumentValueError(
            f"unroll={unroll} is longer than axis={axis}: give one number for each axis."
        )
    unroll = (*[1] * (len(axis) - len(unroll)), *unroll)[: len(axis)]

    def to_front(x: object) -> Any:
        return jnp.moveaxis(_check_axes(x, axis), axis, front)

    def back(y: object) -> Any:
        return jnp.moveaxis(_check_axes(y, axis), front, axis)

    def body(carry: object, x: object) -> tuple[Any, Any]:
        if not keepdims:
            return body_fn(carry, x)
        carry, y = body_fn(carry, jax.tree.map(lambda x: jnp.expand_dims(x, axis), x))
        return carry, jax.tree.map(lambda y: jnp.squeeze(_check_axes(y, axis), axis), y)

    carry, ys = _nested_scan(body, init, jax.tree.map(to_front, xs), unroll)
    return carry, jax.tree.map(back, ys)


def _nested_scan(
    body: Callable[..., Any], carry: object, xs: object, unroll: tuple[int, ...]
) -> Any:
    if not unroll:
        return body(carry, xs)
    return lax.scan(lambda c, x: _nested_scan(body, c, x, unroll[1:]), carry, xs, unroll=unroll[0])


def _check_axes(x: Any, axis: tuple[int, ...]) -> Any:
    if not all(-jnp.ndim(x) <= a < jnp.ndim(x) for a in axis):
        raise ArgumentShapeError(
            f"axis={axis} of an array of shape {jnp.shape(x)}: expected axes that each array of xs "
            "has, and each result with them."
        )
    return x


def pad_shard_unpad(
    wrapped: Callable[..., Any],
    static_argnums: Sequence[int] = (0,),
    static_argnames: Sequence[str] = (),
    static_return: bool = False,
) -> Callable[..., Any]:
    """Lets a function over devices take batches of any size, such as the last one of an epoch.

    Batches are padded with zeros and sharded as `(devices, batch, ...)`; results return to the host
    in the original layout, without padding. The returned function also takes `min_device_batch`,
    the smallest batch per device, so that short batches need not recompile.

    Args:
        wrapped: the function, usually a `jax.pmap`.
        static_argnums: arguments that are not batches, by default the first: the parameters.
        static_argnames: the same by name.
        static_return: whether the result is not a batch either, such as metrics.

    Raises ArgumentShapeError when called, if batch sizes differ, or an array has no batch axis.

    >>> predict = pad_shard_unpad(jax.pmap(lambda w, x: w * x, in_axes=(None, 0)))
    >>> predict(2.0, np.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    """

    @functools.wraps(wrapped)
    def padded(*args: Any, min_device_batch: int | None = None, **kwargs: Any) -> Any:
        batched = {i: x for i, x in enumerate(args) if i not in static_argnums}
        named = {name: x for name, x in kwargs.items() if name not in static_argnames}
        batch = _batch_size((batched, named))
        devices = jax.local_device_count()
        per_device = max(math.ceil(batch / devices), min_device_batch or 0)

        def pad(x: object) -> np.ndarray:
            x = np.asarray(x)
            filled = np.zeros((devices * per_device, *x.shape[1:]), x.dtype)
            filled[:batch] = x
            return filled.reshape(devices, per_device, *x.shape[1:])

        def unpad(x: Any) -> np.ndarray:
            x = jax.device_get(x)
            return x.reshape(-1, *x.shape[2:])[:batch]

        batched, named = jax.tree.map(pad, (batched, named))
        result = wrapped(*[batched.get(i, x) for i, x in enumerate(args)], **{**kwargs, **named})
        return result if static_return else jax.tree.map(unpad, result)

    return padded


def _batch_size(arguments: object) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    sizes = {
        # Without the number of the two groups: "[1]['x']" is key x of the second argument.
        jax.tree_util.keystr(path[1:]): np.shape(x)[:1] for path, x in leaves
    }  # fmt: skip
    if len(set(sizes.values())) != 1 or () in sizes.values():
        shown = {path: size[0] if size else "no axis" for path, size in sizes.items()}
        raise ArgumentShapeError(
            f"the sizes of the batches are {shown}; expected at least one and all equal: arguments "
            "that are not batches belong in static_argnums and static_argnames."
        )
    return next(iter(sizes.values()))[0]
