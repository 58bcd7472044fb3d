"""Pipeline parallelism: layers on different devices work on different microbatches at once.

The layers, or stages, are copies of one child "layer". The leading axis of their parameters is
sharded over the mesh axis "pipeline", or as logical axis rules map that name. A schedule assigns
microbatches to stages in each step (`weft.hierarchy.pipeline_schedule`). In a step, all stages run
under one `vmap` and pass their results on. The result equals that of running the layers in sequence
on any mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.core.layout import axes_of
from weft.errors import ArgumentShapeError, LayerConfigError
from weft.hierarchy import transforms
from weft.hierarchy.context import InvocationContext, OutputCollection
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.parameter_spec import with_leading_axis_name
from weft.hierarchy.pipeline_schedule import (
    PIPELINE_AXIS,
    BaseSchedule,
    GPipeSchedule,
    StreamSchedule,
    stage_layout,
)
from weft.hierarchy.repeat import Repeat
from weft.hierarchy.sharding import maybe_shard
from weft.typing import PartitionSpec, Tensor

__all__ = [
    "BaseSchedule",
    "GPipeSchedule",
    "Pipeline",
    "StreamSchedule",
    "transpose_from_pipeline_stage_outputs",
    "transpose_to_pipeline_stage_inputs",
]


def transpose_to_pipeline_stage_inputs(
    x: Tensor, partition_spec: PartitionSpec | None = None
) -> Tensor:
    """Converts an axis of microbatches to an axis of steps.

    Args:
      x: `Num[Array, "num_microbatches num_stages *shape"]`.
      partition_spec: sharding of the result.

    Returns:
      `Num[Array, "num_microbatches+num_stages-1 num_stages *shape"]`: in step `t`, stage `n` works
      on microbatch `t - n`; 0 for idle stages.

    Example:
      >>> transpose_to_pipeline_stage_inputs(jnp.array([[1, 2], [3, 4]])).tolist()
      [[1, 0], [3, 2], [0, 4]]
    """
    n = x.shape[1]
    padded = jnp.concatenate([x, jnp.zeros((n - 1, *x.shape[1:]), x.dtype)])
    shifted = jax.vmap(lambda x, by: jnp.roll(x, by, axis=0), in_axes=(1, 0), out_axes=1)
    return maybe_shard(shifted(padded, jnp.arange(n)), partition_spec)


def transpose_from_pipeline_stage_outputs(
    x: Tensor, partition_spec: PartitionSpec | None = None
) -> Tensor:
    """Converts an axis of steps to an axis of microbatches.

    Args:
      x: `Num[Array, "num_microbatches+num_stages-1 num_stages *shape"]`.
      partition_spec: sharding of the result.

    Returns:
      `Num[Array, "num_microbatches num_stages *shape"]`: for microbatch `m`, the result of stage
      `n` in step `m + n`.

    Example:
      >>> transpose_from_pipeline_stage_outputs(jnp.array([[1, 0], [3, 2], [0, 4]])).tolist()
      [[1, 2], [3, 4]]
    """
    steps, n = x.shape[:2]
    shifted = jax.vmap(lambda x, by: jnp.roll(x, -by, axis=0), in_axes=(1, 0), out_axes=1)
    return maybe_shard(shifted(x, jnp.arange(n))[: steps - n + 1], partition_spec)


class Pipeline(Repeat):
    """Layer that runs a child "layer" `num_layers` times, as stages of a pipeline.

    A subclass defines `forward`, which calls `_run`.

    Example:
      >>> from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
      >>> from weft.hierarchy.module import functional
      >>> class Scale(BaseLayer):
      ...     def _create_layer_parameter_specs(self):
      ...         return {"scale": ParameterSpec(())}
      ...
      ...     def forward(self, x):
      ...         return x * self.parameters["scale"]
      >>> class PipelinedScale(Pipeline):
      ...     def forward(self, x):
      ...         return self._run(lambda x, _: (self.layer(x), None), x).carry
      >>> cfg = PipelinedScale.default_config().set(num_layers=3, num_microbatches=2)
      >>> cfg.set(layer=Scale.default_config(), name="pipelined").klass.__name__
      'PipelinedScale'
      >>> state = {"layer": {"scale": jnp.array([2.0, 3.0, 5.0])}}
      >>> y, _ = functional(
      ...     cfg.instantiate(parent=None),
      ...     prng_key=None,
      ...     state=state,
      ...     inputs=(jnp.array([1.0, 10.0]),),
      ...     is_training=False,
      ... )
      >>> y.tolist()
      [30.0, 300.0]
    """

    @config_class
    class Config(Repeat.Config):
        """Configures a Pipeline.

        Attributes:
          num_microbatches: number of parts of a batch, ideally several times the number of stages:
            of `num_microbatches + num_layers - 1` steps, a stage is idle in `num_layers - 1`.
          schedule: assignment of microbatches to stages in each step.
        """

        num_microbatches: Required[int] = REQUIRED
        schedule: BaseSchedule.Config = GPipeSchedule.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name in ("num_layers", "num_microbatches"):
            if getattr(cfg, name) < 1:
                raise LayerConfigError(
                    f"{self.path()}: {name}={getattr(cfg, name)}; expected at least 1."
                )
        if not issubclass(getattr(cfg.schedule, "klass", object), BaseSchedule):
            raise LayerConfigError(
                f"{self.path()}: schedule={cfg.schedule!r} is not the config of a schedule; "
                "expected GPipeSchedule.default_config() or StreamSchedule.default_config()."
            )
        try:
            self._schedule: BaseSchedule = cfg.schedule.clone(
                num_stages=cfg.num_layers, num_microbatches=cfg.num_microbatches
            ).instantiate()
        except LayerConfigError as error:
            raise LayerConfigError(f"{self.path()}: {error}") from None

    @nowrap
    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs, with the axis of stages named "pipeline"."""
        specs = super().create_parameter_specs_recursively()
        specs["layer"] = jax.tree.map(
            lambda spec: with_leading_axis_name(spec, PIPELINE_AXIS), specs["layer"]
        )
        return specs

    def _run(
        self, fn: Callable[[Any, Any], tuple[Any, Any]], carry: Any = None, *, xs: Any = None
    ) -> Repeat.Output:
        """Runs the pipeline.

        Args:
          fn: takes a microbatch of the carry and a slice of `xs`; returns the next carry and values
            to stack. It calls `self.layer`, which has the parameters of the stage, and a key and
            outputs per stage and microbatch.
          carry: the batch, a pytree of arrays `(batch, ...)`.
          xs: a pytree of arrays with a leading axis of stages, the same for all microbatches.

        Returns:
          The output of the last stage, and the stacked values, `(num_layers, batch, ...)` if `fn`
          returns arrays with a microbatch's rows.

          Summaries of stage i are added under "layer{i}", merged over its microbatches. State
          updates are stacked under "layer": the mean over microbatches, which all start from the
          same state; for integers, the last. Module outputs that `drop_output` keeps are stacked
          under "layer" with axes of stages and microbatches; scalars, and names that end in
          "loss", are averaged over microbatches.

        Raises:
          ArgumentShapeError: if the batch does not divide into microbatches.
        """
        cfg = self.config
        context = self.get_invocation_context()
        layer_context = context.add_child("layer", prng_key=context.prng_key)
        inner = layer_context.twin()
        run_stages = transforms.vmap(
            fn, axis_size=cfg.num_layers, spmd_axis_name=axes_of(stage_layout()) or None
        )
        carry, ys = self._schedule.scan(
            lambda work, _: run_stages(work, xs),
            carry=jax.tree.map(self._to_microbatches, carry),
            state=inner,
            xs=None,
            unroll=1 if cfg.unroll is None else cfg.unroll,
            remat_kwargs=self._remat_kwargs(),
            drop_output=self._drop_output,
        )
        self._collect(context, layer_context, inner.output_collection)
        stacked = jax.tree.map(
            lambda y: jax.vmap(_from_microbatches, in_axes=1)(
                transpose_from_pipeline_stage_outputs(y)
            ),
            ys,
        )
        return Repeat.Output(jax.tree.map(_from_microbatches, carry), stacked)

    def _run_one_by_one(self, fn: Callable[..., Any], carry: Any, *, xs: Any) -> Repeat.Output:
        """Runs the stages in sequence on the whole batch, as a `Repeat` does."""
        return super()._run(fn, carry, xs=xs)

    def _to_microbatches(self, x: Tensor) -> Tensor:
        m = self.config.num_microbatches
        if x.ndim == 0 or x.shape[0] % m:
            raise ArgumentShapeError(
                f"{self.path()}: a batch of shape {x.shape} does not divide into "
                f"num_microbatches={m}; expected a multiple of {m} rows."
            )
        # Row i goes to microbatch i % m, so that rows stay on their devices and each microbatch is
        # sharded like the batch.
        return jnp.moveaxis(x.reshape(-1, m, *x.shape[1:]), 1, 0)

    def _collect(
        self, context: InvocationContext, layer_context: InvocationContext, outputs: Any
    ) -> None:
        """Adds the outputs of all stages and steps to those of the invocation."""
        outputs = jax.tree.map(transpose_from_pipeline_stage_outputs, outputs)
        summaries = outputs.summaries
        if jax.tree.leaves(summaries):
            summaries = transforms.merged_summaries(
                [
                    jax.tree.map(lambda x, i=i: x[i], summaries)
                    for i in range(self.config.num_microbatches)
                ]
            )
        transforms.propagate_repeated_output_collections(
            OutputCollection(
                summaries=summaries,
                state_updates=jax.tree.map(_one_update, outputs.state_updates),
                module_outputs=jax.tree_util.tree_map_with_path(
                    _stages_first, outputs.module_outputs
                ),
            ),
            child_name_prefix="layer",
            target_output_collection=OutputCollection(
                summaries=context.output_collection.summaries,
                state_updates=layer_context.output_collection.state_updates,
                module_outputs=layer_context.output_collection.module_outputs,
            ),
        )


def _from_microbatches(x: Tensor) -> Tensor:
    """Joins the rows of all microbatches in the order of the batch."""
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def _one_update(x: Tensor) -> Tensor:
    """Reduces the state updates of all microbatches to one."""
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]


def _stages_first(path: Any, x: Tensor) -> Tensor:
    """Moves the axis of stages first, or averages a loss over microbatches."""
    # A stage that is a loop has a loss per layer.
    if x.ndim == 2 or str(getattr(path[-1], "key", "")).endswith("loss"):
        return jnp.mean(x, axis=0)
    return jnp.moveaxis(x, 1, 0)
