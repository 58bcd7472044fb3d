"""Gradients of a forward pass's loss, of a whole batch or with gradient accumulation.

A batch that does not fit into memory at once is split into microbatches. A scan runs the forward
and backward pass of each and sums their gradients, so that only the activations of one are in
memory at a time:

    gradient = sum(w[i] * gradient of loss[i]) / sum(w[i])    over the microbatches i

`w[i]` is the weight of the `WeightedScalar` that the model returns as its loss, or reports as its
summary "loss", such as the number of valid targets; without one it is 1, with a warning. The result
equals that of the whole batch, up to rounding, if the loss is the mean that this weight describes
and examples are independent. Batch statistics, balance losses over a batch, and random masks
differ.

Microbatch i has the rows i, i + steps, ... of the batch, so that each device keeps its rows.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from weft import config, errors
from weft.core import spmd
from weft.core.spmd import constrain
from weft.functional.arrays import counted
from weft.hierarchy import (
    MetricAccumulator,
    NestedParameterSpec,
    ParameterSpec,
    WeightedSummary,
)
from weft.hierarchy.context import OutputCollection, require_context
from weft.hierarchy.metrics import LossOfRows
from weft.trainer.optimizers.base import (
    NestedOptParam,
    opt_param_values,
    path_name,
    tree_paths,
)
from weft.trainer.update_transformation import (
    ForwardFn,
    ForwardOutputs,
    ForwardPass,
)
from weft.typing import (
    DType,
    Nested,
    NestedTensor,
    PartitionSpec,
    PyTree,
    T,
    Tensor,
)


def forward_and_gradients(
    fn: ForwardFn,
    *,
    inputs: NestedTensor,
    opt_params: NestedOptParam,
    trainable: Nested[bool],
) -> tuple[ForwardPass, NestedTensor]:
    """Runs `fn` and computes the gradients of its loss, inside an invocation.

    Returns the forward pass, and gradients in the structure of the parameters, with an
    `optax.MaskedNode()` for each parameter that is not `trainable`.

    Raises UntrainableParameterError if a parameter to be trained has no floating-point dtype.
    """
    # Only the leaves that are trained are arguments of the loss; the others are constants.
    values = opt_param_values(opt_params)
    leaves, tree = jax.tree.flatten(values)
    paths = jax.tree.leaves(tree_paths(values))
    flags = jax.tree.leaves(trainable)
    trained_leaves: dict[int, Tensor] = {}  # by their index among all leaves
    for index, (path, leaf, is_trained) in enumerate(
        zip(paths, leaves, flags, strict=True)
    ):
        if is_trained:
            _check_trainable(path, leaf)
            trained_leaves[index] = leaf

    context = require_context("differentiation")

    def loss_fn(
        trained_leaves: dict[int, Tensor],
    ) -> tuple[Tensor, tuple[ForwardOutputs, OutputCollection]]:
        all_leaves = [
            trained_leaves.get(index, leaf) for index, leaf in enumerate(leaves)
        ]
        params = tree.unflatten(all_leaves)
        # What `fn` adds to the context is a result, so that it does not leak.
        outputs, additions = context.functional(fn)(
            model_params=params, inputs=inputs
        )
        return outputs.loss, (outputs, additions)

    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    (_, (outputs, additions)), gradients = value_and_grad(trained_leaves)
    context.add_outputs(additions)
    masked_gradients = [
        gradients.get(index, optax.MaskedNode())
        for index in range(tree.num_leaves)
    ]
    forward_pass = ForwardPass(
        forward_fn=fn, inputs=inputs, model_params=values, outputs=outputs
    )
    return forward_pass, tree.unflatten(masked_gradients)


def _check_trainable(path: str, leaf: Tensor) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise errors.UntrainableParameterError(
            f"the parameter {path!r} of dtype {leaf.dtype} has no gradients; exclude it from "
            f"training: `update_rules=[({path!r}, UpdateType.STATE_UPDATES), ...]`."
        )


def with_gradient_layouts(
    params: NestedTensor,
    specs: NestedParameterSpec,
    gradient_specs: NestedParameterSpec,
) -> NestedTensor:
    """Returns the parameters unchanged, with sharding constraints on their gradients.

    When gradients are summed over microbatches, both addends and sum have this sharding. Gradients
    with the same spec as their parameter need no constraint.
    """

    def laid_out(
        spec: ParameterSpec, gradient_spec: ParameterSpec, x: Tensor
    ) -> Tensor:
        is_trained = jnp.issubdtype(x.dtype, jnp.inexact) and not spec.is_state
        if (
            not is_trained
            or spec.partition_spec == gradient_spec.partition_spec
        ):
            return x
        return _with_gradient_layout(x, gradient_spec.partition_spec)

    return jax.tree.map(laid_out, specs, gradient_specs, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_gradient_layout(x: Tensor, spec: PartitionSpec) -> Tensor:
    del spec
    return x


_with_gradient_layout.defvjp(
    lambda x, spec: (x, None),
    lambda spec, _, gradient: (constrain(gradient, spec),),
)


def with_minibatch_steps(
    *,
    steps: int,
    metric_accumulator: config.InstantiableConfig | None = None,
    grad_dtype: DType | None = None,
    max_rows_per_device: int | None = None,
    batch_axis_names: str | Sequence[str] | None = "data",
) -> Callable[[ForwardFn], ForwardFn]:
    """Returns a transformation that runs a forward pass over microbatches, one after another.

    For `Learner.Config.forward_fn_transformation`. The inputs of the forward pass are a dict: its
    "input_batch" is split along the first axis of its arrays, each microbatch gets its own
    "forward_key", and the rest is passed unchanged.

    A step updates the state once: each microbatch starts from the state before the step, and the
    new state is the mean of theirs. The moving mean of a `BatchNorm` is then that of the whole
    batch, and a counter of steps counts one; integers are those of the last microbatch. The "aux"
    of the result is the mean of theirs, too, weighted as the loss is. Its integers and booleans are
    counts and flags, whose plain mean is a float32: `steps` times it is the count of the batch.

    Args:
        steps: The number of microbatches; must divide the number of rows.
        metric_accumulator: Merges the summaries of the microbatches; a `MetricAccumulator` if None.
        grad_dtype: The dtype of the sum; None for the parameters' dtypes, at least float32.
        max_rows_per_device: If a device would have more rows at a time, as when a run continues
            with fewer devices, there are more microbatches: the next multiple of `steps` that
            divides the rows.
        batch_axis_names: The mesh axes over which rows are split.

    Returns a function from a forward function to a forward function. Only the loss of the result
    can be differentiated.

    Raises:
        GradientAccumulationError: If `steps` or `max_rows_per_device` is below 1; when called, if
            the batch does not divide.
    """
    if steps < 1:
        raise errors.GradientAccumulationError(
            f"with_minibatch_steps got steps={steps}; expected 1 or more microbatches."
        )
    if max_rows_per_device is not None and max_rows_per_device < 1:
        raise errors.GradientAccumulationError(
            f"with_minibatch_steps got max_rows_per_device={max_rows_per_device}; expected 1 or "
            "more rows."
        )

    accumulator = metric_accumulator or MetricAccumulator.default_config()

    def transform(fn: ForwardFn) -> ForwardFn:
        def forward(
            *, model_params: NestedTensor, inputs: NestedTensor
        ) -> ForwardOutputs:
            num_steps = num_microbatches(
                _num_rows(inputs), steps, max_rows_per_device, batch_axis_names
            )
            if num_steps == 1:
                return fn(model_params=model_params, inputs=inputs)
            microbatches = Microbatches(fn, num_steps, accumulator, grad_dtype)
            return microbatches.differentiable()(model_params, inputs)

        is_needed = steps > 1 or max_rows_per_device is not None
        return forward if is_needed else fn

    return transform


def num_microbatches(
    rows: int,
    steps: int,
    max_rows_per_device: int | None,
    batch_axis_names: str | Sequence[str] | None,
) -> int:
    """Returns the number of microbatches of a batch on the current mesh.

    >>> num_microbatches(12, 1, None, "data"), num_microbatches(12, 1, 5, "data")
    (1, 3)
    """
    if max_rows_per_device is None:
        return steps
    num_parts = spmd.num_parts(batch_axis_names)
    for number in range(steps, rows + 1, steps):
        rows_per_device = -(-rows // (number * num_parts))
        if rows % number == 0 and rows_per_device <= max_rows_per_device:
            return number
    return steps


def _num_rows(inputs: NestedTensor) -> int:
    """Returns the number of rows of a batch, 0 if it has no array with rows."""
    batch = inputs.get("input_batch") if isinstance(inputs, dict) else None
    for leaf in jax.tree.leaves(batch):
        if jnp.ndim(leaf):
            return leaf.shape[0]
    return 0


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """Forward pass over the microbatches of a batch, and its derivative."""

    fn: ForwardFn
    steps: int
    metric_accumulator: config.InstantiableConfig
    grad_dtype: DType | None

    def differentiable(
        self,
    ) -> Callable[[NestedTensor, NestedTensor], ForwardOutputs]:
        """Returns the pass as a function of parameters and inputs with the loss's derivative."""

        @jax.custom_vjp
        def run(params: NestedTensor, inputs: NestedTensor) -> ForwardOutputs:
            return self.scan(params, inputs, trained_indices=set())[0]

        # The gradients are summed in the forward pass, microbatch by microbatch; the backward
        # pass only scales them.
        def forward(
            params: NestedTensor, inputs: NestedTensor
        ) -> tuple[ForwardOutputs, PyTree]:
            primals = jax.tree.leaves(params, is_leaf=_is_primal)
            trained_indices = {
                index for index, x in enumerate(primals) if x.perturbed
            }
            params, inputs = jax.tree.map(
                lambda x: x.value, (params, inputs), is_leaf=_is_primal
            )
            return self.scan(params, inputs, trained_indices)

        def backward(
            gradients: PyTree, cotangents: ForwardOutputs
        ) -> tuple[PyTree, None]:
            factor = _cotangent_of_loss(cotangents)
            return jax.tree.map(
                lambda g: (factor * g).astype(g.dtype), gradients
            ), None

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def scan(
        self,
        params: NestedTensor,
        inputs: NestedTensor,
        trained_indices: set[int],
    ) -> tuple[ForwardOutputs, PyTree]:
        """Returns the outputs of the whole batch, and gradients in the structure of the parameters.

        `trained_indices` are those of the leaves with gradients; the others' gradients are None.
        """
        leaves, tree = jax.tree.flatten(params)
        trained_leaves = {index: leaves[index] for index in trained_indices}

        def loss_fn(
            trained_leaves: dict[int, Tensor], inputs: NestedTensor
        ) -> tuple[Tensor, ForwardOutputs]:
            all_leaves = [
                trained_leaves.get(index, leaf)
                for index, leaf in enumerate(leaves)
            ]
            outputs = self.fn(
                model_params=tree.unflatten(all_leaves), inputs=inputs
            )
            return outputs.loss, outputs

        # Weighted sums as the carry: one microbatch's activations are in memory at a time.
        def add_microbatch(
            sums: dict[int, Tensor], inputs: NestedTensor
        ) -> tuple[dict[int, Tensor], tuple[Tensor, ForwardOutputs]]:
            gradients, outputs = jax.grad(loss_fn, has_aux=True)(
                trained_leaves, inputs
            )
            weight = weight_of(outputs)
            new_sums: dict[int, Tensor] = {}
            for index, gradient in gradients.items():
                weighted = weight * counted(gradient, weight)
                new_sums[index] = sums[index] + weighted.astype(
                    sums[index].dtype
                )
            return new_sums, (weight, outputs)

        zeros = {
            index: self.zeros_like(leaf)
            for index, leaf in trained_leaves.items()
        }
        microbatches = split_inputs(inputs, self.steps)
        sums, (weights, stacked_outputs) = jax.lax.scan(
            add_microbatch, zeros, microbatches
        )
        return self.averaged(leaves, tree, sums, weights, stacked_outputs)

    def averaged(
        self,
        leaves: list[Tensor],
        tree: Any,
        sums: dict[int, Tensor],
        weights: Tensor,
        stacked_outputs: ForwardOutputs,
    ) -> tuple[ForwardOutputs, PyTree]:
        """Returns the outputs of the batch and its gradients, from weighted sums by leaf."""
        total = jnp.sum(weights)
        # A batch without a valid target has weight 0 and gradient 0.
        factor = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        gradients: list[Tensor | None] = [None] * len(leaves)
        for index, gradient in sums.items():
            gradients[index] = (factor * gradient).astype(leaves[index].dtype)
        return self.merge(stacked_outputs, factor * weights), tree.unflatten(
            gradients
        )

    def zeros_like(self, x: Tensor) -> Tensor:
        dtype = self.grad_dtype or jnp.promote_types(x.dtype, jnp.float32)
        return jnp.zeros_like(x, dtype)

    def merge(self, stacked: ForwardOutputs, shares: Tensor) -> ForwardOutputs:
        """Returns the outputs of the batch from those of the microbatches, on a first axis."""
        accumulator: MetricAccumulator = self.metric_accumulator.instantiate()
        for i in range(self.steps):
            accumulator.update(_index(stacked.output_collection.summaries, i))
        equal_shares = jnp.full(self.steps, 1 / self.steps, jnp.float32)
        collection = stacked.output_collection._replace(
            summaries=accumulator.summaries(),
            state_updates=_mean(
                stacked.output_collection.state_updates, equal_shares
            ),
        )
        return stacked.replace(
            loss=_mean(stacked.loss, shares),
            aux=_mean_aux(stacked.aux, shares, equal_shares),
            output_collection=collection,
        )


def _mean(stacked: T, shares: Tensor) -> T:
    """Returns the weighted mean over the first axis, in the dtype of each array.

    Integers, booleans and keys, which have no mean of their dtype, are those of the last entry.
    """

    def mean(x: Tensor) -> Tensor:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[-1]
        values = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        values = counted(values, shares.reshape(-1, *[1] * (x.ndim - 1)))
        return jnp.tensordot(shares, values, 1).astype(x.dtype)

    return jax.tree.map(mean, stacked)


def _mean_aux(stacked: T, shares: Tensor, equal_shares: Tensor) -> T:
    """Returns the mean over the first axis: of integers and booleans the plain one, in float32."""

    def mean(x: Tensor) -> Tensor:
        is_count = jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(
            x.dtype, jnp.bool_
        )
        if is_count:
            return _mean(x.astype(jnp.float32), equal_shares)
        return _mean(x, shares)

    return jax.tree.map(mean, stacked)


def split_inputs(inputs: NestedTensor, steps: int) -> dict[str, PyTree]:
    """Returns the inputs of all microbatches, stacked on a first axis."""
    if not isinstance(inputs, dict) or "input_batch" not in inputs:
        raise errors.GradientAccumulationError(
            f"with_minibatch_steps(steps={steps}) got inputs of the forward pass without an "
            "'input_batch' to split. Make the inputs a dict with this key."
        )

    def repeat(x: Tensor) -> Tensor:
        return jnp.broadcast_to(x, (steps, *jnp.shape(x)))

    def split_rows(path: jax.tree_util.KeyPath, x: Tensor) -> Tensor:
        if jnp.ndim(x) == 0:
            return repeat(x)
        rows = x.shape[0]
        if rows % steps:
            raise errors.GradientAccumulationError(
                f"input_batch/{path_name(path)} has {rows} rows, which cannot be split into "
                f"steps={steps} microbatches of equal size. Set steps, or num_microbatches of a "
                f"pipeline, to a divisor of {rows}, or the batch size to a multiple of {steps}."
            )
        interleaved = x.reshape(rows // steps, steps, *x.shape[1:])
        return jnp.swapaxes(interleaved, 0, 1)

    stacked_inputs: dict[str, PyTree] = {}
    for name, value in inputs.items():
        if name == "input_batch":
            stacked_inputs[name] = jax.tree_util.tree_map_with_path(
                split_rows, value
            )
        elif name == "forward_key" and value is not None:
            key: Any = value
            stacked_inputs[name] = jax.random.split(key, steps)
        else:
            stacked_inputs[name] = jax.tree.map(repeat, value)
    return stacked_inputs


def weight_of(outputs: ForwardOutputs) -> Tensor:
    """Returns the weight of a microbatch's loss in that of the batch; warns if none is known."""
    loss = outputs.output_collection.summaries.get("loss")
    weight = 1
    if isinstance(loss, WeightedSummary):
        weight = loss.weight
    if not isinstance(loss, WeightedSummary) or isinstance(loss, LossOfRows):
        warnings.warn(
            "gradient accumulation weights all microbatches equally, since the model does not say "
            "what its loss is a mean over. If that is not the rows but, say, the tokens that are "
            "not padding, and microbatches have different numbers of them, the step differs from "
            "that of the whole batch. Return the loss as WeightedScalar(loss, weight), of "
            "weft.hierarchy, with the number of rows or tokens as its weight.",
            errors.LossWeightWarning,
            stacklevel=2,
        )
    return jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))


def _cotangent_of_loss(cotangents: ForwardOutputs) -> Tensor:
    """Returns the cotangent of the loss; raises if another output has one."""
    without_loss = cotangents.replace(loss=None)
    for path, cotangent in jax.tree_util.tree_leaves_with_path(
        without_loss, is_leaf=_is_zero
    ):
        if not _is_zero(cotangent):
            raise errors.GradientAccumulationError(
                f"{path_name(path)} of a forward pass over microbatches was differentiated; only "
                "its loss can be. Add the required term to the model's loss."
            )
    if _is_zero(cotangents.loss):
        return jnp.zeros(cotangents.loss.shape, cotangents.loss.dtype)
    return cotangents.loss


def _index(tree: T, i: int) -> T:
    return jax.tree.map(lambda x: x[i], tree)


def _is_primal(x: object) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _is_zero(x: object) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)
