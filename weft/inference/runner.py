"""Inference: runs any method of a trained model on batches, sharded over a mesh.

    cfg = InferenceRunner.config_from_trainer(trainer_cfg).set(name="runner")
    runner = cfg.instantiate(parent=None)
    for result in runner.run(batches, method="predict"):
        result.output_batch

Parameters are read directly into their shardings. Each shape of batch is compiled once.
"""

import contextlib
import dataclasses
import enum
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from weft import config, errors
from weft.core import flat_dict
from weft.core.axis_rules import logical_axis_rules
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.module import Module, check_method, functional
from weft.input import host_to_global_device_array
from weft.trainer import parallelism, run_dir, state_builder
from weft.trainer.checkpointer.index import CheckpointValidationType
from weft.trainer.mesh import (
    AxisRules,
    MeshShape,
    RulesByKind,
    build_mesh,
    rules_of,
)
from weft.trainer.model import cast_floats, trained_model_config
from weft.trainer.state import parameter_specs, state_shardings
from weft.trainer.train_step import TrainerState
from weft.typing import DType, NestedTensor, PartitionSpec, Tensor


class DataPartitionType(enum.Enum):
    """Partitioning of the rows of a batch over a mesh.

    Attributes:
        FULL: over all axes.
        BATCH: over those of the axes "data", "expert" and "fsdp" that the mesh has.
        REPLICATED: all rows on each device.
    """

    FULL = "full"
    BATCH = "batch"
    REPLICATED = "replicated"

    def partition_spec(self, mesh: jax.sharding.Mesh) -> PartitionSpec:
        """Returns the partition spec on a mesh."""
        if self is DataPartitionType.REPLICATED:
            return PartitionSpec()
        names = mesh.axis_names
        if self is DataPartitionType.BATCH:
            names = tuple(
                name for name in names if name in parallelism.BATCH_AXIS_NAMES
            )
        if not names:
            return PartitionSpec()
        return PartitionSpec(names)


@dataclasses.dataclass(repr=False, eq=False)
class MethodRunner:
    """Compiled method of a model; created by `InferenceRunner.create_method_runner`."""

    @dataclasses.dataclass
    class Output:
        """Outputs of a method for a batch.

        Attributes:
            prng_key: The key for the next batch.
            input_batch: The batch, as global arrays.
            module_outputs: The kept outputs that modules added by `add_module_output`.
        """

        prng_key: Tensor
        input_batch: NestedTensor
        output_batch: Any
        module_outputs: Any
        summaries: Any

    _run: Callable[[Tensor, NestedTensor], tuple[Tensor, Any, Any, Any]]
    _to_devices: Callable[[Any], NestedTensor]
    _mesh: Callable[[], contextlib.AbstractContextManager]
    _prng_key: Tensor

    def __call__(self, input_batch: NestedTensor) -> "MethodRunner.Output":
        """Runs the method on host arrays with the rows of this process."""
        with self._mesh():
            batch = self._to_devices(input_batch)
            self._prng_key, output, module_outputs, summaries = self._run(
                self._prng_key, batch
            )
        return self.Output(
            self._prng_key, batch, output, module_outputs, summaries
        )


class InferenceRunner(Module):
    """Runs methods of a model whose parameters come from a checkpoint."""

    class Config(Module.Config):
        """Configures an InferenceRunner."""

        mesh_shape: config.Required[MeshShape] = config.REQUIRED
        """The number of devices along each axis of the mesh; one may be -1."""
        mesh_axis_names: config.Required[Sequence[str]] = config.REQUIRED
        logical_axis_rules: AxisRules = []
        """See `SpmdTrainer`."""
        rules_by_kind: RulesByKind.Config = RulesByKind.default_config()
        """See `SpmdTrainer`."""
        model: config.Required[BaseModel.Config] = config.REQUIRED
        inference_dtype: DType | None = None
        """The dtype of the computation; None for the dtypes of the parameters."""
        input_batch_partition_spec: DataPartitionType = DataPartitionType.FULL
        output_batch_partition_spec: DataPartitionType = DataPartitionType.BATCH
        """The partitioning of outputs that have the rows of the batch; other outputs are
        replicated."""
        init_state_builder: state_builder.Builder.Config = (
            state_builder.TensorStoreStateStorageBuilder.default_config().set(
                validation=CheckpointValidationType.CONTAINS_STATE
            )
        )

    @classmethod
    def config_from_trainer(cls, trainer_cfg: config.ConfigBase) -> Config:
        """Returns the config of a runner with the model, mesh and newest checkpoint of a run.

        If the learner keeps a moving average of the parameters, the runner uses the average.
        """
        checkpoints = os.path.join(trainer_cfg.dir, run_dir.CHECKPOINTS_DIR)
        builder: Any = cls.default_config().init_state_builder
        builder.set(base_dir=checkpoints)
        if (
            getattr(getattr(trainer_cfg.learner, "ema", None), "decay", None)
            is not None
        ):
            builder = (
                state_builder.RestoreAndConvertBuilder.default_config().set(
                    builder=builder,
                    converter=state_builder.EmaParamsConverter.default_config(),
                )
            )

        return cls.default_config().set(
            mesh_shape=trainer_cfg.mesh_shape,
            mesh_axis_names=trainer_cfg.mesh_axis_names,
            logical_axis_rules=trainer_cfg.logical_axis_rules,
            rules_by_kind=trainer_cfg.rules_by_kind,
            model=trained_model_config(trainer_cfg),
            init_state_builder=builder,
        )

    def __init__(
        self,
        cfg: Config,
        *,
        parent: Module | None,
        devices: Sequence[Any] | None = None,
    ):
        super().__init__(cfg, parent=parent)
        self._mesh = build_mesh(cfg.mesh_shape, cfg.mesh_axis_names, devices)
        self._rules = rules_of(cfg)
        with self.mesh():
            self._add_child("model", cfg.model)
            self._add_child("init_state_builder", cfg.init_state_builder)
            self._state = self._build_state()

    @contextlib.contextmanager
    def mesh(self) -> Iterator[None]:
        """Makes the runner's mesh and its rules for activations the current ones."""
        with (
            jax.set_mesh(self._mesh),
            logical_axis_rules(self._rules.activations),
        ):
            yield

    @property
    def inference_runner_state(self) -> TrainerState:
        """The parameters, as the `model` of a state without a learner."""
        return self._state

    def _build_state(self) -> TrainerState:
        specs = parameter_specs(self.model, self._rules.parameters)
        shardings = state_shardings(
            self._mesh, TrainerState(prng_key={}, model=specs, learner={})
        )

        def init(prng_key: Tensor) -> TrainerState:
            params = self.model.initialize_parameters_recursively(
                prng_key, prebuilt=None
            )
            return TrainerState(prng_key={}, model=params, learner={})

        builder: Any = self.init_state_builder
        return state_builder.initial_state(
            builder, init, jax.random.key(0), shardings
        )

    def create_method_runner(
        self,
        *,
        method: str,
        prng_key: Tensor | None = None,
        drop_module_outputs: Callable[[str], bool] = lambda _: True,
        **kwargs: Any,
    ) -> MethodRunner:
        """Compiles a method of the model, at its first batch.

        Args:
            method: Its name; it is called as `method(input_batch=batch, **kwargs)`.
            prng_key: The key for its randomness; None for the key of seed 0.
            drop_module_outputs: Whether to omit the module output at a path; by default all.

        Raises InferenceError if the model has no such method.
        """
        check_method(self, self.model, method, errors.InferenceError)
        cfg = self.config
        from_spec = cfg.input_batch_partition_spec.partition_spec(self._mesh)
        run = method_program(
            cfg,
            self.model,
            self._mesh,
            method=method,
            drop_module_outputs=drop_module_outputs,
            **kwargs,
        )
        if prng_key is None:
            prng_key = jax.random.key(0)
        return MethodRunner(
            lambda key, batch: run(key, self._state.model, batch),
            lambda batch: host_to_global_device_array(
                batch, partition=from_spec, mesh=self._mesh
            ),
            self.mesh,
            prng_key,
        )

    def run(
        self,
        input_batches: Iterable[Any],
        *,
        method: str,
        prng_key: Tensor | None = None,
        **kwargs: Any,
    ) -> Iterator[MethodRunner.Output]:
        """Yields the outputs of a method for batches, compiled for each shape.

        For the arguments see `create_method_runner`.
        """
        runner = self.create_method_runner(
            method=method, prng_key=prng_key, **kwargs
        )
        for batch in input_batches:
            yield runner(batch)


def method_program(
    cfg: InferenceRunner.Config,
    model: Module,
    mesh: jax.sharding.Mesh,
    *,
    method: str,
    drop_module_outputs: Callable[[str], bool] = lambda _: True,
    **kwargs: Any,
) -> Any:
    """Returns a method of a model as a jitted function of a key, parameters and a batch."""
    to_spec = cfg.output_batch_partition_spec.partition_spec(mesh)

    @jax.jit
    def inference_step(
        prng_key: Tensor, params: NestedTensor, batch: NestedTensor
    ) -> Any:
        next_key, key = jax.random.split(prng_key)
        params, batch = cast_floats((params, batch), cfg.inference_dtype)
        output, collection = functional(
            model,
            prng_key=key,
            state=params,
            inputs={"input_batch": batch, **kwargs},
            method=method,
            is_training=False,
            drop_output_collections=(),
        )
        numbers_of_rows = {
            x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)
        }
        output = jax.tree.map(
            lambda x: _constrain_rows(x, numbers_of_rows, to_spec, mesh), output
        )
        module_outputs = {}
        for path, x in flat_dict.flatten_dict(
            collection.module_outputs
        ).items():
            if not drop_module_outputs("/".join(map(str, path))):
                module_outputs[path] = x
        module_outputs = flat_dict.unflatten_dict(module_outputs)
        return next_key, output, module_outputs, collection.summaries

    return inference_step


def _constrain_rows(
    x: Tensor,
    numbers_of_rows: set[int],
    spec: PartitionSpec,
    mesh: jax.sharding.Mesh,
) -> Tensor:
    """Lays an output out like the rows of the batch if it has as many, and replicates it if not."""
    has_rows = jnp.ndim(x) > 0 and x.shape[0] in numbers_of_rows
    if not has_rows:
        spec = PartitionSpec()
    return jax.lax.with_sharding_constraint(
        x, jax.sharding.NamedSharding(mesh, spec)
    )
