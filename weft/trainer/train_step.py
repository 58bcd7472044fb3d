"""Training step as a pure function of the state and a batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from weft.hierarchy import Module, NestedParameterSpec, ParameterSpec, functional
from weft.input import Input
from weft.trainer.gradients import with_gradient_layouts
from weft.trainer.model import (
    PerParamDType,
    cast_for_forward,
    check_outputs,
    explain_call_errors,
    with_returned_loss,
)
from weft.trainer.optimizers.base import NestedOptParam, OptParam
from weft.trainer.update_transformation import ForwardOutputs
from weft.typing import DType, NestedTensor, Tensor


class TrainerState(NamedTuple):
    """State that training changes, except for the position in the data.

    `prng_key` is for the next step, `model` has the model's parameters and other state, and
    `learner` the optimizer's state, moving averages of parameters, and counters.
    """

    prng_key: Any
    model: Any
    learner: Any


def opt_params(model_params: NestedTensor, specs: NestedParameterSpec) -> NestedOptParam:
    """Converts parameters for the learner, with metadata from their `ParameterSpec`s."""

    def opt_param(spec: ParameterSpec, value: Tensor) -> OptParam:
        return OptParam(
            value=value,
            factorization_spec=spec.factorization,
            weight_decay_scale=spec.weight_decay_scale,
            is_state=spec.is_state,
        )

    return jax.tree.map(opt_param, specs, model_params)


def keep_state_uncast(
    params: NestedTensor, cast_params: NestedTensor, specs: NestedParameterSpec
) -> NestedTensor:
    """Returns cast parameters, and state uncast, since a moving average sums small numbers."""

    def select(spec: ParameterSpec, param: Tensor, cast_param: Tensor) -> Tensor:
        return param if spec.is_state else cast_param

    return jax.tree.map(select, specs, params, cast_params)


def train_step(
    state: TrainerState,
    batch: NestedTensor,
    *,
    model: Module,
    learner: Module,
    input_: Input,
    model_specs: NestedParameterSpec,
    gradient_specs: NestedParameterSpec,
    train_dtype: DType | PerParamDType | None,
    with_gradients: bool = False,
) -> tuple[TrainerState, dict[str, Any]]:
    """Runs the model on a batch and lets the learner update its parameters.

    Args:
        batch: as provided by the processes; `input_` dispatches it.
        model: returns a loss, maybe a `WeightedScalar`, and auxiliary outputs from
            `forward(input_batch)`.
        train_dtype: dtype of the computation, for all parameters or by path; None for that of each.
        with_gradients: whether to return the gradients that have to be finite.

    Returns the new state, and a dict of "loss", "aux", "summaries" and optionally "gradients".
    """
    # The key of the next step is in the state: a resumed run draws the same numbers.
    next_key, noise_key, forward_key, learner_key = jax.random.split(state.prng_key, 4)
    batch = input_.dispatch_global_batch(batch)

    # The learner differentiates it, maybe for parts of the batch. All arrays that depend on the
    # batch are in `inputs`, so that it can be split.
    def forward(*, model_params: NestedTensor, inputs: Mapping[str, Any]) -> ForwardOutputs:
        model_params = with_gradient_layouts(model_params, model_specs, gradient_specs)
        params = model.apply_parameter_noise_recursively(inputs["noise_key"], model_params)
        # Inside of the differentiated function: gradients have the dtypes of the stored parameters.
        cast_params, batch = cast_for_forward(params, inputs["input_batch"], train_dtype)
        params = keep_state_uncast(params, cast_params, model_specs)
        with explain_call_errors(model, batch):
            outputs, collection = functional(
                model, inputs["forward_key"], params, {"input_batch": batch}, is_training=True
            )
        loss, aux = check_outputs(model, outputs)
        summaries = with_returned_loss(collection.summaries, outputs)
        collection = collection._replace(summaries=summaries)
        return ForwardOutputs(loss=loss, aux=aux, output_collection=collection)

    inputs = {"input_batch": batch, "forward_key": forward_key, "noise_key": noise_key}
    results, learner_collection = functional(
        learner,
        prng_key=learner_key,
        state=state.learner,
        inputs={
            "fn": forward,
            "inputs": inputs,
            "opt_params": opt_params(state.model, model_specs),
        },
        method="forward_and_backward",
        is_training=True,
        copy_args_tree=False,
    )
    new_state = TrainerState(
        prng_key=next_key,
        model=results.backward_outputs.updated_params,
        learner=learner_collection.state_updates,
    )
    forward_outputs = results.forward_outputs
    outputs = {
        "loss": forward_outputs.loss,
        "aux": forward_outputs.aux,
        "summaries": {
            "model": forward_outputs.output_collection.summaries,
            "learner": learner_collection.summaries,
        },
    }
    if with_gradients:
        outputs["gradients"] = results.backward_outputs.gradients
    return new_state, outputs


def loss_is_finite(loss: Tensor) -> bool:
    """Returns whether a loss is finite; waits for the step that computes it."""
    return bool(np.isfinite(np.asarray(loss)))
