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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from weft import config, errors
from weft.core.spmd import constrain
from weft.functional.arrays import counted
from weft.hierarchy import MetricAccumulator, NestedParameterSpec, ParameterSpec, WeightedSummary
from weft.hierarchy.context import OutputCollection, require_context
from weft.hierarchy.metrics import LossOfRows
from weft.trainer.optimizers.base import NestedOptParam, opt_param_values, path_name
from weft.trainer.update_transformation import ForwardFn, ForwardOutputs, ForwardPass
from weft.typing import DType, Nested, NestedTensor, PartitionSpec, T, Tensor


def forward_and_gradients(
    fn: ForwardFn, *, inputs: NestedTensor, opt_params: NestedOptParam, trainable: Nested[bool]
) -> tuple[ForwardPass, NestedTensor]:
    """Runs `fn` and computes the gradients of its loss, inside an invocation.

    Returns the forward pass, and gradients in the structure of the parameters, with an
    `optax.MaskedNode()` for each parameter that is not `trainable`.

    Raises UntrainableParameterError if a parameter to be trained has no floating-point dtype.
    """
    values = opt_param_values(opt_params)
    flags = jax.tree.leaves(trainable)
    leaves_with_paths, tree = jax.tree_util.tree_flatten_with_path(values)
    leaves = [leaf for _, leaf in leaves_with_paths]
    for (path, leaf), is_trained in zip(leaves_with_paths, flags, strict=True):
        if is_trained and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise errors.UntrainableParameterError(
                f"the parameter {path_name(path)!r} of dtype {leaf.dtype} has no gradients; "
                "exclude it "
                f"from training: `update_rules=[({path_name(path)!r}, UpdateType.STATE_UPDATES), "
                "...]`."
            )

    context = require_context("differentiation")

    def loss_fn(trained: list[Tensor]) -> tuple[Any, tuple[ForwardOutputs, OutputCollection]]:
        rest = iter(trained)
        both = zip(leaves, flags, strict=True)
        params = tree.unflatten([next(rest) if is_trained else leaf for leaf, is_trained in both])
        # What `fn` adds to the context is a result, so that it does not leak.
        outputs, additions = context.functional(fn)(model_params=params, inputs=inputs)
        return outputs.loss, (outputs, additions)

    trained = [leaf for leaf, is_trained in zip(leaves, flags, strict=True) if is_trained]
    (_, (outputs, additions)), grads = jax.value_and_grad(loss_fn, has_aux=True)(trained)
    context.add_outputs(additions)
    rest = iter(grads)
    masked = [next(rest) if is_trained else optax.MaskedNode() for is_trained in flags]
    forward_pass = ForwardPass(forward_fn=fn, inputs=inputs, model_params=values, outputs=outputs)
    return forward_pass, tree.unflatten(masked)


def with_gradient_layouts(
    params: NestedTensor, specs: NestedParameterSpec, gradient_specs: NestedParameterSpec
) -> NestedTensor:
    """Returns the parameters unchanged, with sharding constraints on their gradients.

    When gradients are summed over microbatches, both addends and sum have this sharding. Gradients
    with the same spec as their parameter need no constraint.
    """

    def laid_out(spec: ParameterSpec, of_gradient: ParameterSpec, x: Tensor) -> Tensor:
        is_trained = jnp.issubdtype(x.dtype, jnp.inexact) and not spec.is_state
        if not is_trained or spec.partition_spec == of_gradient.partition_spec:
            return x
        return _with_gradient_layout(x, of_gradient.partition_spec)

    return jax.tree.map(laid_out, specs, gradient_specs, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_gradient_layout(x: Tensor, spec: PartitionSpec) -> Tensor:
    del spec
    return x


_with_gradient_layout.defvjp(
    lambda x, spec: (x, None), lambda spec, _, gradient: (constrain(gradient, spec),)
)


ByPath = dict[str, Any]


def with_minibatch_steps(
    *,
    steps: int,
    metric_accumulator: config.InstantiableConfig | None = None,
    grad_dtype: DType | None = None,
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

    Returns a function from a forward function to a forward function. Only the loss of the result
    can be differentiated.

    Raises:
        GradientAccumulationError: If `steps` is below 1; when called, if the batch does not divide.
    """
    if steps < 1:
        raise errors.GradientAccumulationError(
            f"with_minibatch_steps got steps={steps}; expected 1 or more microbatches."
        )

    accumulator = metric_accumulator or MetricAccumulator.default_config()

    def transform(fn: ForwardFn) -> ForwardFn:
        def forward(*, model_params: NestedTensor, inputs: NestedTensor) -> ForwardOutputs:
            microbatches = _Microbatches(fn, steps, accumulator, grad_dtype)
            return microbatches.differentiable()(model_params, inputs)

        return forward if steps > 1 else fn

    return transform


@dataclasses.dataclass(frozen=True)
class _Microbatches:
    """Forward pass over the microbatches of a batch, and its derivative."""

    fn: ForwardFn
    steps: int
    metric_accumulator: config.InstantiableConfig
    grad_dtype: DType | None

    def differentiable(self) -> Callable[[Any, Any], ForwardOutputs]:
        """Returns the pass as a function of parameters and inputs with the loss's derivative."""

        @jax.custom_vjp
        def run(params: NestedTensor, inputs: NestedTensor) -> ForwardOutputs:
            return self._scan(params, inputs, trained=set())[0]

        def forward(params: NestedTensor, inputs: NestedTensor) -> tuple[ForwardOutputs, Any]:
            trained = {
                path for path, primal in _by_path(params, _is_primal).items() if primal.perturbed
            }
            params, inputs = jax.tree.map(lambda x: x.value, (params, inputs), is_leaf=_is_primal)
            return self._scan(params, inputs, trained)

        def backward(gradients: NestedTensor, cotangents: ForwardOutputs) -> tuple[Any, None]:
            factor = _of_loss_alone(cotangents)
            return jax.tree.map(lambda g: (factor * g).astype(g.dtype), gradients), None

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def _scan(
        self, params: NestedTensor, inputs: NestedTensor, trained: set[str]
    ) -> tuple[ForwardOutputs, Any]:
        """Returns the outputs of the whole batch, and gradients in the structure of the parameters.

        `trained` has the paths of the parameters with gradients; the others' gradients are None.
        """
        values, tree = _by_path(params), jax.tree.structure(params)
        microbatches = _cut(inputs, self.steps)
        grads = {
            path: jnp.zeros_like(x, self.grad_dtype or jnp.promote_types(x.dtype, jnp.float32))
            for path, x in values.items()
            if path in trained
        }

        def run(wrt: ByPath, inputs: NestedTensor) -> tuple[Tensor, ForwardOutputs]:
            now = {**values, **wrt}
            outputs = self.fn(
                model_params=tree.unflatten([now[path] for path in values]), inputs=inputs
            )
            return outputs.loss, outputs

        def one(grads: ByPath, inputs: NestedTensor) -> tuple[ByPath, Any]:
            wrt = {path: values[path] for path in grads}
            new, outputs = jax.grad(run, has_aux=True)(wrt, inputs)
            weight = _weight(outputs)
            new = {path: weight * counted(new[path], weight) for path in grads}
            grads = {path: g + new[path].astype(g.dtype) for path, g in grads.items()}
            return grads, (weight, outputs)

        grads, (weights, stacked) = jax.lax.scan(one, grads, microbatches)
        total = jnp.sum(weights)
        # A batch without a valid target has weight 0 and gradient 0.
        factor = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        gradients = [
            (factor * grads[path]).astype(x.dtype) if path in grads else None
            for path, x in values.items()
        ]
        return self._joined(stacked, factor * weights), tree.unflatten(gradients)

    def _joined(self, stacked: ForwardOutputs, shares: Tensor) -> ForwardOutputs:
        """Returns the outputs of the batch from those of the microbatches."""
        accumulator: MetricAccumulator = self.metric_accumulator.instantiate()
        for i in range(self.steps):
            accumulator.update(_at(stacked.output_collection.summaries, i))
        equal_shares = jnp.full(self.steps, 1 / self.steps, jnp.float32)
        collection = stacked.output_collection._replace(
            summaries=accumulator.summaries(),
            state_updates=_mean(stacked.output_collection.state_updates, equal_shares),
        )
        return stacked.replace(
            loss=_mean(stacked.loss, shares),
            aux=_mean_aux(stacked.aux, shares, equal_shares),
            output_collection=collection,
        )


def _mean(stacked: NestedTensor, shares: Tensor) -> Any:
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


def _mean_aux(stacked: NestedTensor, shares: Tensor, equal_shares: Tensor) -> Any:
    """Returns the mean over the first axis: of integers and booleans the plain one, in float32."""

    def mean(x: Tensor) -> Tensor:
        is_count = jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.bool_)
        if is_count:
            return _mean(x.astype(jnp.float32), equal_shares)
        return _mean(x, shares)

    return jax.tree.map(mean, stacked)


def _cut(inputs: object, steps: int) -> dict[str, Any]:
    """Returns the inputs of all microbatches, stacked on a first axis."""
    if not isinstance(inputs, dict) or "input_batch" not in inputs:
        raise errors.GradientAccumulationError(
            f"with_minibatch_steps(steps={steps}) got inputs of the forward pass without an "
            "'input_batch' to split. Make the inputs a dict with this key."
        )

    def cut(path: jax.tree_util.KeyPath, x: Tensor) -> Any:
        if jnp.ndim(x) == 0:
            return jnp.broadcast_to(x, (steps,))
        if x.shape[0] % steps:
            raise errors.GradientAccumulationError(
                f"input_batch/{path_name(path)} has {x.shape[0]} rows, which cannot be split into "
                f"steps={steps} microbatches of equal size. Set steps to a divisor of "
                f"{x.shape[0]}, or the batch size to a multiple of {steps}."
            )
        return jnp.swapaxes(x.reshape(x.shape[0] // steps, steps, *x.shape[1:]), 0, 1)

    def repeated(x: Tensor) -> Any:
        return jnp.broadcast_to(x, (steps, *jnp.shape(x)))

    parts = {name: jax.tree.map(repeated, value) for name, value in inputs.items()}
    parts["input_batch"] = jax.tree_util.tree_map_with_path(cut, inputs["input_batch"])
    if inputs.get("forward_key") is not None:
        parts["forward_key"] = jax.random.split(inputs["forward_key"], steps)
    return parts


def _weight(outputs: ForwardOutputs) -> Tensor:
    loss = outputs.output_collection.summaries.get("loss")
    weight = loss.weight if isinstance(loss, WeightedSummary) else 1
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


def _of_loss_alone(cotangents: ForwardOutputs) -> Tensor:
    """Returns the cotangent of the loss; raises if another output has one."""
    others = cotangents.replace(loss=None)
    for path, cotangent in jax.tree_util.tree_leaves_with_path(others, is_leaf=_is_zero):
        if not _is_zero(cotangent):
            raise errors.GradientAccumulationError(
                f"{path_name(path)} of a forward pass over microbatches was differentiated; only "
                "its loss can be. Add the required term to the model's loss."
            )
    loss = cotangents.loss
    return jnp.zeros(loss.shape, loss.dtype) if _is_zero(loss) else loss


def _by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> ByPath:
    return {
        path_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    }


def _at(tree: T, i: int) -> T:
    return jax.tree.map(lambda x: x[i], tree)


def _is_primal(x: object) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _is_zero(x: object) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)
