"""Conversion between the host arrays of each process and global arrays.

Input batches are sharded in four steps:

1. each process gets its part of the data (`Input`, an input dispatcher);
2. it reads host arrays with its rows (`Input.dataset`, `Input.batches`);
3. the rows of all processes become a sharded `jax.Array` (`host_to_global_device_array`);
4. the compiled step extracts the model's batch (`Input.dispatch_global_batch`).

Input dispatchers assign rows of a global batch to processes. A *feed* is the contribution of one
process. The *logical* batch is the model's batch, read by the logical feeds. The *physical* batch
enters the compiled step: each process must contribute equally many rows, some of them padding.

    4 processes, global logical batch of 2, logical feeds 0 and 1

    process        0      1      2      3
    reads          a      b      -      -        feed_logical_batch_size 1
    brings         a      b      0      0        logical_to_physical_batch
    the step sees  a b                           physical_to_logical_batch
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from weft.config import REQUIRED, Required
from weft.core.spmd import Entry, axes_of, get_concrete_mesh
from weft.errors import BatchShardingError, InputDispatchError, NoMeshError
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.parameter_spec import pad_axes
from weft.typing import Nested, Tensor


def current_mesh() -> Mesh:
    """Returns the mesh set by `jax.set_mesh`, else that of `with mesh:`.

    Raises NoMeshError if no mesh is set.
    """
    mesh = get_concrete_mesh()
    if mesh is None:
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
    partition_entries = tuple(
        input_partition_spec(mesh) if partition is None else partition
    )

    def to_global(
        path: jax.tree_util.KeyPath, leaf: jax.typing.ArrayLike
    ) -> Tensor:
        local = np.asarray(leaf)
        if local.dtype.kind in "OSU":
            raise BatchShardingError(
                f"input batch: {_leaf_name(path)} has dtype {local.dtype}, which devices do not "
                "support; drop it or encode it as numbers before the batch leaves the input"
            )
        entries = pad_axes(partition_entries[: local.ndim], local.ndim)
        sharding = NamedSharding(mesh, PartitionSpec(*entries))
        shape = _global_shape(_leaf_name(path), local.shape, sharding)
        return jax.make_array_from_process_local_data(sharding, local, shape)

    return jax.tree_util.tree_map_with_path(to_global, host_arrays)


def global_to_host_array(global_arrays: Nested[Tensor]) -> Nested[np.ndarray]:
    """Returns this process's part of each global array: inverts `host_to_global_device_array`."""

    def to_host(leaf: Tensor) -> np.ndarray:
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        shards = leaf.addressable_shards
        block_shape = shards[0].data.shape
        starts_by_axis = []  # of this process's blocks, in order
        local_shape = []
        for axis, block_size in enumerate(block_shape):
            starts = sorted(
                {shard_start(shard.index)[axis] for shard in shards}
            )
            starts_by_axis.append(starts)
            local_shape.append(len(starts) * block_size)
        local = np.empty(local_shape, leaf.dtype)
        for shard in shards:
            local_index = []
            for axis, start in enumerate(shard_start(shard.index)):
                local_start = (
                    starts_by_axis[axis].index(start) * block_shape[axis]
                )
                local_index.append(
                    slice(local_start, local_start + block_shape[axis])
                )
            local[tuple(local_index)] = shard.data
        return local

    return jax.tree.map(to_host, global_arrays)


def _global_shape(
    name: str, local: tuple[int, ...], sharding: NamedSharding
) -> tuple[int, ...]:
    """Computes the global shape from this process's shape and its number of blocks per axis."""
    mesh, spec = sharding.mesh, sharding.spec
    num_blocks_by_axis = [_num_blocks(mesh, entry) for entry in spec]
    # With one element per block, indices are block numbers.
    indices = sharding.addressable_devices_indices_map(
        tuple(num_blocks_by_axis)
    ).values()
    shape = []
    for axis, size in enumerate(local):
        num_blocks = num_blocks_by_axis[axis]
        num_local_blocks = len({shard_start(index)[axis] for index in indices})
        if size % num_local_blocks:
            mesh_axes = ", ".join(
                f"{a!r} of {mesh.shape[a]}" for a in axes_of(spec[axis])
            )
            total = size * num_blocks // num_local_blocks
            raise BatchShardingError(
                f"input batch: axis {axis} of {name}, of size {total} over "
                f"{jax.process_count()} process(es), does not divide over the {num_blocks} blocks "
                f"of mesh axis {mesh_axes}; use a multiple of {num_blocks}, such as "
                f"{_next_multiple(total, num_blocks)}, or set the input's partition_spec to fewer "
                "mesh axes"
            )
        shape.append(size // num_local_blocks * num_blocks)
    return tuple(shape)


def _num_blocks(mesh: Mesh | AbstractMesh, entry: Entry) -> int:
    """Returns into how many blocks an entry of a partition divides an axis."""
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))


def _next_multiple(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def shard_start(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    """Returns the start of a device's part of a global array, per axis."""
    return tuple(part.start or 0 for part in index or ())


def _leaf_name(path: jax.tree_util.KeyPath) -> str:
    return repr(jax.tree_util.keystr(path, simple=True, separator="/"))


# The logical row of each physical row, -1 for padding. It is part of the batch, because the rows of
# a global array are ordered by the mesh's devices, which may differ from the order of processes.
LOGICAL_ROW_KEY = "_logical_row"
_UNNAMED = "_batch"
"""Name of a batch that is not a dict, in one with its logical rows."""


class BaseInputDispatcher(Module):
    """Interface of the dispatcher of an `Input`."""

    class Config(Module.Config):
        global_logical_batch_size: Required[int] = REQUIRED

    @property
    def num_logical_feeds(self) -> int:
        """Number of parts of the data."""
        raise NotImplementedError(type(self))

    @property
    def logical_feed_index(self) -> int | None:
        """Index of the part that this process reads; None for padding only."""
        raise NotImplementedError(type(self))

    @property
    def feed_logical_batch_size(self) -> int:
        """Rows per batch of a logical feed."""
        return self.config.global_logical_batch_size // self.num_logical_feeds

    @property
    def partition_spec(self) -> PartitionSpec:
        """Sharding of the global physical batch."""
        raise NotImplementedError(type(self))

    @nowrap
    def feed_read_config(self) -> dict[str, int]:
        """Returns `num_shards` and `shard_index` of this process; padding feeds read part 0."""
        return {
            "num_shards": self.num_logical_feeds,
            "shard_index": self.logical_feed_index or 0,
        }

    @nowrap
    def logical_to_physical_batch(
        self, logical_feed_batch: Nested[np.ndarray]
    ) -> Nested[np.ndarray]:
        """Returns this process's part of the global batch.

        Args:
            logical_feed_batch: The batch it read, `feed_logical_batch_size` rows in each leaf.
        """
        return logical_feed_batch

    @nowrap
    def logical_to_physical_shapes(
        self, logical_feed_shapes: Nested[jax.ShapeDtypeStruct]
    ) -> Nested[jax.ShapeDtypeStruct]:
        """Returns the shapes of `logical_to_physical_batch`."""
        zeros = jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype), logical_feed_shapes
        )
        batch = self.logical_to_physical_batch(zeros)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch
        )

    @nowrap
    def physical_to_logical_batch(
        self, global_physical_batch: Nested[Tensor]
    ) -> Nested[Tensor]:
        """Returns the model's batch, inside the compiled step."""
        return global_physical_batch


class InputDispatcher(BaseInputDispatcher):
    """Dispatcher where some processes read, and all contribute equally many rows."""

    class Config(BaseInputDispatcher.Config):
        """Configures an InputDispatcher."""

        global_physical_batch_size: int | None = None
        """Rows of the physical batch. Defaults to the smallest size that gives each process a
        multiple of its devices."""
        num_physical_feeds: int | None = None
        """Defaults to the number of processes."""
        physical_feed_index: int | None = None
        """Defaults to the index of this process."""
        logical_feed_indices: Sequence[int] | None = None
        """Physical feeds that read; by default the first ones, as many as divide the rows."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        """Completes the config and validates its sizes and indices.

        Raises InputDispatchError if they contradict each other.
        """
        complete: Any = cfg.clone()
        rows = complete.global_logical_batch_size
        if complete.num_physical_feeds is None:
            complete.num_physical_feeds = jax.process_count()
        if complete.physical_feed_index is None:
            complete.physical_feed_index = jax.process_index()
        feeds = complete.num_physical_feeds
        if complete.logical_feed_indices is None:
            complete.logical_feed_indices = list(
                range(_num_readers(rows, feeds))
            )
        if complete.global_physical_batch_size is None:
            devices_per_feed = max(jax.device_count() // feeds, 1)
            rows_per_feed = -(
                -rows // max(len(complete.logical_feed_indices), 1)
            )
            rows_per_feed = _next_multiple(rows_per_feed, devices_per_feed)
            complete.global_physical_batch_size = rows_per_feed * feeds
        super().__init__(complete, parent=parent)
        config_error = self._config_error()
        if config_error is not None:
            raise InputDispatchError(f"{self.path()}: {config_error}")

    def _config_error(self) -> str | None:
        """Returns a description of the first contradiction, or None."""
        cfg = self.config
        indices = list(cfg.logical_feed_indices)
        feeds = cfg.num_physical_feeds
        logical, physical = (
            cfg.global_logical_batch_size,
            cfg.global_physical_batch_size,
        )
        if not 0 <= cfg.physical_feed_index < feeds:
            return (
                f"physical_feed_index={cfg.physical_feed_index} is not one of the "
                f"num_physical_feeds={feeds} feeds; expected 0 to {feeds - 1}"
            )
        distinct = set(indices)
        if (
            not indices
            or len(distinct) != len(indices)
            or not distinct <= set(range(feeds))
        ):
            return (
                f"logical_feed_indices={indices} must be at least one, and distinct, of the "
                f"num_physical_feeds={feeds} feeds; choose from 0 to {feeds - 1}"
            )
        if logical % len(indices):
            return (
                f"global_logical_batch_size={logical} does not divide over {len(indices)} "
                "logical feeds; use a multiple, such as "
                f"{_next_multiple(logical, len(indices))}"
            )
        if physical % feeds:
            return (
                f"global_physical_batch_size={physical} does not divide over {feeds} physical "
                f"feeds; use a multiple, such as {_next_multiple(physical, feeds)}"
            )
        if self.feed_physical_batch_size < self.feed_logical_batch_size:
            return (
                f"a physical feed of {self.feed_physical_batch_size} rows cannot hold a "
                f"logical one of {self.feed_logical_batch_size}; increase "
                f"global_physical_batch_size to at least {self.feed_logical_batch_size * feeds}"
            )
        return None

    @property
    def num_logical_feeds(self) -> int:
        return len(self.config.logical_feed_indices)

    @property
    def logical_feed_index(self) -> int | None:
        indices = list(self.config.logical_feed_indices)
        physical_index = self.config.physical_feed_index
        if physical_index not in indices:
            return None
        return indices.index(physical_index)

    @property
    def feed_physical_batch_size(self) -> int:
        """Rows per batch of each process."""
        return (
            self.config.global_physical_batch_size
            // self.config.num_physical_feeds
        )

    @property
    def partition_spec(self) -> PartitionSpec:
        return input_partition_spec()

    @property
    def _is_identity(self) -> bool:
        cfg = self.config
        return (
            self.num_logical_feeds == cfg.num_physical_feeds
            and cfg.global_physical_batch_size == cfg.global_logical_batch_size
        )

    @nowrap
    def logical_to_physical_batch(
        self, logical_feed_batch: Nested[np.ndarray]
    ) -> Nested[np.ndarray]:
        if not isinstance(logical_feed_batch, Mapping):
            logical_feed_batch = {_UNNAMED: logical_feed_batch}
        size = self.feed_logical_batch_size
        index = self.logical_feed_index

        def pad(path: jax.tree_util.KeyPath, leaf: np.ndarray) -> np.ndarray:
            leaf = np.asarray(leaf)
            if leaf.ndim == 0 or len(leaf) != size:
                raise InputDispatchError(
                    f"{self.path()}: {_leaf_name(path)} has shape {leaf.shape}, but a feed of a "
                    f"global batch of {self.config.global_logical_batch_size} over "
                    f"{self.num_logical_feeds} feeds has {size} rows; batch the dataset by {size}"
                )
            padded = np.zeros(
                (self.feed_physical_batch_size, *leaf.shape[1:]), leaf.dtype
            )
            if index is not None:
                padded[:size] = leaf
            return padded

        physical = jax.tree_util.tree_map_with_path(
            pad, dict(logical_feed_batch)
        )
        if not self._is_identity:
            logical_rows = np.full(self.feed_physical_batch_size, -1, np.int32)
            if index is not None:
                logical_rows[:size] = index * size + np.arange(size)
            physical[LOGICAL_ROW_KEY] = logical_rows
        return _without_name(physical)

    @nowrap
    def physical_to_logical_batch(
        self, global_physical_batch: Nested[Tensor]
    ) -> Nested[Tensor]:
        if self._is_identity:
            return global_physical_batch
        batch: dict[str, Any] = dict(global_physical_batch)  # pyright: ignore[reportArgumentType]
        row_of_physical = batch.pop(LOGICAL_ROW_KEY)  # (physical rows,)
        rows = jnp.arange(self.config.global_logical_batch_size)
        physical_of_row = jnp.argmax(
            row_of_physical[None, :] == rows[:, None], axis=1
        )
        logical = jax.tree.map(
            lambda x: jnp.take(x, physical_of_row, axis=0), batch
        )
        return _without_name(logical)


def _num_readers(rows: int, feeds: int) -> int:
    """Returns the largest number of feeds that can read equally many rows.

    >>> _num_readers(8, 3), _num_readers(12, 3), _num_readers(7, 4)
    (2, 3, 1)
    """
    return max(n for n in range(1, feeds + 1) if rows % n == 0)


def _without_name(batch: dict[str, Any]) -> Any:
    """Returns the batch; one that is not a dict without its name."""
    if batch.keys() == {_UNNAMED}:
        return batch[_UNNAMED]
    return batch


class SpmdInputDispatcher(BaseInputDispatcher):
    """Dispatcher where each process reads the rows of its devices.

    Processes whose devices hold the same rows read the same rows, so a global batch may be smaller
    than the number of processes, for example if a model is sharded over several of them. Needs a
    mesh set by `jax.set_mesh`.
    """

    class Config(BaseInputDispatcher.Config):
        """Configures a SpmdInputDispatcher."""

        partition_spec: Required[PartitionSpec] = REQUIRED
        """Sharding of the global batch; the first entry is for the rows."""

    @property
    def partition_spec(self) -> PartitionSpec:
        return self.config.partition_spec

    @property
    def num_logical_feeds(self) -> int:
        return len(set(self._blocks_of_processes().values()))

    @property
    def logical_feed_index(self) -> int:
        feeds = self._blocks_of_processes()
        return sorted(set(feeds.values())).index(feeds[jax.process_index()])

    def _blocks_of_processes(self) -> dict[int, tuple[int, ...]]:
        mesh = current_mesh()
        spec = self.config.partition_spec
        row_entry = spec[0] if len(spec) else None
        num_blocks = _num_blocks(mesh, row_entry)
        size = self.config.global_logical_batch_size
        if size % num_blocks:
            raise InputDispatchError(
                f"{self.path()}: global_logical_batch_size={size} does not divide over the "
                f"{num_blocks} blocks of rows that {spec} creates on mesh {dict(mesh.shape)}; "
                f"use a multiple, such as {_next_multiple(size, num_blocks)}"
            )
        sharding = NamedSharding(mesh, PartitionSpec(row_entry))
        block_of_device = {}
        for device, index in sharding.devices_indices_map(
            (num_blocks,)
        ).items():
            block_of_device[device] = (
                device.process_index,
                shard_start(index)[0],
            )
        return blocks_by_process(block_of_device, self.path())


def blocks_by_process(
    block_of_device: Mapping[Any, tuple[int, int]], path: str
) -> dict[int, tuple[int, ...]]:
    """Groups the blocks of rows of all devices by process.

    Args:
        block_of_device: the process and the block of each device.

    Raises InputDispatchError if two processes share some of their blocks but not all.
    """
    block_sets: dict[int, set[int]] = {}
    for process, block in block_of_device.values():
        block_sets.setdefault(process, set()).add(block)
    feeds = {
        process: tuple(sorted(block_sets[process]))
        for process in sorted(block_sets)
    }
    for process, blocks in feeds.items():
        for other_process, other_blocks in feeds.items():
            if blocks == other_blocks:
                continue
            is_disjoint = set(blocks).isdisjoint(other_blocks)
            if not is_disjoint or len(blocks) != len(other_blocks):
                raise InputDispatchError(
                    f"{path}: process {process} holds the blocks of rows {blocks} and process "
                    f"{other_process} {other_blocks}; they must hold equally many, either the "
                    "same or disjoint ones: assign whole processes to the mesh axes of the batch"
                )
    return feeds
