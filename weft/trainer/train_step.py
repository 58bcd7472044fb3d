"""Training step as a pure function of the state and a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from weft.core import spmd
from weft.errors import InputDatasetError
from weft.hierarchy import (
    Module,
    NestedParameterSpec,
    ParameterSpec,
    functional,
)
from weft.input import Input, InputDispatcher
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
from weft.typing import DType, NestedTensor, PartitionSpec, T, Tensor


class TrainerState(NamedTuple):
    """State that training changes, except for the position in the data.

    `prng_key` is for the next step, `model` has the model's parameters and other state, and
    `learner` the optimizer's state, moving averages of parameters, and counters.
    """

    prng_key: Any
    model: Any
    learner: Any


BatchTransform = Callable[[Any, jax.Array], Any]
"""Function of a batch and a PRNG key that returns another batch of the same shapes and dtypes."""

_TRANSFORM = 0x7472616E
"""Number of the key of transforms among those of a step."""


def transformed(batch: T, transform: BatchTransform, key: jax.Array) -> T:
    """Returns a transformed batch; raises an InputDatasetError if its form has changed."""
    new_batch = transform(batch, key)
    tree, new_tree = jax.tree.structure(batch), jax.tree.structure(new_batch)
    if tree != new_tree:
        raise InputDatasetError(
            f"the transform of batches returned {new_tree}; expected the fields that it was given, "
            f"{tree}."
        )
    fields = jax.tree_util.tree_leaves_with_path(batch)
    for (path, x), new_x in zip(
        fields, jax.tree.leaves(new_batch), strict=True
    ):
        old_type, new_type = jax.typeof(x), jax.typeof(new_x)
        if (old_type.shape, old_type.dtype) != (new_type.shape, new_type.dtype):
            raise InputDatasetError(
                f"the transform of batches returned {jax.tree_util.keystr(path)} as "
                f"{new_type.str_short()}; expected {old_type.str_short()}, as it was given."
            )
    return new_batch


def opt_params(
    model_params: NestedTensor, specs: NestedParameterSpec
) -> NestedOptParam:
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

    def select(
        spec: ParameterSpec, param: Tensor, cast_param: Tensor
    ) -> Tensor:
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
    batch_axis_names: str | Sequence[str] | None = None,
    batch_transform: BatchTransform | None = None,
    with_gradients: bool = False,
) -> tuple[TrainerState, dict[str, Any]]:
    """Runs the model on a batch and lets the learner update its parameters.

    Args:
        batch: as provided by the processes; `input_` dispatches it.
        model: returns a loss, maybe a `WeightedScalar`, and auxiliary outputs from
            `forward(input_batch)`.
        batch_axis_names: mesh axes over which the rows are split, if processes brought padding.
        batch_transform: changes the batch by a key, which is another one at each step.
        train_dtype: dtype of the computation, for all parameters or by path; None for that of each.
        with_gradients: whether to return the gradients that have to be finite.

    Returns the new state, and a dict of "loss", "aux", "summaries" and optionally "gradients".
    """
    # The key of the next step is in the state: a resumed run draws the same numbers.
    next_key, noise_key, forward_key, learner_key = jax.random.split(
        state.prng_key, 4
    )
    batch = input_.dispatch_global_batch(batch)
    if isinstance(input_.dispatcher, InputDispatcher):
        batch = _split_rows(batch, batch_axis_names)
    if batch_transform is not None:
        # Not one more part of the split: runs without a transform keep their keys.
        transform_key = jax.random.fold_in(state.prng_key, _TRANSFORM)
        batch = transformed(batch, batch_transform, transform_key)

    # The learner differentiates it, maybe for parts of the batch. All arrays that depend on the
    # batch are in `inputs`, so that it can be split.
    def forward(
        *, model_params: NestedTensor, inputs: Mapping[str, Any]
    ) -> ForwardOutputs:
        model_params = with_gradient_layouts(
            model_params, model_specs, gradient_specs
        )
        params = model.apply_parameter_noise_recursively(
            inputs["noise_key"], model_params
        )
        # Inside of the differentiated function: gradients have the dtypes of the stored parameters.
        cast_params, batch = cast_for_forward(
            params, inputs["input_batch"], train_dtype
        )
        params = keep_state_uncast(params, cast_params, model_specs)
        with explain_call_errors(model, batch):
            outputs, collection = functional(
                model,
                inputs["forward_key"],
                params,
                {"input_batch": batch},
                is_training=True,
            )
        loss, aux = check_outputs(model, outputs)
        summaries = with_returned_loss(collection.summaries, outputs)
        collection = collection._replace(summaries=summaries)
        return ForwardOutputs(loss=loss, aux=aux, output_collection=collection)

    inputs = {
        "input_batch": batch,
        "forward_key": forward_key,
        "noise_key": noise_key,
    }
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


def _split_rows(batch: T, batch_axis_names: str | Sequence[str] | None) -> T:
    """Splits rows over mesh axes, without regard to which process has read them."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows < spmd.num_parts(batch_axis_names):
        return batch
    return spmd.constrain(batch, PartitionSpec(batch_axis_names))


def loss_is_finite(loss: Tensor) -> bool:
    """Returns whether a loss is finite; waits for the step that computes it."""
    return bool(np.isfinite(np.asarray(loss)))
