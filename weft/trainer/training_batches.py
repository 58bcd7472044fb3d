"""Batches of a training run, moved from the input onto the mesh ahead of the steps."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.input import Input, PrefetchingIterator, host_to_global_device_array
from weft.typing import Nested


def batch_partition(input_: Input, batch_axis_names: str | Sequence[str] | None) -> PartitionSpec:
    """Returns the sharding of a batch: that of the input, else rows over `batch_axis_names`."""
    if input_.config.partition_spec is not None or input_.dispatcher is not None:
        return input_.partition_spec
    return PartitionSpec(batch_axis_names)


def check_batches(input_: Input, partition: PartitionSpec) -> None:
    """Checks with zeros that a batch can be sharded; raises a BatchShardingError if not."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), input_.element_spec())
    host_to_global_device_array(zeros, partition=partition)


def open_batches(input_: Input, partition: PartitionSpec, mesh: Mesh) -> PrefetchingIterator:
    """Returns an iterator over batches on the devices, prepared ahead of the steps."""
    to_devices = functools.partial(host_to_global_device_array, partition=partition, mesh=mesh)
    return PrefetchingIterator(
        iter(input_.dataset()),  # pyright: ignore[reportArgumentType]
        stream=lambda it: map(to_devices, input_.batches(it)),
    )


def batch_shapes(input_: Input, partition: PartitionSpec, mesh: Mesh) -> Nested[Any]:
    """Returns shapes, dtypes and layouts of a batch of all processes."""
    sharding = NamedSharding(mesh, partition)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (x.shape[0] * jax.process_count(), *x.shape[1:]), x.dtype, sharding=sharding
        ),
        input_.element_spec(),
    )
