"""The batches of a training run: from the input onto the mesh, ahead of the steps."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.input import Input, PrefetchingIterator, host_to_global_device_array
from weft.typing import Nested


def batch_partition(input_: Input, batch_axis_names: str | Sequence[str] | None) -> PartitionSpec:
    """How a batch lies over the mesh as the processes bring it.

    Args:
        input_: what it says itself counts.
        batch_axis_names: the mesh axes for its rows otherwise.
    """
    if input_.config.partition_spec is not None or input_.dispatcher is not None:
        return input_.partition_spec
    return PartitionSpec(batch_axis_names)


def check_batches(input_: Input, partition: PartitionSpec) -> None:
    """Lays out zeros in the place of a batch: whether it divides shows before any work.

    Args:
        input_: the training data.
        partition: over the current mesh.

    Raises:
        BatchShardingError: if it does not.
    """
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), input_.element_spec())
    host_to_global_device_array(zeros, partition=partition)


def open_batches(input_: Input, partition: PartitionSpec, mesh: Mesh) -> PrefetchingIterator:
    """The batches on the devices, made ready ahead of the step.

    Args:
        input_: the training data.
        partition: how a batch lies over the mesh.
        mesh: the mesh.
    """
    to_devices = functools.partial(host_to_global_device_array, partition=partition, mesh=mesh)
    return PrefetchingIterator(
        iter(input_.dataset()),  # pyright: ignore[reportArgumentType]
        stream=lambda it: map(to_devices, input_.batches(it)),
    )


def batch_shapes(input_: Input, partition: PartitionSpec, mesh: Mesh) -> Nested[Any]:
    """Shapes, dtypes and layouts of a batch of all processes.

    Args:
        input_: the training data.
        partition: how a batch lies over the mesh.
        mesh: the mesh.
    """
    sharding = NamedSharding(mesh, partition)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (x.shape[0] * jax.process_count(), *x.shape[1:]), x.dtype, sharding=sharding
        ),
        input_.element_spec(),
    )
