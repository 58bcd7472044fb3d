"""The schedule 1F1B of a pipeline: each microbatch goes back as soon as it has gone forward.

GPipe runs all microbatches forward, and then all backward, so that all are kept in between. Here,
the last stage computes the loss of a microbatch and its gradient at once, and the stages before it
follow: none keeps more than 2 N - 1 microbatches, however many there are.

    step        0    1    2    3    4    5      N = 3 stages, M = 2 microbatches; b is backward.
    stage 0     m0   m1             b0   b1
    stage 1          m0   m1   b0   b1          In the first N - 1 steps nothing goes backward, in
    stage 2               m0   m1               the last N - 1 steps nothing forward: as with
                          b0   b1               GPipe, a stage is idle for (N - 1) / (M + N - 1).

A stage keeps the input of a microbatch, and computes its activations again when it goes backward.
Losses and other outputs of layers, such as those of experts, move along with the rows.
The loss is outside of the pipeline, so that this is a schedule of the whole forward pass: what is
before and after the stages runs for one microbatch at a time, too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft import errors
from weft.core.spmd import axes_of
from weft.functional.arrays import counted
from weft.hierarchy import MetricAccumulator
from weft.hierarchy.pipeline import (
    Microbatch,
    PipelineCut,
    StageInputs,
    replace_stage,
    shard_stages,
    shift_stages,
    stage_layout,
)
from weft.trainer.gradients import Microbatches, split_inputs, weight_of
from weft.trainer.update_transformation import ForwardFn, ForwardOutputs
from weft.typing import NestedTensor, PyTree, Tensor


def with_one_forward_one_backward(
    *, num_microbatches: int
) -> Callable[[ForwardFn], ForwardFn]:
    """Returns a transformation that runs a model with a pipeline by the schedule 1F1B.

    For `Learner.Config.forward_fn_transformation`, as `with_minibatch_steps`, whose microbatches
    and results it has: losses of layers, too, count by the weight of their microbatch.

    Raises LayerConfigError when called, if the model has not one pipeline, or its layers take or
    return values for each layer.
    """
    accumulator = MetricAccumulator.default_config()

    def transform(fn: ForwardFn) -> ForwardFn:
        def forward(
            *, model_params: NestedTensor, inputs: NestedTensor
        ) -> ForwardOutputs:
            microbatches = _PipelinedMicrobatches(
                fn, num_microbatches, accumulator, None
            )
            return microbatches.differentiable()(model_params, inputs)

        return forward

    return transform


class _Sums(NamedTuple):
    """Gradients summed over microbatches, of the model's parameters and of the stages' state."""

    trained: dict[int, Tensor]
    stages: PyTree


@dataclasses.dataclass(frozen=True)
class _ModelWithoutStages:
    """Model before and after the stages of its pipeline, for one microbatch at a time."""

    fn: ForwardFn
    leaves: list[Tensor]
    tree: Any
    microbatches: NestedTensor
    num_microbatches: int

    def call(
        self,
        trained: dict[int, Tensor],
        number: Tensor,
        results: Microbatch | None = None,
    ) -> tuple[ForwardOutputs, PipelineCut]:
        """Calls it with results of the stages, or their inputs; returns outputs and inputs."""
        # Before the first and after the last microbatch, rows whose results nobody uses.
        number = jnp.clip(number, 0, self.num_microbatches - 1)
        inputs = jax.tree.map(lambda x: x[number], self.microbatches)
        all_leaves = [
            trained.get(index, leaf) for index, leaf in enumerate(self.leaves)
        ]
        params = self.tree.unflatten(all_leaves)
        with PipelineCut(results) as cut:
            outputs = self.fn(model_params=params, inputs=inputs)
        if cut.inputs is None:
            raise errors.LayerConfigError(
                "the schedule 1F1B needs a model with a pipeline, such as a "
                "PipelinedTransformerLayer; this one called none."
            )
        cut.inputs = jax.tree.map(_strongly_typed, cut.inputs)
        return outputs, cut

    def stage_inputs(
        self, trained: dict[int, Tensor], number: Tensor
    ) -> StageInputs:
        """Returns the inputs of the stages, without their parameters."""
        return self.call(trained, number)[1].inputs.replace(params=None)

    def stage_params(self, trained: dict[int, Tensor]) -> PyTree:
        """Returns the parameters of the stages as the model passes them, such as in bfloat16."""
        return self.call(trained, jnp.int32(0))[1].inputs.params

    def loss_gradients(
        self, trained: dict[int, Tensor], number: Tensor, results: Microbatch
    ) -> tuple[dict[int, Tensor], PyTree, Tensor, ForwardOutputs]:
        """Returns the gradients of the weighted loss by parameters and results, and the outputs."""
        floats, others = _split_floats(results)

        def loss_of(
            trained: dict[int, Tensor], floats: PyTree
        ) -> tuple[Tensor, ForwardOutputs]:
            outputs, _ = self.call(
                trained, number, _join_floats(floats, others)
            )
            return outputs.loss, outputs

        _, pull, outputs = jax.vjp(loss_of, trained, floats, has_aux=True)
        weight = weight_of(outputs)

        def weighted(gradient: Tensor) -> Tensor:
            return (weight * counted(gradient, weight)).astype(gradient.dtype)

        param_gradients, result_cotangents = jax.tree.map(
            weighted, pull(jnp.ones_like(outputs.loss))
        )
        return param_gradients, result_cotangents, weight, outputs


class _Stages:
    """The stages of a pipeline; in each step, each runs a microbatch of its own."""

    def __init__(self, cut: PipelineCut):
        self._cut = cut
        self.count = cut.num_stages
        self.num_kept = 2 * self.count - 1
        self._numbers = jnp.arange(self.count)
        self._params = cut.inputs.params
        self.trained_params, self._other_params = _split_floats(self._params)

    def buffer(self) -> StageInputs:
        """Returns inputs of all stages before the first step: real rows, so that none fails."""

        def for_all_stages(x: Tensor) -> Tensor:
            return jnp.broadcast_to(x[None], (self.count, *x.shape))

        inputs = self._cut.inputs.replace(params=None)
        return shard_stages(jax.tree.map(for_all_stages, inputs))

    def keep(
        self, kept: StageInputs, buffer: StageInputs, step: Tensor
    ) -> StageInputs:
        """Keeps the inputs of a step in place of the oldest ones."""
        slot = step % self.num_kept
        return jax.tree.map(
            lambda all_x, x: jax.lax.dynamic_update_index_in_dim(
                all_x, x, slot, 0
            ),
            kept,
            buffer,
        )

    def _to_go_backward(self, kept: StageInputs, step: Tensor) -> StageInputs:
        """Returns the kept inputs of the microbatches that go backward in a step."""

        def select(x: Tensor, number: Tensor) -> Tensor:
            # This stage had its microbatch 2 * (count - 1 - number) steps ago.
            slot = (step + 2 * (number + 1 - self.count)) % self.num_kept
            return jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False)

        select_all = self._vmap(select, in_axes=(1, 0))
        return shard_stages(
            jax.tree.map(lambda x: select_all(x, self._numbers), kept)
        )

    def forward(self, buffer: StageInputs) -> StageInputs:
        """Returns what all stages pass on, without passing it."""
        carry = self._vmap(self._run)(self._params, buffer, self._numbers)
        return buffer.replace(carry=shard_stages(carry))

    def backward(
        self, kept: StageInputs, step: Tensor, cotangents: StageInputs
    ) -> tuple[PyTree, StageInputs]:
        """Returns the gradients of the stages' parameters, and the cotangents of their inputs."""
        floats, others = _split_floats(self._to_go_backward(kept, step))

        def pull_back(
            params: PyTree,
            other_params: PyTree,
            floats: StageInputs,
            others: StageInputs,
            number: Tensor,
            cotangents: StageInputs,
        ) -> tuple[PyTree, StageInputs]:
            def passed_on(params: PyTree, floats: StageInputs) -> StageInputs:
                inputs = _join_floats(floats, others)
                params = _join_floats(params, other_params)
                carry = self._run(params, inputs, number)
                # The rest is passed unchanged, so that its cotangents add up.
                return _split_floats(inputs.replace(carry=carry))[0]

            return jax.vjp(passed_on, params, floats)[1](cotangents)

        param_gradients, cotangents = self._vmap(pull_back)(
            self.trained_params,
            self._other_params,
            floats,
            others,
            self._numbers,
            cotangents,
        )
        return param_gradients, shard_stages(cotangents)

    def _run(
        self, params: PyTree, inputs: StageInputs, number: Tensor
    ) -> Microbatch:
        return self._cut.run_stage(inputs.replace(params=params), number)

    @staticmethod
    def _vmap(fn: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        names = axes_of(stage_layout()) or None
        return jax.vmap(fn, in_axes=in_axes, spmd_axis_name=names)


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Runs all stages at a step of the schedule: forward, backward, or both.

    At step `step`, the first stage begins microbatch `step`, the last stage ends `step - last`,
    and the first stage ends the backward pass of `step - 2 * last`.
    """

    model: _ModelWithoutStages
    stages: _Stages
    trained: dict[int, Tensor]

    @property
    def last(self) -> int:
        return self.stages.count - 1

    def warm_up(
        self, state: tuple[StageInputs, StageInputs], step: Tensor
    ) -> tuple[tuple[StageInputs, StageInputs], None]:
        buffer, kept, _ = self._forward(step, *state)
        return (buffer, kept), None

    def run_both(
        self,
        state: tuple[StageInputs, StageInputs, StageInputs, _Sums],
        step: Tensor,
    ) -> tuple[Any, tuple[Any, Any]]:
        buffer, kept, cotangents, sums = state
        buffer, kept, results = self._forward(step, buffer, kept)
        param_gradients, result_cotangents, weight, outputs = (
            self.model.loss_gradients(self.trained, step - self.last, results)
        )
        sums = sums._replace(trained=_add(sums.trained, param_gradients))
        cotangents, sums = self._backward(
            step, kept, cotangents, result_cotangents, sums
        )
        return (buffer, kept, cotangents, sums), (weight, outputs)

    def cool_down(
        self,
        state: tuple[StageInputs, _Sums],
        step: Tensor,
        kept: StageInputs,
    ) -> tuple[tuple[StageInputs, _Sums], None]:
        cotangents, sums = state
        return self._backward(step, kept, cotangents, None, sums), None

    def _forward(
        self, step: Tensor, buffer: StageInputs, kept: StageInputs
    ) -> tuple[StageInputs, StageInputs, Microbatch]:
        first_inputs = self.model.stage_inputs(self.trained, step)
        buffer = shard_stages(_with_stage(buffer, 0, first_inputs))
        kept = self.stages.keep(kept, buffer, step)
        # The shift wraps around, so that the results are where the next inputs replace them.
        buffer = shift_stages(self.stages.forward(buffer), 1)
        return buffer, kept, jax.tree.map(lambda x: x[0], buffer.carry)

    def _backward(
        self,
        step: Tensor,
        kept: StageInputs,
        cotangents: StageInputs,
        result_cotangents: PyTree,
        sums: _Sums,
    ) -> tuple[StageInputs, _Sums]:
        # What the last stage passes on goes to the loss, and nowhere else.
        last_cotangents = jax.tree.map(
            lambda x: jnp.zeros_like(x[0]), cotangents
        )
        if result_cotangents is not None:
            last_cotangents = last_cotangents.replace(carry=result_cotangents)
        cotangents = _with_stage(cotangents, self.last, last_cotangents)
        stage_gradients, cotangents = self.stages.backward(
            kept, step, cotangents
        )
        cotangents = shift_stages(cotangents, -1)

        def inputs_of(trained: dict[int, Tensor]) -> StageInputs:
            inputs = self.model.stage_inputs(trained, step - 2 * self.last)
            return _split_floats(inputs)[0]

        _, pull_back = jax.vjp(inputs_of, self.trained)
        input_cotangents = jax.tree.map(lambda x: x[self.last], cotangents)
        (param_gradients,) = pull_back(input_cotangents)
        sums = _Sums(
            _add(sums.trained, param_gradients),
            _add(sums.stages, stage_gradients),
        )
        return cotangents, sums


class _PipelinedMicrobatches(Microbatches):
    """Forward pass over the microbatches of a batch by 1F1B, and its derivative."""

    def scan(
        self,
        params: NestedTensor,
        inputs: NestedTensor,
        trained_indices: set[int],
    ) -> tuple[ForwardOutputs, PyTree]:
        leaves, tree = jax.tree.flatten(params)
        if not trained_indices:
            # Nothing goes backward: the schedule of the layer runs the whole batch.
            outputs = self.fn(model_params=params, inputs=inputs)
            return outputs, tree.unflatten([None] * len(leaves))
        trained = {index: leaves[index] for index in sorted(trained_indices)}
        model = _ModelWithoutStages(
            self.fn, leaves, tree, split_inputs(inputs, self.steps), self.steps
        )
        _, cut = model.call(trained, jnp.int32(0))
        stages = _Stages(cut)
        schedule = _Schedule(model, stages, trained)

        buffer = stages.buffer()
        kept = jax.tree.map(
            lambda x: jnp.broadcast_to(x[None], (stages.num_kept, *x.shape)),
            buffer,
        )
        cotangents = jax.tree.map(jnp.zeros_like, _split_floats(buffer)[0])
        sums = _Sums(
            jax.tree.map(self.zeros_like, trained),
            jax.tree.map(self.zeros_like, stages.trained_params),
        )
        last = schedule.last
        end = last + self.steps
        (buffer, kept), _ = jax.lax.scan(
            schedule.warm_up, (buffer, kept), jnp.arange(last)
        )
        (_, kept, cotangents, sums), (weights, outputs) = jax.lax.scan(
            schedule.run_both,
            (buffer, kept, cotangents, sums),
            jnp.arange(last, end),
        )
        (_, sums), _ = jax.lax.scan(
            functools.partial(schedule.cool_down, kept=kept),
            (cotangents, sums),
            jnp.arange(end, end + last),
        )

        def stage_params_of(trained: dict[int, Tensor]) -> PyTree:
            return _split_floats(model.stage_params(trained))[0]

        stage_params, pull_back = jax.vjp(stage_params_of, trained)
        stage_gradients = jax.tree.map(
            lambda total, x: total.astype(x.dtype), sums.stages, stage_params
        )
        (param_gradients,) = pull_back(stage_gradients)
        sums_of_trained = _add(sums.trained, param_gradients)
        return self.averaged(leaves, tree, sums_of_trained, weights, outputs)


def _strongly_typed(x: Tensor) -> Tensor:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jnp.asarray(x, x.dtype)


def _is_float(x: Tensor) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _split_floats(x: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the arrays of floating-point numbers in a tree, and all others, None elsewhere."""
    return (
        jax.tree.map(lambda x: x if _is_float(x) else None, x),
        jax.tree.map(lambda x: None if _is_float(x) else x, x),
    )


def _join_floats(floats: PyTree, others: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, other: other if x is None else x,
        floats,
        others,
        is_leaf=lambda x: x is None,
    )


def _with_stage(buffer: PyTree, stage: int, values: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, new: replace_stage(x, stage, new[None]), buffer, values
    )


def _add(sums: PyTree, x: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, x)
