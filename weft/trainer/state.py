"""State and batches of a training run: specs, shardings over a mesh, and initial values.

The specs of the model's parameters determine those of the learner's state, and all specs, by the
rules of each kind of array, the shardings. Each device computes only its own shards of the initial
state; no array is ever materialized whole. Batches are moved onto the mesh ahead of the steps.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.core.axis_rules import Rules, logical_axis_rules
from weft.distributed import preemption
from weft.errors import ModelSizeError
from weft.hierarchy import BaseLayer, NestedParameterSpec, TensorSpec
from weft.input import (
    Input,
    PrefetchingIterator,
    host_to_global_device_array,
    savable_iterator,
)
from weft.serialization.untrusted import memory_bytes
from weft.trainer.learner import BaseLearner
from weft.trainer.mesh import KindRules, check_divides, named_sharding
from weft.trainer.optimizers.base import path_name
from weft.trainer.train_step import TrainerState, opt_params
from weft.typing import DType, Nested, PartitionSpec, PyTree, Tensor

# More than any array of a model.
_MAX_ELEMENTS = 2**40
_MAX_AXIS_SIZE = 2**31 - 1


def parameter_specs(model: BaseLayer, rules: Rules) -> PyTree:
    """Returns the specs of a model's parameters, with rules for the names of their axes.

    Raises ModelSizeError if one has more elements than any array can have.
    """
    with logical_axis_rules(rules):
        specs = model.create_parameter_specs_recursively()
    for path, spec in jax.tree.leaves_with_path(specs):
        num_elements = math.prod(spec.shape)
        if (
            num_elements > _MAX_ELEMENTS
            or max(spec.shape, default=0) > _MAX_AXIS_SIZE
        ):
            raise ModelSizeError(
                f"the parameter {path_name(path, '.')} of the model has the shape {spec.shape}, "
                f"{num_elements:,} elements. Reduce a size of its config."
            )
    return specs


def state_specs(
    model: BaseLayer, learner: BaseLearner, rules: KindRules | None = None
) -> TrainerState:
    """Returns shapes, dtypes and layouts of the state, with rules for each kind of array."""
    rules = rules or KindRules()
    # Moments are laid out like parameters, by rules of their own.
    optimized_specs = parameter_specs(model, rules.optimizer)
    return TrainerState(
        prng_key=TensorSpec(shape=()),
        model=parameter_specs(model, rules.parameters),
        learner=learner.create_state_partition_specs(optimized_specs),
    )


def check_memory(
    specs: TrainerState, shardings: TrainerState, devices: Sequence[Any]
) -> None:
    """Raises a ModelSizeError if the state does not fit in the memory of this process's devices.

    Arrays in the memory of the host are not counted.
    """
    device_memory_kind = devices[0].default_memory().kind
    bytes_by_path: dict[str, int] = {}  # per device
    leaves = zip(
        jax.tree.leaves_with_path(specs),
        jax.tree.leaves(shardings),
        strict=True,
    )
    for (path, spec), sharding in leaves:
        if sharding.memory_kind in (None, device_memory_kind):
            shard_shape = sharding.shard_shape(tuple(spec.shape))
            bytes_by_path[path_name(path, ".")] = math.prod(
                shard_shape
            ) * _itemsize(spec.dtype)
    needed = sum(bytes_by_path.values())
    available = _memory_per_device(devices)
    if available is not None and needed > available:
        largest = max(bytes_by_path, key=lambda path: bytes_by_path[path])
        raise ModelSizeError(
            f"the state of the run takes {needed:,} bytes per device, and a device has "
            f"{available:,}. The largest array is {largest} with {bytes_by_path[largest]:,}. "
            "Reduce the model, or shard it over more devices with --mesh fsdp=8."
        )


def _itemsize(dtype: DType | None) -> int:
    if dtype is None:
        return 4
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return jnp.dtype(dtype).itemsize


def _memory_per_device(devices: Sequence[Any]) -> int | None:
    """Returns the bytes of the memory of a device of this process, None if unknown."""
    local_devices = [
        x for x in devices if x.process_index == jax.process_index()
    ]
    device = local_devices[0]
    if device.platform == "cpu":
        return memory_bytes() // len(local_devices)
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def partition_specs(specs: TrainerState) -> TrainerState:
    """Returns the mesh axes of each array."""
    return jax.tree.map(lambda spec: spec.partition_spec, specs)


def state_shardings(mesh: jax.sharding.Mesh, specs: PyTree) -> PyTree:
    """Returns the shardings of a tree of specs; raises a MeshError if an array does not fit."""

    def sharding_of(
        path: jax.tree_util.KeyPath, spec: TensorSpec
    ) -> jax.sharding.NamedSharding:
        name = path_name(path, ".")
        sharding = named_sharding(mesh, spec.partition_spec, name)
        check_divides(name, spec.shape, sharding)
        if spec.memory_kind:
            sharding = sharding.with_memory_kind(spec.memory_kind)
        return sharding

    return jax.tree_util.tree_map_with_path(sharding_of, specs)


def new_state(
    prng_key: Tensor,
    *,
    model: BaseLayer,
    learner: BaseLearner,
    model_specs: NestedParameterSpec,
) -> TrainerState:
    """Computes the state before the first step; the key serves the parameters and all steps."""
    prng_key, init_key = jax.random.split(prng_key)
    # A model with an initialization of its own may look up its parameters there.
    nothing_built = jax.tree.map(lambda _: None, model_specs)
    params = model.initialize_parameters_recursively(
        init_key, prebuilt=nothing_built
    )
    learner_state = learner.init(opt_params(params, model_specs))
    return TrainerState(prng_key=prng_key, model=params, learner=learner_state)


def with_shardings(
    shapes: TrainerState, shardings: TrainerState
) -> TrainerState:
    """Combines shapes and dtypes, as of `jax.eval_shape`, with `state_shardings`."""

    def with_sharding(
        x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, shapes, shardings)


def batch_partition(
    input_: Input, batch_axis_names: str | Sequence[str] | None
) -> PartitionSpec:
    """Returns the sharding of a batch: that of the input, else rows over `batch_axis_names`."""
    if (
        input_.config.partition_spec is not None
        or input_.dispatcher is not None
    ):
        return input_.partition_spec
    return PartitionSpec(batch_axis_names)


def check_batches(input_: Input, partition: PartitionSpec) -> None:
    """Checks with zeros that a batch can be sharded; raises a BatchShardingError if not."""
    zeros = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), _shapes_of_process(input_)
    )
    host_to_global_device_array(zeros, partition=partition)


def open_batches(
    input_: Input, partition: PartitionSpec, mesh: jax.sharding.Mesh
) -> PrefetchingIterator:
    """Returns an iterator over batches on the devices, prepared ahead of the steps."""
    to_devices = functools.partial(
        host_to_global_device_array, partition=partition, mesh=mesh
    )
    buffer_size = 2
    if jax.process_count() > 1:
        buffer_size = preemption.BATCHES_AHEAD
    return PrefetchingIterator(
        savable_iterator(input_.dataset, input_.path()),
        stream=lambda it: map(to_devices, input_.batches(it)),
        buffer_size=buffer_size,
    )


def batch_shapes(
    input_: Input, partition: PartitionSpec, mesh: jax.sharding.Mesh
) -> Nested[jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and layouts of a batch of all processes."""
    sharding = jax.sharding.NamedSharding(mesh, partition)

    def global_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows, *row_shape = x.shape  # of this process
        shape = (rows * jax.process_count(), *row_shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return jax.tree.map(global_shape, _shapes_of_process(input_))


def _shapes_of_process(input_: Input) -> Nested[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of what this process brings to a batch."""
    shapes = input_.element_spec()
    if input_.dispatcher is None:
        return shapes
    return input_.dispatcher.logical_to_physical_shapes(shapes)
