"""Parallel transformers: layouts of the library's transformer on a mesh of named axes.

Each axis is one kind of parallelism; an axis of size 1 costs nothing.
`weft.hierarchy.set_partition_specs_recursively` sets the layouts of the layers.
"""

from typing import Any, Literal

from weft import config, errors, hierarchy
from weft.functional import ContextParallelism
from weft.hierarchy import config_setters
from weft.hierarchy.mesh_layout import BATCH_AXIS_NAMES as BATCH_AXIS_NAMES
from weft.hierarchy.mesh_layout import MESH_AXIS_NAMES as MESH_AXIS_NAMES
from weft.hierarchy.mesh_layout import set_partition_specs_recursively
from weft.hierarchy.pipeline import (
    BaseSchedule,
    GPipeSchedule,
    InterleavedSchedule,
)
from weft.hierarchy.repeat import drop_by_regex
from weft.trainer.one_forward_one_backward import with_one_forward_one_backward
from weft.trainer.trainer_config_modifier import find_values, outermost

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]


def mesh_shape_from_axes(
    *,
    pipeline: int = 1,
    data: int = 1,
    expert: int = 1,
    fsdp: int = 1,
    seq: int = 1,
    model: int = 1,
) -> tuple[int, ...]:
    """Returns the mesh shape for sizes by name, in the order of `MESH_AXIS_NAMES`.

    One size may be -1, for the remaining devices. An axis of size 1 costs nothing.

    Args:
        pipeline: devices for the stages of a pipeline.
        data: for rows of a batch; parameters are replicated.
        expert: for rows of a batch, and the experts of mixture-of-experts layers.
        fsdp: for rows of a batch, and parameters, which are gathered for a layer when it runs.
        seq: for positions of a sequence; these devices share attention.
        model: for heads, hidden dimensions, and the vocabulary.

    >>> mesh_shape_from_axes(data=-1, fsdp=8)
    (1, -1, 1, 8, 1, 1)
    """
    return (pipeline, data, expert, fsdp, seq, model)


class ParallelismModifier(config.ConfigModifier):
    """Config modifier that shards a trainer's transformer over a mesh with axes `MESH_AXIS_NAMES`.

    It sets the mesh and the shardings of the batch and of the parameters and activations of the
    library's layers, anywhere in the model. Optimizer state and gradients follow the parameters.
    Parameters of other layers are unchanged; `weft check` shows them.

    >>> from weft.recipes.lm import lm_tiny
    >>> modifier = ParallelismModifier.default_config().set(fsdp=4, model=2).instantiate()
    >>> cfg = modifier(lm_tiny())
    >>> cfg.mesh_shape, cfg.model.decoder.transformer.layer.feed_forward.linear1
    ((1, 1, 1, 4, 1, 2), ...)
    """

    class Config(config.ConfigModifier.Config):
        """Configures a ParallelismModifier, with axis sizes as for `mesh_shape_from_axes`."""

        pipeline: int = 1
        data: int = 1
        expert: int = 1
        fsdp: int = 1
        seq: int = 1
        model: int = 1
        context_parallelism: ContextParallelism | None = "ring"
        """How devices of `seq` share attention, in layers whose field of this name is None: "ring"
        or "all_to_all"; None gathers all keys and values on each."""
        num_microbatches: int | None = None
        """Parts of a batch in a pipeline; None for twice the number of stages."""
        pipeline_schedule: PipelineSchedule = "gpipe"
        """Order of the work of a pipeline: "gpipe"; "1f1b", which keeps only as many microbatches
        as there are stages, up to a factor of 2; or "interleaved", in which each stage has
        `num_pipeline_repeats` parts of the layers and is idle that much less."""
        num_pipeline_repeats: int = 2
        """Parts of the layers that each stage has, if they are interleaved."""

    def __call__(self, cfg: config.InstantiableConfig) -> Any:
        stages = self.config.pipeline
        if stages != 1:
            num_microbatches = self.config.num_microbatches or 2 * stages
            _into_stages(cfg.model, stages, num_microbatches, self._schedule())
            if self.config.pipeline_schedule == "1f1b":
                _set_one_forward_one_backward(cfg.learner, num_microbatches)
        if not set_partition_specs_recursively(cfg.model):
            raise errors.ConfigModifierError(
                f"{type(self).__name__} finds no attention or feed-forward layer of weft.hierarchy "
                "in the trainer's `model` to shard over the mesh. Set the layouts of its layers: "
                "with `PartitionSpecModifier`, or in Linen and NNX with annotations. Or shard "
                "the batch alone: --mesh data=4."
            )
        if self.config.seq != 1:
            _set_context_parallelism(cfg.model, self.config.context_parallelism)
        sizes = {name: getattr(self.config, name) for name in MESH_AXIS_NAMES}
        return cfg.set(
            mesh_axis_names=MESH_AXIS_NAMES,
            mesh_shape=mesh_shape_from_axes(**sizes),
            batch_axis_names=BATCH_AXIS_NAMES,
        )

    def _schedule(self) -> BaseSchedule.Config:
        if self.config.pipeline_schedule == "interleaved":
            return InterleavedSchedule.default_config().set(
                num_repeats=self.config.num_pipeline_repeats
            )
        return GPipeSchedule.default_config()


def _set_context_parallelism(
    model: config.ConfigBase, way: ContextParallelism | None
) -> None:
    def set_unless_set(layer: Any) -> None:
        is_attention = config_setters.is_config_of(
            layer, hierarchy.MultiheadAttention
        )
        if is_attention and layer.context_parallelism is None:
            layer.context_parallelism = way

    config_setters.for_each_config(model, set_unless_set)


def _set_one_forward_one_backward(learner: Any, num_microbatches: int) -> None:
    existing = getattr(learner, "forward_fn_transformation", None)
    if existing is not None or not hasattr(
        learner, "forward_fn_transformation"
    ):
        raise errors.ConfigModifierError(
            "ParallelismModifier sets forward_fn_transformation of the trainer's `learner` for "
            f"pipeline_schedule='1f1b', and a {learner.klass.__name__} has "
            f"{'no such field' if existing is None else 'one already'}. Accumulate gradients by "
            "more microbatches of the pipeline, or use 'gpipe'."
        )
    learner.forward_fn_transformation = config.config_for_function(
        with_one_forward_one_backward
    ).set(num_microbatches=num_microbatches)


def _into_stages(
    model: config.ConfigBase,
    num_stages: int,
    num_microbatches: int,
    schedule: BaseSchedule.Config,
) -> None:
    kinds = (
        hierarchy.RepeatedTransformerLayer,
        hierarchy.StackedTransformerLayer,
    )
    # Those inside another one are parts of a stage.
    stacks = outermost(
        find_values(
            model, lambda path, x: config_setters.is_config_of(x, kinds)
        )
    )
    if num_stages < 1 or not stacks:
        raise errors.ConfigModifierError(
            f"ParallelismModifier cannot make a pipeline of pipeline={num_stages} stages: expected "
            "a positive number, and a RepeatedTransformerLayer or StackedTransformerLayer in the "
            "trainer's `model`."
        )
    for path, stack in stacks.items():
        pipelined = hierarchy.PipelinedTransformerLayer.default_config().set(
            input_dim=stack.input_dim,
            num_layers=stack.num_layers,
            layer=stack.layer,
            stage=stack,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
        )
        pipelined.pipeline.set(
            schedule=schedule.clone(), drop_output=_drop_output_of(stack)
        )
        model.set_recursively(path, value=pipelined)


def _drop_output_of(stack: Any) -> config.InstantiableConfig:
    """Returns which outputs of its layers a pipeline drops, so that losses reach the model."""
    if config_setters.is_config_of(stack, hierarchy.RepeatedTransformerLayer):
        return stack.repeat.drop_output.clone()
    # A stack drops nothing, but a pipeline would keep the rest for all microbatches.
    return config.config_for_function(drop_by_regex).set(
        rules=[r"module_outputs(?!.*loss$).*"]
    )
