"""Input dispatchers, which assign rows of a global batch to processes.

A *feed* is the contribution of one process. The *logical* batch is the model's batch, read by the
logical feeds. The *physical* batch enters the compiled step, where each process must contribute
equally many rows; it may be larger, with padding rows.

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
from jax.sharding import NamedSharding, PartitionSpec

from weft.config import REQUIRED, Required, config_class
from weft.errors import InputDispatchError
from weft.hierarchy.module import Module, nowrap
from weft.input.global_batch import current_mesh, input_partition_spec, starts_of
from weft.typing import Nested, Tensor

# The logical row of each physical row, -1 for padding. It is part of the batch, because the rows of
# a global array are ordered by the mesh's devices, which may differ from the order of processes.
LOGICAL_ROW_KEY = "_logical_row"


class BaseInputDispatcher(Module):
    """Interface of the dispatcher of an `Input`."""

    @config_class
    class Config(Module.Config):
        """Configures a BaseInputDispatcher."""

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
        return {"num_shards": self.num_logical_feeds, "shard_index": self.logical_feed_index or 0}

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
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), logical_feed_shapes)

    @nowrap
    def physical_to_logical_batch(self, global_physical_batch: Nested[Tensor]) -> Nested[Tensor]:
        """Returns the model's batch, inside the compiled step."""
        return global_physical_batch


class InputDispatcher(BaseInputDispatcher):
    """Dispatcher where some processes read, and all contribute equally many rows."""

    @config_class
    class Config(BaseInputDispatcher.Config):
        """Configures an InputDispatcher.

        Attributes:
            global_physical_batch_size: Rows of the physical batch. Defaults to the smallest size
                that gives each process a multiple of its devices.
            num_physical_feeds: Defaults to the number of processes.
            physical_feed_index: Defaults to the index of this process.
            logical_feed_indices: Physical feeds that read. Defaults to all, or to as many as there
                are rows.
        """

        global_physical_batch_size: int | None = None
        num_physical_feeds: int | None = None
        physical_feed_index: int | None = None
        logical_feed_indices: Sequence[int] | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        """Completes the config and validates its sizes and indices.

        Raises:
            InputDispatchError: If they contradict each other.
        """
        complete: Any = cfg.clone()
        rows = complete.global_logical_batch_size
        if complete.num_physical_feeds is None:
            complete.num_physical_feeds = jax.process_count()
        if complete.physical_feed_index is None:
            complete.physical_feed_index = jax.process_index()
        feeds = complete.num_physical_feeds
        if complete.logical_feed_indices is None:
            complete.logical_feed_indices = list(range(min(rows, feeds)))
        if complete.global_physical_batch_size is None:
            devices_per_feed = max(jax.device_count() // feeds, 1)
            per_feed = -(-rows // max(len(complete.logical_feed_indices), 1))
            per_feed = -(-per_feed // devices_per_feed) * devices_per_feed
            complete.global_physical_batch_size = per_feed * feeds
        super().__init__(complete, parent=parent)
        wrong = self._misfit()
        if wrong:
            raise InputDispatchError(f"{self.path()}: {wrong}")

    def _misfit(self) -> str | None:
        """Returns a description of the first contradiction, or None."""
        cfg = self.config
        indices, feeds = list(cfg.logical_feed_indices), cfg.num_physical_feeds
        logical, physical = cfg.global_logical_batch_size, cfg.global_physical_batch_size
        if not 0 <= cfg.physical_feed_index < feeds:
            return (
                f"physical_feed_index={cfg.physical_feed_index} is not one of the "
                f"num_physical_feeds={feeds} feeds; expected 0 to {feeds - 1}"
            )
        if (
            not indices
            or len(set(indices)) != len(indices)
            or not set(indices) <= set(range(feeds))
        ):
            return (
                f"logical_feed_indices={indices} must be at least one, and distinct, of the "
                f"num_physical_feeds={feeds} feeds; choose from 0 to {feeds - 1}"
            )
        if logical % len(indices):
            return (
                f"global_logical_batch_size={logical} does not divide over {len(indices)} "
                "logical feeds; use a multiple, such as "
                f"{-(-logical // len(indices)) * len(indices)}"
            )
        if physical % feeds:
            return (
                f"global_physical_batch_size={physical} does not divide over {feeds} physical "
                f"feeds; use a multiple, such as {-(-physical // feeds) * feeds}"
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
        mine = self.config.physical_feed_index
        return indices.index(mine) if mine in indices else None

    @property
    def feed_physical_batch_size(self) -> int:
        """Rows per batch of each process."""
        return self.config.global_physical_batch_size // self.config.num_physical_feeds

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
            raise InputDispatchError(
                f"{self.path()}: an input batch must be a dict, got "
                f"{type(logical_feed_batch).__name__}; yield {{'name': rows}}"
            )
        size, index = self.feed_logical_batch_size, self.logical_feed_index

        def pad(path, leaf: np.ndarray) -> np.ndarray:
            leaf = np.asarray(leaf)
            if leaf.ndim == 0 or len(leaf) != size:
                raise InputDispatchError(
                    f"{self.path()}: {jax.tree_util.keystr(path, simple=True, separator='/')!r} "
                    f"has shape {leaf.shape}, but a feed of a global batch of "
                    f"{self.config.global_logical_batch_size} over {self.num_logical_feeds} feeds "
                    f"has {size} rows; batch the dataset by {size}"
                )
            padded = np.zeros((self.feed_physical_batch_size, *leaf.shape[1:]), leaf.dtype)
            if index is not None:
                padded[:size] = leaf
            return padded

        physical = jax.tree_util.tree_map_with_path(pad, dict(logical_feed_batch))
        if not self._is_identity:
            row = np.full(self.feed_physical_batch_size, -1, np.int32)
            if index is not None:
                row[:size] = index * size + np.arange(size)
            physical[LOGICAL_ROW_KEY] = row
        return physical

    @nowrap
    def logical_to_physical_shapes(
        self, logical_feed_shapes: Nested[jax.ShapeDtypeStruct]
    ) -> Nested[jax.ShapeDtypeStruct]:
        rows = self.feed_physical_batch_size
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), logical_feed_shapes
        )
        if not self._is_identity:
            shapes[LOGICAL_ROW_KEY] = jax.ShapeDtypeStruct((rows,), np.int32)
        return shapes

    @nowrap
    def physical_to_logical_batch(self, global_physical_batch: Nested[Tensor]) -> Nested[Tensor]:
        if self._is_identity:
            return global_physical_batch
        batch: dict[str, Any] = dict(global_physical_batch)  # pyright: ignore[reportArgumentType]
        held = batch.pop(LOGICAL_ROW_KEY)
        wanted = jnp.arange(self.config.global_logical_batch_size)
        physical_row = jnp.argmax(held[None, :] == wanted[:, None], axis=1)
        return jax.tree.map(lambda x: jnp.take(x, physical_row, axis=0), batch)


class SpmdInputDispatcher(BaseInputDispatcher):
    """Dispatcher where each process reads the rows of its devices.

    Processes whose devices hold the same rows read the same rows, so a global batch may be smaller
    than the number of processes, for example if a model is sharded over several of them. Needs a
    mesh set by `jax.set_mesh`.
    """

    @config_class
    class Config(BaseInputDispatcher.Config):
        """Configures a SpmdInputDispatcher.

        Attributes:
            partition_spec: Sharding of the global batch; the first entry is for the rows.
        """

        partition_spec: Required[PartitionSpec] = REQUIRED

    @property
    def partition_spec(self) -> PartitionSpec:
        return self.config.partition_spec

    @property
    def num_logical_feeds(self) -> int:
        return len(set(self._feeds().values()))

    @property
    def logical_feed_index(self) -> int:
        feeds = self._feeds()
        return sorted(set(feeds.values())).index(feeds[jax.process_index()])

    def _feeds(self) -> dict[int, tuple[int, ...]]:
        """Returns the blocks of rows on the devices of each process."""
        mesh, spec = current_mesh(), self.config.partition_spec
        first = spec[0] if len(spec) else None
        axes = (first,) if isinstance(first, str) else tuple(first or ())
        num_blocks = math.prod(mesh.shape[axis] for axis in axes)
        size = self.config.global_logical_batch_size
        if size % num_blocks:
            raise InputDispatchError(
                f"{self.path()}: global_logical_batch_size={size} does not divide over the "
                f"{num_blocks} blocks of rows that {spec} creates on mesh {dict(mesh.shape)}; "
                f"use a multiple, such as {-(-size // num_blocks) * num_blocks}"
            )
        sharding = NamedSharding(mesh, PartitionSpec(first))
        blocks = {
            device: starts_of(index)[0]
            for device, index in sharding.devices_indices_map((num_blocks,)).items()
        }
        return blocks_by_process({d: (d.process_index, b) for d, b in blocks.items()}, self.path())


def blocks_by_process(
    held: Mapping[object, tuple[int, int]], path: str
) -> dict[int, tuple[int, ...]]:
    """Groups the blocks of rows of all devices by process.

    Raises:
        InputDispatchError: If two processes share some of their blocks but not all.

    >>> blocks_by_process({"a": (0, 0), "b": (0, 1), "c": (1, 0), "d": (1, 1)}, "input")
    {0: (0, 1), 1: (0, 1)}
    """
    by_process: dict[int, set[int]] = {}
    for process, block in held.values():
        by_process.setdefault(process, set()).add(block)
    feeds = {process: tuple(sorted(blocks)) for process, blocks in sorted(by_process.items())}
    for process, blocks in feeds.items():
        for other, theirs in feeds.items():
            if blocks != theirs and (set(blocks) & set(theirs) or len(blocks) != len(theirs)):
                raise InputDispatchError(
                    f"{path}: process {process} holds the blocks of rows {blocks} and process "
                    f"{other} {theirs}; they must hold equally many, either the same or "
                    "disjoint ones: assign whole processes to the mesh axes of the batch"
                )
    return feeds
