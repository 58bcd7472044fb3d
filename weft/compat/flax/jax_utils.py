"""Helpers for arrays replicated over devices, padded batches and scans over any axes."""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.core.partial_eval import partial_eval_or_shapes
from weft.errors import ArgumentShapeError, ArgumentValueError, warn_deprecated
from weft.typing import ArrayLike, PyTree


def _device_sharding(devices: Sequence[Any], axis_name: str) -> NamedSharding:
    mesh = Mesh(np.array(devices), (axis_name,))
    return NamedSharding(mesh, PartitionSpec(axis_name))


def replicate(
    tree: PyTree,
    devices: Sequence[Any] | None = None,
    axis_name: str = "_device_put_sharded",
) -> PyTree:
    """Returns a copy of each array on each device, as one array with a first axis over them.

    `devices` are by default all of this process, and `axis_name` names the axis of their mesh.

    >>> replicate({"w": jnp.ones(3)}, jax.devices()[:1])["w"].shape
    (1, 3)
    """
    if devices is None:
        devices = jax.local_devices()
    sharding = _device_sharding(devices, axis_name)

    def copies(x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        shards = [jax.device_put(x[None], device) for device in devices]
        shape = (len(devices), *x.shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    return jax.tree.map(copies, tree)


def unreplicate(tree: PyTree) -> PyTree:
    """Returns the copies of the first device, without the device axis.

    >>> unreplicate(replicate({"w": jnp.ones(3)}))["w"].shape
    (3,)
    """

    def first(x: jax.Array) -> jax.Array:
        shards = getattr(x, "addressable_shards", None)
        if shards:
            # Taken from the first device alone, so that no other one holds the result.
            shard = shards[0]
            if shard.data.shape[0] == 1 and shard.index[0].start in (0, None):
                return shard.data[0]
        return x[0]

    return jax.tree.map(first, tree)


def pmean(xs: PyTree, axis_name: str) -> PyTree:
    """Returns the mean of each array of a pytree over a mapped axis; deprecated: `jax.lax.pmean`.

    >>> jax.vmap(lambda x: pmean(x, "i"), axis_name="i")(jnp.arange(3.0)).tolist()
    [1.0, 1.0, 1.0]
    """
    warn_deprecated("jax_utils.pmean", "use jax.lax.pmean")
    return lax.pmean(xs, axis_name)


def partial_eval_by_shape(
    fn: Callable[..., PyTree],
    input_spec: Iterable[Any],
    *args: object,
    **kwargs: object,
) -> PyTree:
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
    return partial_eval_or_shapes(
        lambda *inputs: fn(*inputs, *args, **kwargs), *inputs
    )


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
    iterator: Iterable[PyTree],
    size: int,
    devices: Sequence[Any] | None = None,
    axis_name: str = "_device_put_sharded",
) -> Iterator[PyTree]:
    """Copies an iterator's elements to the devices ahead of time.

    Args:
        iterator: yields pytrees of arrays `(devices, ...)`.
        size: number of elements in flight; 2 lets copying and computing overlap.
        devices: by default all of this process.
        axis_name: of the mesh of the devices.

    Raises:
        ArgumentValueError: if `size` is less than 1.
        ArgumentShapeError: if a first axis does not match the devices.

    >>> batches = [np.ones((jax.local_device_count(), 4)) for _ in range(3)]
    >>> len(list(prefetch_to_device(batches, 2)))
    3
    """
    if size < 1:
        raise ArgumentValueError(
            f"size={size}: nothing would ever be copied; give 1 or more."
        )
    if devices is None:
        devices = jax.local_devices()
    sharding = _device_sharding(devices, axis_name)

    def copied(
        path: jax.tree_util.KeyPath, x: jax.Array | np.ndarray
    ) -> jax.Array:
        if not np.ndim(x) or x.shape[0] % sharding.mesh.size:
            raise ArgumentShapeError(
                f"the array at {jax.tree_util.keystr(path) or 'the root'} has shape "
                f"{np.shape(x)}; its first axis must be that of the {sharding.mesh.size} devices: "
                "see weft.training.common_utils.shard."
            )
        return jax.device_put(x, sharding)

    # The checks above run at the call, before the first element is asked for.
    def copied_ahead() -> Iterator[PyTree]:
        in_flight: deque[PyTree] = deque()
        for tree in iterator:
            in_flight.append(jax.tree_util.tree_map_with_path(copied, tree))
            if len(in_flight) == size:
                yield in_flight.popleft()
        yield from in_flight

    return copied_ahead()


def scan_in_dim(
    body_fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    axis: int | Sequence[int] = (0,),
    unroll: int | Sequence[int] = (1,),
    keepdims: bool = False,
) -> tuple[PyTree, PyTree]:
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
    if len(unroll) > len(axis) and any(n != 1 for n in unroll):
        raise ArgumentValueError(
            f"unroll={unroll} is longer than axis={axis}: give one number for each axis."
        )
    unroll = (*[1] * (len(axis) - len(unroll)), *unroll)[: len(axis)]
    front = tuple(range(len(axis)))

    def to_front(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(_check_axes(x, axis), axis, front)

    def from_front(y: jax.Array) -> jax.Array:
        return jnp.moveaxis(_check_axes(y, axis), front, axis)

    def body(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        if not keepdims:
            return body_fn(carry, x)
        x = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, axis), x)
        carry, y = body_fn(carry, x)
        return carry, jax.tree.map(
            lambda leaf: jnp.squeeze(_check_axes(leaf, axis), axis), y
        )

    # Inside out: the loop over an axis is the body of the loop over the axis before it.
    loop: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = body
    for axis_unroll in reversed(unroll):
        loop = functools.partial(lax.scan, loop, unroll=axis_unroll)
    carry, ys = loop(init, jax.tree.map(to_front, xs))
    return carry, jax.tree.map(from_front, ys)


def _check_axes(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    ndim = jnp.ndim(x)
    if not all(-ndim <= a < ndim for a in axis):
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
    def padded(
        *args: Any, min_device_batch: int | None = None, **kwargs: Any
    ) -> Any:
        batches = {i: x for i, x in enumerate(args) if i not in static_argnums}
        named_batches = {
            name: x for name, x in kwargs.items() if name not in static_argnames
        }
        batch = _batch_size(batches, named_batches)
        num_devices = jax.local_device_count()
        device_batch = max(
            math.ceil(batch / num_devices), min_device_batch or 0
        )

        def pad(x: ArrayLike) -> np.ndarray:
            x = np.asarray(x)
            padded_x = np.zeros(
                (num_devices * device_batch, *x.shape[1:]), x.dtype
            )
            padded_x[:batch] = x
            return padded_x.reshape(num_devices, device_batch, *x.shape[1:])

        def unpad(x: jax.Array) -> np.ndarray:
            values = jax.device_get(x)
            return values.reshape(-1, *values.shape[2:])[:batch]

        batches, named_batches = jax.tree.map(pad, (batches, named_batches))
        all_args = [batches.get(i, x) for i, x in enumerate(args)]
        result = wrapped(*all_args, **{**kwargs, **named_batches})
        if static_return:
            return result
        return jax.tree.map(unpad, result)

    return padded


def _batch_size(
    batches: Mapping[int, PyTree], named_batches: Mapping[str, PyTree]
) -> int:
    sizes: dict[str, int | str] = {}
    for group in (batches, named_batches):
        for path, x in jax.tree_util.tree_leaves_with_path(group):
            shape = np.shape(x)
            sizes[jax.tree_util.keystr(path)] = shape[0] if shape else "no axis"
    distinct_sizes = set(sizes.values())
    if len(distinct_sizes) == 1:
        (size,) = distinct_sizes
        if isinstance(size, int):
            return size
    raise ArgumentShapeError(
        f"the sizes of the batches are {sizes}; expected at least one and all equal: arguments "
        "that are not batches belong in static_argnums and static_argnames."
    )
