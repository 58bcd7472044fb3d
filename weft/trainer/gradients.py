"""Forward passes, and gradients of their loss with respect to some of the parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from weft import lifting
from weft.core.layout import constrain
from weft.errors import UntrainableParameterError
from weft.hierarchy.context import require_context
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.hierarchy.transforms import CONTEXTS, in_context
from weft.lifting import DIFF
from weft.trainer.optimizer_base import NestedOptParam, opt_param_values, path_name
from weft.trainer.update_transformation import ForwardFn, ForwardOutputs, ForwardPass
from weft.typing import Nested, NestedTensor, PartitionSpec, Tensor


def forward_and_gradients(
    fn: ForwardFn, *, inputs: Any, opt_params: NestedOptParam, trainable: Nested[bool]
) -> tuple[ForwardPass, NestedTensor]:
    """Runs `fn` and computes the gradients of its loss, inside an invocation.

    Args:
      fn: the forward pass.
      inputs: its inputs.
      opt_params: the parameters.
      trainable: whether to differentiate with respect to each parameter.

    Returns:
      The forward pass, and gradients in the structure of the parameters, with an
      `optax.MaskedNode()` for each parameter that is not trained.

    Raises:
      UntrainableParameterError: if a parameter to be trained has no floating-point dtype.
    """
    values = opt_param_values(opt_params)
    flags = jax.tree.leaves(trainable)
    leaves_with_paths, tree = jax.tree_util.tree_flatten_with_path(values)
    leaves = [leaf for _, leaf in leaves_with_paths]
    for (path, leaf), is_trained in zip(leaves_with_paths, flags, strict=True):
        if is_trained and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise UntrainableParameterError(
                f"the parameter {path_name(path)!r} of dtype {leaf.dtype} has no gradients; "
                "exclude it "
                f"from training: `update_rules=[({path_name(path)!r}, UpdateType.STATE_UPDATES), "
                "...]`."
            )

    def loss_fn(trained: list, frozen: list, inputs: Any) -> tuple[Any, ForwardOutputs]:
        rest = {True: iter(trained), False: iter(frozen)}
        params = tree.unflatten([next(rest[bool(is_trained)]) for is_trained in flags])
        outputs = fn(model_params=params, inputs=inputs)
        return outputs.loss, outputs

    # Crossing with the context keeps additions of `fn` from leaking out of the differentiation.
    differentiated = lifting.value_and_grad(
        CONTEXTS, in_context(loss_fn), wrt=(None, DIFF, None, None), has_aux=True
    )
    trained = [leaf for leaf, is_trained in zip(leaves, flags, strict=True) if is_trained]
    frozen = [leaf for leaf, is_trained in zip(leaves, flags, strict=True) if not is_trained]
    (_, outputs), (_, grads, *_) = differentiated(
        require_context("differentiation"), trained, frozen, inputs
    )
    rest = iter(grads)
    masked = [next(rest) if is_trained else optax.MaskedNode() for is_trained in flags]
    forward_pass = ForwardPass(forward_fn=fn, inputs=inputs, model_params=values, outputs=outputs)
    return forward_pass, tree.unflatten(masked)


def with_gradient_layouts(params: NestedTensor, specs: Any, gradient_specs: Any) -> NestedTensor:
    """Returns the parameters unchanged, with sharding constraints on their gradients.

    When gradients are summed over microbatches, both addends and sum have this sharding. Gradients
    with the same spec as their parameter need no constraint.
    """

    def laid_out(spec: ParameterSpec, of_gradient: ParameterSpec, x: Tensor) -> Tensor:
        is_trained = jnp.issubdtype(x.dtype, jnp.inexact) and not spec.is_state
        if not is_trained or spec.partition_spec == of_gradient.partition_spec:
            return x
        return _with_gradient_layout(x, of_gradient.partition_spec)

    def is_spec(x: Any) -> bool:
        return isinstance(x, ParameterSpec)

    return jax.tree.map(laid_out, specs, gradient_specs, params, is_leaf=is_spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_gradient_layout(x: Tensor, spec: PartitionSpec) -> Tensor:
    del spec
    return x


def _forward(x: Tensor, spec: PartitionSpec) -> tuple[Tensor, None]:
    del spec
    return x, None


def _backward(spec: PartitionSpec, _: None, gradient: Tensor) -> tuple[Tensor]:
    return (constrain(gradient, spec),)


_with_gradient_layout.defvjp(_forward, _backward)
