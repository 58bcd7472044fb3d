"""Input dispatchers: who reads which rows of a global batch.

A *feed* is what one process brings. The *logical* batch is what the model trains on; it comes from
the logical feeds. The *physical* batch is what enters the compiled step: there each process must
bring equally many rows, so it may be larger, and rows that are no data are padding.

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

# Which logical row each physical row holds, -1 for padding. It travels with the batch, because the
# order of rows in a global array is that of the mesh's devices, which need not be that of
# processes.
LOGICAL_ROW_KEY = "_logical_row"


class BaseInputDispatcher(Module):
    """What an `Input` asks of its dispatcher."""

    @config_class
    class Config(Module.Config):
        """Configures a BaseInputDispatcher.

        Attributes:
            global_logical_batch_size: Rows of the batch that the model sees.
        """

        global_logical_batch_size: Required[int] = REQUIRED

    @property
    def num_logical_feeds(self) -> int:
        """How many parts the data is read in."""
        raise NotImplementedError(type(self))

    @property
    def logical_feed_index(self) -> int | None:
        """Which of these parts this process reads; None if it brings padding only."""
        raise NotImplementedError(type(self))

    @property
    def feed_logical_batch_size(self) -> int:
        """Rows that a logical feed reads per batch."""
        return self.config.global_logical_batch_size // self.num_logical_feeds

    @property
    def partition_spec(self) -> PartitionSpec:
        """How the global physical batch lies over the mesh."""
        raise NotImplementedError(type(self))

    @nowrap
    def feed_read_config(self) -> dict[str, int]:
        """`num_shards` and `shard_index` of this process's data; padding feeds read part 0."""
        return {"num_shards": self.num_logical_feeds, "shard_index": self.logical_feed_index or 0}

    @nowrap
    def logical_to_physical_batch(
        self, logical_feed_batch: Nested[np.ndarray]
    ) -> Nested[np.ndarray]:
        """What this process brings to the global batch.

        Args:
            logical_feed_batch: What it has read, `feed_logical_batch_size` rows in each leaf.
        """
        return logical_feed_batch

    @nowrap
    def logical_to_physical_shapes(
        self, logical_feed_shapes: Nested[jax.ShapeDtypeStruct]
    ) -> Nested[jax.ShapeDtypeStruct]:
        """The shapes of `logical_to_physical_batch`.

        Args:
            logical_feed_shapes: Anything with `shape` and `dtype` for each leaf.
        """
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), logical_feed_shapes)

    @nowrap
    def physical_to_logical_batch(self, global_physical_batch: Nested[Tensor]) -> Nested[Tensor]:
        """The batch that the model sees, inside the compiled step.

        Args:
            global_physical_batch: The rows of all processes.
        """
        return global_physical_batch


class InputDispatcher(BaseInputDispatcher):
    """Some processes read, all bring equally many rows."""

    @config_class
    class Config(BaseInputDispatcher.Config):
        """Configures an InputDispatcher.

        Attributes:
            global_physical_batch_size: Rows of the batch that enters the step. None: as few as
                give each process a multiple of its devices.
            num_physical_feeds: None: the number of processes.
            physical_feed_index: None: the index of this process.
            logical_feed_indices: The physical feeds that read. None: all, or as many as there are
                rows if these are fewer.
        """

        global_physical_batch_size: int | None = None
        num_physical_feeds: int | None = None
        physical_feed_index: int | None = None
        logical_feed_indices: Sequence[int] | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        """Completes the config and checks that its sizes and indices fit together.

        Raises:
            InputDispatchError: If they do not.
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
        """What does not fit together, in words."""
        cfg = self.config
        indices, feeds = list(cfg.logical_feed_indices), cfg.num_physical_feeds
        logical, physical = cfg.global_logical_batch_size, cfg.global_physical_batch_size
        if not 0 <= cfg.physical_feed_index < feeds:
            return (
                f"physical_feed_index={cfg.physical_feed_index} is not one of the "
                f"num_physical_feeds={feeds} feeds; make it 0 to {feeds - 1}"
            )
        if (
            not indices
            or len(set(indices)) != len(indices)
            or not set(indices) <= set(range(feeds))
        ):
            return (
                f"logical_feed_indices={indices} are not at least one, and different, of the "
                f"num_physical_feeds={feeds} feeds; choose from 0 to {feeds - 1}"
            )
        if logical % len(indices):
            return (
                f"global_logical_batch_size={logical} does not divide over {len(indices)} logical "
                f"feeds; make it a multiple, as {-(-logical // len(indices)) * len(indices)}"
            )
        if physical % feeds:
            return (
                f"global_physical_batch_size={physical} does not divide over {feeds} physical "
                f"feeds; make it a multiple, as {-(-physical // feeds) * feeds}"
            )
        if self.feed_physical_batch_size < self.feed_logical_batch_size:
            return (
                f"a physical feed of {self.feed_physical_batch_size} rows cannot hold a logical "
                f"one of {self.feed_logical_batch_size}; make global_physical_batch_size at least "
                f"{self.feed_logical_batch_size * feeds}"
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
        """Rows that each process brings per batch."""
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
        """What this process brings to the global batch: its rows, and padding.

        Args:
            logical_feed_batch: A dict of what it has read, `feed_logical_batch_size` rows in each
                leaf.

        Raises:
            InputDispatchError: If a leaf has another number of rows, or the batch is no dict.
        """
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
    """Each process reads the rows that its devices hold; those that hold the same read the same.

    So a global batch may be smaller than the number of processes, as where a model is laid over
    several of them. It asks for the mesh set by `jax.set_mesh`.
    """

    @config_class
    class Config(BaseInputDispatcher.Config):
        """Configures a SpmdInputDispatcher.

        Attributes:
            partition_spec: How the global batch lies over the mesh; its first entry is for the
                rows.
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
        """The blocks of rows that the devices of each process hold."""
        mesh, spec = current_mesh(), self.config.partition_spec
        first = spec[0] if len(spec) else None
        axes = (first,) if isinstance(first, str) else tuple(first or ())
        num_blocks = math.prod(mesh.shape[axis] for axis in axes)
        size = self.config.global_logical_batch_size
        if size % num_blocks:
            raise InputDispatchError(
                f"{self.path()}: global_logical_batch_size={size} does not divide over the "
                f"{num_blocks} blocks of rows that {spec} makes on mesh {dict(mesh.shape)}; make "
                f"it a multiple, as {-(-size // num_blocks) * num_blocks}"
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
    """From (process, block) of each device to the blocks of each process.

    Args:
        held: Which process a device belongs to and which block of rows it holds.
        path: What to call the asker in an error.

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
                    f"{other} {theirs}; they must hold equally many, the same ones or none in "
                    "common: lay whole processes along the mesh axes of the batch"
                )
    return feeds
