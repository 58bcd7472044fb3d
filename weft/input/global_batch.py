"""Conversion between the host arrays of each process and global arrays.

Input batches are sharded in four steps:

1. each process gets its part of the data (`Input`, an input dispatcher);
2. it reads host arrays with its rows (`Input.dataset`, `Input.batches`);
3. the rows of all processes become a sharded `jax.Array` (`host_to_global_device_array`);
4. the compiled step extracts the model's batch (`Input.dispatch_global_batch`).
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.errors import BatchShardingError, NoMeshError
from weft.typing import Nested, Tensor


def current_mesh() -> Mesh:
    """Returns the mesh set by `jax.set_mesh`.

    Raises:
        NoMeshError: If no mesh is set.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise NoMeshError(
            "no mesh is set, so a batch cannot be sharded; call it within `with "
            "jax.set_mesh(mesh):` or pass `mesh=`"
        )
    return mesh


def input_partition_spec(mesh: Mesh | None = None) -> PartitionSpec:
    """Shards rows over all axes of the mesh, so that each row is loaded once."""
    return PartitionSpec(tuple((mesh or current_mesh()).axis_names))


def host_to_global_device_array(
    host_arrays: Nested[np.ndarray | Tensor],
    *,
    partition: PartitionSpec | None = None,
    mesh: Mesh | None = None,
) -> Nested[Tensor]:
    """Creates one global array per leaf from the rows of each process.

    Args:
        host_arrays: Arrays with this process's rows of the batch as the first axis. All processes
            have equally many rows; those whose devices hold the same rows must pass equal rows.
        partition: Sharding of the arrays, truncated to the rank of each leaf, so scalars are
            replicated. Defaults to `input_partition_spec`, the rows over all axes.

    Raises:
        BatchShardingError: If an axis does not divide over the mesh, or a leaf is not numeric.
        NoMeshError: If there is no mesh.

    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    >>> rows = len(jax.devices())
    >>> batch = host_to_global_device_array({"ids": np.zeros((2 * rows, 3))}, mesh=mesh)
    >>> batch["ids"].shape[1], batch["ids"].sharding.spec
    (3, P('data', None))
    """
    mesh = mesh or current_mesh()
    partition = input_partition_spec(mesh) if partition is None else partition

    def to_global(path, leaf) -> Tensor:
        local = np.asarray(leaf)
        if local.dtype.kind in "OSU":
            raise BatchShardingError(
                f"input batch: {_name(path)} has dtype {local.dtype}, which devices do not "
                "support; drop it or encode it as numbers before the batch leaves the input"
            )
        entries = tuple(partition)[: local.ndim]
        sharding = NamedSharding(
            mesh, PartitionSpec(*entries, *[None] * (local.ndim - len(entries)))
        )
        shape = _global_shape(_name(path), local.shape, sharding)
        return jax.make_array_from_process_local_data(sharding, local, shape)

    return jax.tree_util.tree_map_with_path(to_global, host_arrays)


def global_to_host_array(global_arrays: Nested[Tensor]) -> Nested[np.ndarray]:
    """Returns this process's part of each global array: inverts `host_to_global_device_array`."""

    def to_host(leaf: Tensor) -> np.ndarray:
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        shards = [(starts_of(s.index), s.data) for s in leaf.addressable_shards]
        # Per axis, the position of each block among this process's blocks.
        starts = [sorted({start[axis] for start, _ in shards}) for axis in range(leaf.ndim)]
        block = shards[0][1].shape
        local = np.empty([len(s) * b for s, b in zip(starts, block, strict=True)], leaf.dtype)
        for start, data in shards:
            first = [starts[a].index(start[a]) * block[a] for a in range(leaf.ndim)]
            local[tuple(slice(f, f + b) for f, b in zip(first, block, strict=True))] = data
        return local

    return jax.tree.map(to_host, global_arrays)


def _global_shape(name: str, local: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """Computes the global shape from this process's shape and its number of blocks per axis."""
    mesh, spec = sharding.mesh, sharding.spec
    num_blocks = [math.prod(mesh.shape[axis] for axis in _axes(entry)) for entry in spec]
    # With one element per block, indices are block numbers.
    indices = sharding.addressable_devices_indices_map(tuple(num_blocks)).values()
    shape = []
    for axis, size in enumerate(local):
        local_blocks = len({starts_of(index)[axis] for index in indices})
        if size % local_blocks:
            axes = ", ".join(f"{a!r} of {mesh.shape[a]}" for a in _axes(spec[axis]))
            total, rest = size * num_blocks[axis] // local_blocks, num_blocks[axis]
            raise BatchShardingError(
                f"input batch: axis {axis} of {name}, of size {total} over "
                f"{jax.process_count()} process(es), does not divide over the {rest} blocks of "
                f"mesh axis {axes}; use a multiple of {rest}, such as "
                f"{-(-total // rest) * rest}, or set the input's partition_spec to fewer mesh "
                "axes"
            )
        shape.append(size // local_blocks * num_blocks[axis])
    return tuple(shape)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def starts_of(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    """Returns the start of a device's part of a global array, per axis."""
    return tuple(part.start or 0 for part in index or ())


def _name(path) -> str:
    return repr(jax.tree_util.keystr(path, simple=True, separator="/"))
