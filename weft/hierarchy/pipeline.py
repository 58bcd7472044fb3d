"""Pipeline parallelism: layers on different devices work on different microbatches at once.

    step        0    1    2    3    4      M = 3 microbatches, N = 3 stages,
    stage 0     m0   m1   m2   .    .      M + N - 1 steps.
    stage 1     .    m0   m1   m2   .
    stage 2     .    .    m0   m1   m2     Each stage works on the previous stage's result of the
                                           previous step.

The layers, or stages, are copies of one child "layer". The leading axis of their parameters is
sharded over the mesh axis "pipeline", or as logical axis rules map that name. In each step, all
stages run under one `vmap`, on microbatches that a schedule assigns to them. A buffer with a
sharded axis of stages holds their inputs; after the step it is shifted along that axis, so that
each device passes its part to the next one. At the dots, a stage computes on rows that are
discarded. On any mesh, the result equals that of running the layers in sequence.
"""

import contextvars
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from weft import struct
from weft.config import REQUIRED, Configurable, Required, maybe_instantiate
from weft.core.logical import names_to_mesh_axes
from weft.core.spmd import (
    axes_of,
    constrain,
    get_global_mesh,
    is_as_on_one_device,
)
from weft.errors import ArgumentShapeError, LayerConfigError
from weft.hierarchy import parameter_spec, transforms
from weft.hierarchy.base_layer import stacked_parameter_specs
from weft.hierarchy.context import (
    InvocationContext,
    OutputCollection,
    require_context,
    set_current_context,
)
from weft.hierarchy.module import Module
from weft.hierarchy.repeat import Repeat
from weft.typing import NestedTensor, PartitionSpec, PyTree, Tensor

PIPELINE_AXIS = "pipeline"
"""Name of the stage axis: a mesh axis, unless logical axis rules map it."""

StepFn = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""Runs all stages for one step: takes their inputs, arrays `(num_stages, ...)`, and the step's
entry of `xs`; returns their outputs and values to stack."""


def stage_layout() -> Any:
    """Returns the entry of a PartitionSpec for the stage axis, by the context's mesh and rules."""
    mesh = get_global_mesh()
    (entry,) = names_to_mesh_axes((PIPELINE_AXIS,))
    if mesh is None or (
        entry == PIPELINE_AXIS and entry not in mesh.axis_names
    ):
        return PartitionSpec.UNCONSTRAINED
    return entry


def shard_stages(x: PyTree) -> PyTree:
    """Shards the first axis of all arrays in a pytree as the stage axis.

    Raises MeshError if the mesh lacks an axis that the rules assign to stages.
    """
    entry = stage_layout()

    def shard_array(x: Tensor) -> Tensor:
        unconstrained_axes = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        return constrain(x, PartitionSpec(entry, *unconstrained_axes))

    return jax.tree.map(shard_array, x)


class BaseSchedule(Configurable):
    """Base of schedules. A subclass defines `scan`."""

    class Config(Configurable.Config):
        """Configures a BaseSchedule; the pipeline sets both fields."""

        num_stages: Required[int] = REQUIRED
        num_microbatches: Required[int] = REQUIRED

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.config.num_microbatches

    @property
    def num_repeats(self) -> int:
        """Number of parts of the layers that each stage runs, one after another."""
        return 1

    @property
    def num_iterations(self) -> int:
        """Number of steps."""
        return self.num_repeats * self.num_microbatches + self.num_stages - 1

    @property
    def bubble_share(self) -> float:
        """Share of the steps in which a stage is idle.

        >>> cfg = GPipeSchedule.default_config().set(num_stages=4, num_microbatches=8)
        >>> f"{cfg.instantiate().bubble_share:.0%}"
        '27%'
        """
        return (self.num_stages - 1) / self.num_iterations

    def repeats(self) -> np.ndarray | None:
        """Returns the part on which each stage works in each step; None if each has one only."""
        return None

    def by_microbatch(self, x: Tensor) -> Tensor:
        """Converts an axis of steps and one of stages to microbatches and layers in their order."""
        return transpose_from_pipeline_stage_outputs(x)

    def scan(
        self,
        fn: StepFn,
        *,
        carry: PyTree,
        state: InvocationContext,
        xs: PyTree,
        **scan_kwargs: Any,
    ) -> tuple[PyTree, PyTree]:
        """Runs all microbatches through all stages.

        Args:
          carry: the microbatches, arrays `(num_microbatches, ...)`.
          state: the context of the stages. Its outputs are stacked along an axis of steps,
            `(num_iterations, num_stages, ...)`; see `by_microbatch`.
          xs: values per step, arrays `(num_iterations, ...)`.
          **scan_kwargs: as for `weft.hierarchy.transforms.scan`.

        Returns the outputs of the last stage, and the stacked values.
        """
        raise NotImplementedError(type(self))

    def _initial_inputs(self, microbatches: PyTree) -> PyTree:
        """Returns real rows as initial input of all stages, so that none fails on them."""

        def repeat_first(x: Tensor) -> Tensor:
            return jnp.broadcast_to(x[:1], (self.num_stages, *x.shape[1:]))

        return shard_stages(jax.tree.map(repeat_first, microbatches))


class GPipeSchedule(BaseSchedule):
    """Schedule that runs all microbatches in sequence (Huang et al., 2019).

    Each device holds the inputs and results of all microbatches.
    """

    def scan(
        self,
        fn: StepFn,
        *,
        carry: PyTree,
        state: InvocationContext,
        xs: PyTree,
        **scan_kwargs: Any,
    ) -> tuple[PyTree, PyTree]:
        def body(
            stage_inputs: PyTree, step_inputs: tuple[PyTree, PyTree]
        ) -> tuple[PyTree, PyTree]:
            microbatch, x = step_inputs
            stage_inputs = jax.tree.map(
                lambda inputs, new: replace_stage(inputs, 0, new[None]),
                stage_inputs,
                microbatch,
            )
            stage_outputs, y = fn(shard_stages(stage_inputs), x)
            # The shift wraps around, so that the result of the last stage is where the next
            # microbatch replaces it.
            next_inputs = shift_stages(shard_stages(stage_outputs), 1)
            result = jax.tree.map(operator.itemgetter(0), next_inputs)
            return next_inputs, (result, y)

        # Rows that enter after the last microbatch are discarded.
        numbers = jnp.minimum(
            jnp.arange(self.num_iterations), self.num_microbatches - 1
        )
        microbatches = jax.tree.map(lambda x: x[numbers], carry)
        _, (results, ys) = transforms.scan(
            state,
            body,
            self._initial_inputs(carry),
            (microbatches, xs),
            state_axis=None,
            length=self.num_iterations,
            **scan_kwargs,
        )
        # The first result is that of the step in which the first microbatch is at the last stage.
        return jax.tree.map(lambda x: x[self.num_stages - 1 :], results), ys


class InterleavedSchedule(BaseSchedule):
    """Schedule in which each stage has several parts of the layers (Narayanan et al., 2021).

        step        0    1    2    3    4      M = 2 microbatches, N = 2 stages, num_repeats = 2;
        stage 0     m0   m1   m0'  m1'  .      ' is for the second part of each stage.
        stage 1     .    m0   m1   m0'  m1'

    Of N stages with R parts, stage n has the parts n, n + N, n + 2N, ... of the layers. As many
    microbatches as there are stages go around R times, before the next ones enter. The bubble is R
    times smaller, and stages exchange R times as much. The backward pass computes each part again
    from its input: else the weights of a part would be kept for each step.
    """

    class Config(BaseSchedule.Config):
        """Configures an InterleavedSchedule."""

        num_repeats: int = 2
        """Number of parts of the layers that each stage has."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        _check_multiple_of_stages(cfg, "an InterleavedSchedule")

    @property
    def num_repeats(self) -> int:
        return self.config.num_repeats

    def repeats(self) -> np.ndarray:
        # The stage n works on a microbatch n steps after the first stage.
        steps = np.arange(self.num_iterations)[:, None]
        numbers = np.maximum(steps - np.arange(self.num_stages), 0)
        return numbers // self.num_stages % self.num_repeats

    def by_microbatch(self, x: Tensor) -> Tensor:
        x = transpose_from_pipeline_stage_outputs(x)
        shape_of_result = x.shape[2:]
        num_stages = self.num_stages
        # Groups of microbatches, repeats, microbatches of a group, stages.
        x = x.reshape(
            -1, self.num_repeats, num_stages, num_stages, *shape_of_result
        )
        return jnp.swapaxes(x, 1, 2).reshape(
            self.num_microbatches, -1, *shape_of_result
        )

    def scan(
        self,
        fn: StepFn,
        *,
        carry: PyTree,
        state: InvocationContext,
        xs: PyTree,
        **scan_kwargs: Any,
    ) -> tuple[PyTree, PyTree]:
        def body(
            stage_inputs: PyTree, step_inputs: tuple[PyTree, Tensor, PyTree]
        ) -> tuple[PyTree, PyTree]:
            microbatch, is_new, x = step_inputs
            stage_inputs = jax.tree.map(
                lambda inputs, new: jnp.where(
                    is_new, replace_stage(inputs, 0, new[None]), inputs
                ),
                stage_inputs,
                microbatch,
            )
            stage_outputs, y = fn(shard_stages(stage_inputs), x)
            # The shift wraps around: what leaves the last stage is at the first one for its next
            # part, or a result.
            next_inputs = shift_stages(shard_stages(stage_outputs), 1)
            result = jax.tree.map(operator.itemgetter(0), next_inputs)
            return next_inputs, (result, y)

        num_stages, num_repeats = self.num_stages, self.num_repeats
        steps = np.arange(self.num_iterations)
        groups, steps_of_group = np.divmod(steps, num_stages * num_repeats)
        numbers = groups * num_stages + steps_of_group % num_stages
        numbers = np.minimum(numbers, self.num_microbatches - 1)
        microbatches = jax.tree.map(lambda x: x[numbers], carry)
        is_new = jnp.asarray(steps_of_group < num_stages)
        _, (results, ys) = transforms.scan(
            state,
            body,
            self._initial_inputs(carry),
            (microbatches, is_new, xs),
            state_axis=None,
            length=self.num_iterations,
            **scan_kwargs,
        )
        # A microbatch leaves when the last stage has run its last part.
        is_last = steps_of_group >= num_stages * (num_repeats - 1)
        last_steps = np.flatnonzero(is_last)[: self.num_microbatches]
        return jax.tree.map(
            lambda x: x[last_steps + num_stages - 1], results
        ), ys


def _check_multiple_of_stages(cfg: BaseSchedule.Config, schedule: str) -> None:
    if cfg.num_microbatches % cfg.num_stages:
        raise LayerConfigError(
            f"num_microbatches={cfg.num_microbatches} is not a multiple of num_stages="
            f"{cfg.num_stages}, which {schedule} needs; set a multiple, or use a "
            "GPipeSchedule."
        )


class StreamSchedule(BaseSchedule):
    """Schedule in the order of GPipe, with inputs and results sharded over the stages.

    Each device holds `num_microbatches / num_stages` microbatches. They move towards the first
    stage, one stage per step, and results follow them.
    """

    def __init__(self, cfg: BaseSchedule.Config):
        super().__init__(cfg)
        _check_multiple_of_stages(cfg, "a StreamSchedule")

    def scan(
        self,
        fn: StepFn,
        *,
        carry: PyTree,
        state: InvocationContext,
        xs: PyTree,
        **scan_kwargs: Any,
    ) -> tuple[PyTree, PyTree]:
        num_stages = self.num_stages
        num_columns = self.num_microbatches // num_stages

        # The stream holds the microbatches, `(num_stages, num_columns, ...)`, one row per stage.
        # Step t moves column `t % num_columns` towards the first stage, by one: what is there
        # enters the pipeline, and the last stage gets its own result.
        def body(
            buffers: tuple[PyTree, PyTree], step_inputs: tuple[Tensor, PyTree]
        ) -> tuple[tuple[PyTree, PyTree], PyTree]:
            stage_inputs, stream = buffers
            step, x = step_inputs
            number = step % num_columns
            column = jax.tree.map(lambda x: x[:, number], stream)
            stage_inputs = jax.tree.map(
                lambda inputs, new: replace_stage(inputs, 0, new),
                stage_inputs,
                column,
            )
            stage_outputs, y = fn(shard_stages(stage_inputs), x)
            stage_outputs = shard_stages(stage_outputs)
            column = jax.tree.map(
                lambda moved, results: replace_stage(
                    moved, num_stages - 1, results
                ),
                shift_stages(column, -1),
                stage_outputs,
            )
            stream = jax.tree.map(
                lambda x, new: x.at[:, number].set(new), stream, column
            )
            return (shift_stages(stage_outputs, 1), shard_stages(stream)), y

        stream = jax.tree.map(
            lambda x: x.reshape(num_stages, num_columns, *x.shape[1:]), carry
        )
        buffers = (self._initial_inputs(carry), shard_stages(stream))
        steps = jnp.arange(self.num_iterations)
        (_, stream), ys = transforms.scan(
            state, body, buffers, (steps, xs), state_axis=None, **scan_kwargs
        )

        def in_order(x: Tensor) -> Tensor:
            # Results came num_stages - 1 steps after the inputs whose places they take.
            return jnp.roll(x, 1 - num_stages, axis=1).reshape(-1, *x.shape[2:])

        return jax.tree.map(in_order, stream), ys


def shift_stages(x: PyTree, shift: int) -> PyTree:
    """Passes the values of each stage to the next, or for -1 to the previous one."""
    return jax.tree.map(lambda x: jnp.roll(x, shift, axis=0), x)


def replace_stage(x: Tensor, stage: int | Tensor, values: Tensor) -> Tensor:
    """Replaces the values of one stage without communication between stages."""
    index = jax.lax.broadcasted_iota(
        jnp.int32, (x.shape[0],) + (1,) * (x.ndim - 1), 0
    )
    return jnp.where(index == stage, values, x)


def transpose_to_pipeline_stage_inputs(
    x: Tensor, partition_spec: PartitionSpec | None = None
) -> Tensor:
    """Converts an axis of microbatches to an axis of steps.

    Args:
      x: `Num[Array, "num_microbatches num_stages *shape"]`.

    Returns `Num[Array, "num_microbatches+num_stages-1 num_stages *shape"]`: in step `t`, stage `n`
    works on microbatch `t - n`; 0 for idle stages.

    >>> transpose_to_pipeline_stage_inputs(jnp.array([[1, 2], [3, 4]])).tolist()
    [[1, 0], [3, 2], [0, 4]]
    """
    num_stages = x.shape[1]
    padding = jnp.zeros((num_stages - 1, *x.shape[1:]), x.dtype)
    by_step = _roll_stages(
        jnp.concatenate([x, padding]), jnp.arange(num_stages)
    )
    return parameter_spec.maybe_shard(by_step, partition_spec)


def _roll_stages(x: Tensor, shifts: Tensor) -> Tensor:
    """Rolls the first axis of an array `(steps, stages, ...)`, by the shift of each stage."""

    def roll(stage: Tensor, shift: Tensor) -> Tensor:
        return jnp.roll(stage, shift, axis=0)

    return jax.vmap(roll, in_axes=(1, 0), out_axes=1)(x, shifts)


def transpose_from_pipeline_stage_outputs(
    x: Tensor, partition_spec: PartitionSpec | None = None
) -> Tensor:
    """Converts an axis of steps to an axis of microbatches.

    Args:
      x: `Num[Array, "num_microbatches+num_stages-1 num_stages *shape"]`.

    Returns `Num[Array, "num_microbatches num_stages *shape"]`: for microbatch `m`, the result of
    stage `n` in step `m + n`.

    >>> transpose_from_pipeline_stage_outputs(jnp.array([[1, 0], [3, 2], [0, 4]])).tolist()
    [[1, 2], [3, 4]]
    """
    num_steps, num_stages = x.shape[:2]
    num_microbatches = num_steps - num_stages + 1
    by_microbatch = _roll_stages(x, -jnp.arange(num_stages))[:num_microbatches]
    return parameter_spec.maybe_shard(by_microbatch, partition_spec)


class Pipeline(Repeat):
    """Layer that runs a child "layer" `num_layers` times, as stages of a pipeline.

    A subclass defines `forward`, which calls `_run`.

    >>> from weft.hierarchy.layers import Linear
    >>> class PipelinedLinear(Pipeline):
    ...     def forward(self, x):
    ...         return self._run(lambda x, _: (self.layer(x), None), x).carry
    >>> cfg = PipelinedLinear.default_config().set(num_layers=4, num_microbatches=2, name="stack")
    >>> _ = cfg.set(layer=Linear.default_config().set(input_dim=4, output_dim=4))
    >>> cfg.instantiate(parent=None).create_parameter_specs_recursively()["layer"]["weight"].shape
    (4, 4, 4)

    With an `InterleavedSchedule`, the parameters of the layers have an axis of repeats and one of
    stages. Their order is that of the layers, too.

    >>> _ = cfg.set(schedule=InterleavedSchedule.default_config().set(num_repeats=2))
    >>> cfg.instantiate(parent=None).create_parameter_specs_recursively()["layer"]["weight"].shape
    (2, 2, 4, 4)
    """

    class Config(Repeat.Config):
        """Configures a Pipeline."""

        num_microbatches: Required[int] = REQUIRED
        """Number of parts of a batch, ideally several times the number of stages; see the
        schedule's `bubble_share`."""
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
                "expected GPipeSchedule.default_config(), InterleavedSchedule.default_config() or "
                "StreamSchedule.default_config()."
            )
        num_repeats = num_repeats_of(cfg.schedule)
        if num_repeats < 1 or cfg.num_layers % num_repeats:
            raise LayerConfigError(
                f"{self.path()}: num_layers={cfg.num_layers} is not a multiple of num_repeats="
                f"{num_repeats} of the schedule; set a divisor."
            )
        try:
            self.schedule: BaseSchedule = cfg.schedule.clone(
                num_stages=cfg.num_layers // num_repeats,
                num_microbatches=cfg.num_microbatches,
            ).instantiate()
        except LayerConfigError as error:
            raise LayerConfigError(f"{self.path()}: {error}") from None

    def _stacked_sizes(self, name: str) -> tuple[int, ...]:
        if name != "layer" or self.schedule.num_repeats == 1:
            return super()._stacked_sizes(name)
        return (self.schedule.num_repeats, self.schedule.num_stages)

    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs, with the axis of stages named "pipeline"."""
        specs = super().create_parameter_specs_recursively()
        layer_specs = stacked_parameter_specs(
            self.layer, (self.schedule.num_stages,)
        )
        num_repeats = self.schedule.num_repeats

        def laid_out(spec: parameter_spec.ParameterSpec) -> Any:
            spec = parameter_spec.with_leading_axis_name(spec, PIPELINE_AXIS)
            if num_repeats == 1:
                return spec
            return parameter_spec.with_leading_axis(spec, num_repeats)

        specs["layer"] = jax.tree.map(laid_out, layer_specs)
        return specs

    def _scan_kwargs(self) -> dict[str, Any]:
        scan_kwargs = super()._scan_kwargs()
        if self.schedule.num_repeats > 1 and self.is_training:
            # What a step selects from the parameters would be kept for its backward pass.
            scan_kwargs["remat_kwargs"] = scan_kwargs["remat_kwargs"] or {}
            scan_kwargs["unroll"] = 1
        return scan_kwargs

    def _run(
        self, fn: StepFn, carry: PyTree = None, *, xs: PyTree = None
    ) -> Repeat.Output:
        """Runs the pipeline.

        Args:
          fn: takes a microbatch of the carry and a slice of `xs`; returns the next carry and values
            to stack. It calls `self.layer`, which has the parameters of the stage, and a key and
            outputs per stage and microbatch.
          carry: the batch, a pytree of arrays `(batch, ...)`.
          xs: a pytree of arrays with a leading axis of layers, the same for all microbatches.

        Returns:
          The output of the last stage, and the stacked values, `(num_layers, batch, ...)` if `fn`
          returns arrays with a microbatch's rows.

          Summaries of layer i are added under "layer{i}", merged over its microbatches. State
          updates are stacked under "layer": the mean over microbatches, which all start from the
          same state; for integers, the last. Module outputs that `drop_output` keeps are stacked
          under "layer" with axes of layers and microbatches; scalars, and names that end in
          "loss", are averaged over microbatches.

        Raises ArgumentShapeError if the batch does not divide into microbatches.
        """
        schedule = self.schedule
        context = self.get_invocation_context()
        cut = _CUT.get()
        if cut is not None:
            return cut.leave_out(self, fn, carry, xs)
        if is_as_on_one_device():
            return self._run_sequentially(fn, carry, xs=xs)
        layer_context = context.add_child("layer", prng_key=context.prng_key)
        body_context = layer_context.fork()
        run_stages = transforms.vmap(
            fn,
            axis_size=schedule.num_stages,
            spmd_axis_name=axes_of(stage_layout()) or None,
        )
        xs = jax.tree.map(self._split_repeats, xs)

        def run_step(stage_inputs: PyTree, repeats: Tensor | None) -> Any:
            if repeats is None:
                return run_stages(stage_inputs, xs)
            step_context = require_context("the pipeline")
            with set_current_context(
                step_context.fork_with_outputs(
                    state=_select_repeats(step_context.state, repeats)
                ),
                require_parent=False,
            ):
                return run_stages(stage_inputs, _select_repeats(xs, repeats))

        carry, ys = schedule.scan(
            run_step,
            carry=jax.tree.map(self._split_microbatches, carry),
            state=body_context,
            xs=schedule.repeats(),
            **self._scan_kwargs(),
        )
        outputs = body_context.output_collection
        outputs = jax.tree.map(schedule.by_microbatch, outputs)
        self._add_outputs(layer_context, self._reduce_microbatches(outputs))
        carry = jax.tree.map(_merge_microbatches, carry)
        ys = jax.tree.map(schedule.by_microbatch, ys)
        return Repeat.Output(
            carry, jax.tree.map(jax.vmap(_merge_microbatches, in_axes=1), ys)
        )

    def _run_sequentially(
        self, fn: StepFn, carry: PyTree, *, xs: PyTree
    ) -> Repeat.Output:
        """Runs the layers in sequence on the whole batch, as a `Repeat` does."""
        return super()._run(fn, carry, xs=xs)

    def _state_by_iteration(self, state: NestedTensor) -> NestedTensor:
        if self.schedule.num_repeats == 1:
            return state
        num_layers = self.config.num_layers
        return jax.tree.map(
            lambda x: x.reshape(num_layers, *x.shape[2:]), state
        )

    def _split_repeats(self, x: Tensor) -> Tensor:
        """Returns values of all layers in the layout of their parameters."""
        return x.reshape(*self._stacked_sizes("layer"), *x.shape[1:])

    def _split_microbatches(self, x: Tensor) -> Tensor:
        num_microbatches = self.config.num_microbatches
        if x.ndim == 0 or x.shape[0] % num_microbatches:
            raise ArgumentShapeError(
                f"{self.path()}: a batch of shape {x.shape} does not divide into "
                f"num_microbatches={num_microbatches}; expected a multiple of {num_microbatches} "
                "rows."
            )
        # Row i goes to microbatch i % num_microbatches, so that rows stay on their devices and each
        # microbatch is sharded like the batch.
        return jnp.moveaxis(x.reshape(-1, num_microbatches, *x.shape[1:]), 1, 0)

    def _reduce_microbatches(
        self, outputs: OutputCollection
    ) -> OutputCollection:
        summaries = outputs.summaries
        if jax.tree.leaves(summaries):
            by_microbatch: list[PyTree] = []
            for i in range(self.config.num_microbatches):
                by_microbatch.append(
                    jax.tree.map(operator.itemgetter(i), summaries)
                )
            summaries = transforms.reduce_summaries(by_microbatch)
        return OutputCollection(
            summaries,
            jax.tree.map(
                lambda x: self._split_repeats(_reduce_state_update(x)),
                outputs.state_updates,
            ),
            jax.tree_util.tree_map_with_path(
                _move_stages_first, outputs.module_outputs
            ),
        )


class Microbatch(NamedTuple):
    """Part of a batch, as a stage of a pipeline passes it to the next one.

    Attributes:
        rows: what the layers change.
        outputs: losses, summaries and state updates that the layers add, in one array
            `(num_stages, size)` for each dtype; 0 for stages that the rows have not reached.
    """

    rows: Any
    outputs: dict[str, Tensor]


class StageInputs(struct.PyTreeNode):
    """Inputs of the stages of a pipeline.

    Attributes:
        params: the state of all stages, with a leading axis of them.
        carry: the microbatch, which each stage changes.
        constants: other arrays of the model that the stages use.
        prng_key: None for a model without randomness.
    """

    params: Any
    carry: Microbatch
    constants: Any
    prng_key: Any


class PipelineCut:
    """Context in which a model is called without the stages of its pipeline.

    In it, the pipeline returns `results`, or its inputs if None. So a model is cut in two parts:
    one computes `inputs`, the other one the loss from the results, and `run_stage` is between.

        with PipelineCut() as cut: loss = model(batch)

    The results have the outputs of all layers, which the pipeline adds to those of the model. So
    the loss may depend on them, and has gradients by them.
    """

    def __init__(self, results: Microbatch | None = None):
        self._results = results
        self._jaxpr: Any = None
        self.inputs: Any = None
        self.num_stages = 0

    def __enter__(self) -> "PipelineCut":
        self._token = _CUT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CUT.reset(self._token)

    def leave_out(
        self, pipeline: Pipeline, fn: StepFn, carry: PyTree, xs: PyTree
    ) -> Repeat.Output:
        """Notes the stages of a pipeline with their inputs, and returns the results."""
        path = pipeline.path()
        if self.inputs is not None or pipeline.schedule.num_repeats > 1:
            raise LayerConfigError(
                f"{path}: the schedule 1F1B needs a model with one pipeline, which is not "
                "interleaved."
            )
        context = pipeline.get_invocation_context()
        layer_context = context.add_child("layer", prng_key=context.prng_key)
        drop_output = maybe_instantiate(pipeline.config.drop_output)
        stacked: PyTree = None
        packing = _Packing(None)

        def run_stage(
            state: PyTree, key: Tensor | None, rows: PyTree
        ) -> Microbatch:
            nonlocal stacked, packing
            stage_context = InvocationContext(
                "layer", None, pipeline.layer, state, context.is_training, key
            )
            with set_current_context(stage_context, require_parent=False):
                rows, stacked = fn(rows, None)
            if jax.tree.leaves((xs, stacked)):
                raise LayerConfigError(
                    f"{path}: its layers take or return values for each layer, such as the "
                    "probabilities of attention, which the schedule 1F1B does not support; use "
                    "GPipe."
                )
            outputs = stage_context.output_collection
            transforms.drop_outputs(outputs, drop_output)
            packing = _Packing(outputs)
            return Microbatch(rows, packing.pack(outputs))

        def of_stage(x: Tensor) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        key = layer_context.prng_key
        closed, stage_results = jax.make_jaxpr(run_stage, return_shape=True)(
            jax.tree.map(of_stage, layer_context.state), key, carry
        )
        self._jaxpr = closed.jaxpr
        self.num_stages = pipeline.schedule.num_stages
        no_outputs: dict[str, Tensor] = {}
        for dtype, vector in stage_results.outputs.items():
            no_outputs[dtype] = jnp.zeros(
                (self.num_stages, *vector.shape), vector.dtype
            )
        self.inputs = StageInputs(
            layer_context.state,
            Microbatch(carry, no_outputs),
            list(closed.consts),
            key,
        )
        results = self._results
        if results is None:
            results = self.inputs.carry
        outputs = packing.unpack(results.outputs)
        pipeline._add_outputs(layer_context, _of_one_microbatch(outputs))
        return Repeat.Output(results.rows, stacked)

    def run_stage(self, inputs: StageInputs, stage: Tensor) -> Microbatch:
        """Returns what the stage of this number passes on, given its own parameters."""
        key = inputs.prng_key
        if key is not None:
            key = jax.random.fold_in(key, stage)
        arguments = jax.tree.leaves((inputs.params, key, inputs.carry.rows))
        run = jax.extend.core.jaxpr_as_fun(
            jax.extend.core.ClosedJaxpr(self._jaxpr, inputs.constants)
        )
        structure = jax.tree.structure(inputs.carry)
        passed_on: Microbatch = structure.unflatten(run(*arguments))
        # It has the outputs of this stage only.
        outputs = jax.tree.map(
            lambda x, new: replace_stage(x, stage, new[None]),
            inputs.carry.outputs,
            passed_on.outputs,
        )
        return passed_on._replace(outputs=outputs)


class _Packing:
    """Layout of a pytree in one vector for each dtype, so that one message moves all arrays."""

    def __init__(self, tree: PyTree):
        self._leaves, self._structure = jax.tree.flatten(
            jax.eval_shape(lambda: tree)
        )

    def pack(self, tree: PyTree) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for shape, x in zip(self._leaves, jax.tree.leaves(tree), strict=True):
            parts.setdefault(str(shape.dtype), []).append(jnp.ravel(x))
        return {dtype: jnp.concatenate(xs) for dtype, xs in parts.items()}

    def unpack(self, vectors: dict[str, Tensor]) -> PyTree:
        """Returns the tree of arrays with a leading axis, from those of vectors."""
        starts = dict.fromkeys(vectors, 0)
        leaves: list[Tensor] = []
        for shape in self._leaves:
            dtype = str(shape.dtype)
            start = starts[dtype]
            starts[dtype] += shape.size
            x = vectors[dtype][:, start : starts[dtype]]
            leaves.append(x.reshape(len(x), *shape.shape))
        return self._structure.unflatten(leaves)


def _of_one_microbatch(outputs: OutputCollection) -> OutputCollection:
    """Returns outputs `(num_stages, ...)` as a pipeline reports those of a single microbatch."""
    module_outputs = jax.tree.map(lambda x: x[None], outputs.module_outputs)
    return outputs._replace(
        module_outputs=jax.tree_util.tree_map_with_path(
            _move_stages_first, module_outputs
        )
    )


_CUT: contextvars.ContextVar[PipelineCut | None] = contextvars.ContextVar(
    "cut", default=None
)


def pipelines_of(module: Module) -> Iterator[Pipeline]:
    """Yields the pipelines at and below a module; those inside a stage are a part of it."""
    if isinstance(module, Pipeline):
        yield module
        return
    for child in module.children.values():
        yield from pipelines_of(child)


def num_repeats_of(schedule: BaseSchedule.Config) -> int:
    """Returns the number of parts of the layers that each stage has."""
    return getattr(schedule, "num_repeats", 1)


def _select_repeats(x: PyTree, repeats: Tensor) -> PyTree:
    """Selects one of the parts of each stage from arrays `(num_repeats, num_stages, ...)`."""
    select = jax.vmap(
        jax.lax.dynamic_index_in_dim,
        in_axes=(1, 0, None, None),
        spmd_axis_name=axes_of(stage_layout()) or None,
    )
    return shard_stages(jax.tree.map(lambda x: select(x, repeats, 0, False), x))


def _merge_microbatches(x: Tensor) -> Tensor:
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def _reduce_state_update(x: Tensor) -> Tensor:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.mean(x, axis=0)
    return x[-1]


def _move_stages_first(path: jax.tree_util.KeyPath, x: Tensor) -> Tensor:
    """Moves the axis of stages first, or averages a loss over microbatches."""
    # A stage that is a loop has a loss per layer.
    if x.ndim == 2 or str(getattr(path[-1], "key", "")).endswith("loss"):
        return jnp.mean(x, axis=0)
    return jnp.moveaxis(x, 1, 0)
