"""`Input`: the module that yields batches.

A subclass defines the `dataset` of one process. From it, `batches` creates this process's part of
each global batch, `partition_spec` shards the global batch (see `weft.input.dispatch`), and
`dispatch_global_batch` turns it into the model's batch inside the compiled step.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec

from weft.config import (
    ConfigBase,
    ConfigOr,
    maybe_instantiate,
    maybe_set_config,
)
from weft.core.spmd import get_global_mesh
from weft.errors import InputDatasetError, InputReadError, describe_error
from weft.hierarchy import Module, TensorSpec, nowrap
from weft.input.dispatch import (
    BaseInputDispatcher,
    InputDispatcher,
    input_partition_spec,
)
from weft.typing import Nested, Tensor

_STATE_CHARACTERS = 300
"""Length of the position in an error; that of many rows is longer."""


class InputPartitionFn(Protocol):
    """Function that constrains the sharding of a batch inside the compiled step."""

    def __call__(self, input_batch: Nested[Tensor]) -> Nested[Tensor]:
        """Returns the batch with sharding constraints on some of its leaves."""
        ...


class PathAndRank(NamedTuple):
    """Pattern of leaves for `partition_by_path_rank`.

    Attributes:
        path: Regular expression for the whole path, joined by `/`. None: any path.
        rank: Number of axes. None: any.
    """

    path: str | None
    rank: int | None


def partition_by_path_rank(
    path_rank_to_partition: Mapping[
        PathAndRank | tuple[str | None, int | None], PartitionSpec
    ],
) -> InputPartitionFn:
    """Returns a partition function with rules by path and rank; the identity without a mesh.

    Args:
        path_rank_to_partition: The rules, by a `PathAndRank` or such a pair; the first match
            applies. Of a `TensorSpec` in place of an
            array, they set the `mesh_axes`.

    Raises InputDatasetError when called, if no rule matches a leaf.

    >>> partition = partition_by_path_rank({PathAndRank(".*_ids", 2): PartitionSpec("data")})
    >>> partition({"input_ids": np.zeros((2, 3))})["input_ids"].shape
    (2, 3)
    """
    rules = []
    for (path, rank), spec in path_rank_to_partition.items():
        pattern = None if path is None else re.compile(path)
        rules.append((pattern, rank, spec))

    def constrain(path, leaf: Tensor) -> Tensor:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, rank, spec in rules:
            if rank in (None, len(leaf.shape)) and (
                pattern is None or pattern.fullmatch(name)
            ):
                if isinstance(leaf, TensorSpec):
                    return dataclasses.replace(leaf, mesh_axes=spec)
                return jax.lax.with_sharding_constraint(leaf, spec)
        raise InputDatasetError(
            f"no rule of partition_by_path_rank matches {name!r} with {len(leaf.shape)} axes; add "
            "one, such as PathAndRank(None, None): PartitionSpec() to replicate the others."
        )

    def partition_fn(input_batch: Nested[Tensor]) -> Nested[Tensor]:
        if get_global_mesh() is None:
            return input_batch
        return jax.tree_util.tree_map_with_path(constrain, input_batch)

    return partition_fn


class Input(Module):
    """Base of all inputs; iterates over `batches`. Subclasses define `dataset`."""

    class Config(Module.Config):
        """Configures an Input."""

        partition_spec: PartitionSpec | None = None
        """Sharding of the global batch at the start of the step. Defaults to the dispatcher's, else
        rows over all mesh axes."""
        input_dispatcher: BaseInputDispatcher.Config | None = None
        """Assigns rows to processes. None: each process reads equally many; if the batch does not
        divide over them, an `InputDispatcher`."""
        input_partitioner: ConfigOr[InputPartitionFn] | None = None
        """Further sharding constraints inside the step."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dispatcher = cfg.input_dispatcher
        if dispatcher is None and cfg.partition_spec is None:
            dispatcher = _uneven_dispatcher(global_batch_size_of(cfg))
        if dispatcher is not None:
            if cfg.partition_spec is not None:
                dispatcher = maybe_set_config(
                    dispatcher.clone(), partition_spec=cfg.partition_spec
                )
            self._add_child("input_dispatcher", dispatcher)
        self._input_partitioner: InputPartitionFn | None = maybe_instantiate(
            cfg.input_partitioner
        )

    @property
    def dispatcher(self) -> BaseInputDispatcher | None:
        """The input dispatcher, or None."""
        return self.children.get("input_dispatcher")  # pyright: ignore[reportReturnType]

    @property
    def partition_spec(self) -> PartitionSpec:
        """Sharding of the global batch at the start of the step."""
        spec = self.config.partition_spec
        if spec is not None:
            return spec
        if self.dispatcher:
            return self.dispatcher.partition_spec
        return input_partition_spec()

    @nowrap
    def dataset(self) -> Iterable[Nested[np.ndarray]]:
        """Returns an iterable of batches with `feed_logical_batch_size` rows for this process.

        An iterator with `get_state` and `set_state` determines its position in the data; without,
        the trainer counts batches. It must be closed if it has `close`.
        """
        raise NotImplementedError(type(self))

    @nowrap
    def _feed_read_config(self) -> dict[str, int]:
        """Returns `num_shards` and `shard_index` of this process."""
        if self.dispatcher:
            return self.dispatcher.feed_read_config()
        return {
            "num_shards": jax.process_count(),
            "shard_index": jax.process_index(),
        }

    @nowrap
    def batches(self, it: Iterable[Any]) -> Iterator[Nested[np.ndarray]]:
        """Yields this process's part of each global batch.

        Raises InputReadError if reading fails, in place of the failed batch.
        """
        iterator: Any = iter(it)
        while True:
            state = (
                iterator.get_state() if hasattr(iterator, "get_state") else None
            )
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                name = "a batch"
                if state is not None:
                    text = textwrap.shorten(str(state), _STATE_CHARACTERS)
                    name = f"the batch after state {text}"
                raise InputReadError(
                    f"{self.path()}: {name} cannot be read: {describe_error(error)}"
                ) from error
            if self.dispatcher:
                batch = self.dispatcher.logical_to_physical_batch(batch)
            yield batch

    @nowrap
    def dispatch_global_batch(
        self, global_physical_batch: Nested[Tensor]
    ) -> Nested[Tensor]:
        """Returns the model's batch from arrays with all processes' rows, in the compiled step."""
        batch = global_physical_batch
        if self.dispatcher:
            batch = self.dispatcher.physical_to_logical_batch(batch)
        if self._input_partitioner:
            batch = self._input_partitioner(batch)
        return batch

    @nowrap
    def __iter__(self) -> Iterator[Nested[np.ndarray]]:
        return self.batches(self.dataset())

    @nowrap
    def element_spec(self) -> Nested[jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the elements of `dataset()`. Reads one batch.

        Raises InputDatasetError if the dataset is empty.
        """
        return self._spec_of(self.dataset())

    @nowrap
    def _spec_of(self, dataset: Iterable[Any]) -> Nested[jax.ShapeDtypeStruct]:
        it: Any = iter(dataset)
        try:
            batch = next(it)
        except StopIteration:
            raise InputDatasetError(
                f"{self.path()}: the dataset is empty, so it has no element_spec; give it data"
            ) from None
        finally:
            if hasattr(it, "close"):
                it.close()
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch
        )


def global_batch_size_of(cfg: ConfigBase) -> int | None:
    """Returns the rows of a global batch of an input, None if its config does not say it."""
    for part in (cfg, getattr(cfg, "source", None)):
        size = getattr(part, "global_batch_size", None)
        if isinstance(size, int):
            return size
    inputs = getattr(cfg, "inputs", ())
    children = inputs.values() if isinstance(inputs, Mapping) else inputs
    sizes = {global_batch_size_of(child) for child in children}
    return sizes.pop() if len(sizes) == 1 else None


def _uneven_dispatcher(
    global_batch_size: int | None,
) -> InputDispatcher.Config | None:
    """Returns a dispatcher if processes cannot read equally many rows, and each can have one."""
    num_processes = jax.process_count()
    if global_batch_size is None or global_batch_size < num_processes:
        return None
    if global_batch_size % num_processes == 0:
        return None
    return InputDispatcher.default_config().set(
        global_logical_batch_size=global_batch_size
    )
