"""Which module is the first to give something undefined: the step is run again, and watched.

Each module's outputs are checked inside of the compiled step, in its loops as well, by JAX's
`checkify`, which reports the check that failed first.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from weft.hierarchy.module import Module, observed_calls
from weft.linen import intercept_methods
from weft.trainer.optimizer_base import NestedOptParam, opt_param_values
from weft.trainer.update_transformation import BackwardOutputs, ForwardBackwardOutputs, ForwardFn

logger = logging.getLogger(__name__)


def first_undefined_module(step: Callable[..., Any], state: Any, batch: Any) -> str | None:
    """The first module, in the order in which their calls end, with an undefined output.

    Minus infinity is not counted: masks are made of it.

    Args:
        step: the training step, not compiled, which takes another learner as well.
        state: before it; it is not changed.
        batch: of the step.

    Returns:
        Its path and method; None if all outputs are defined, or it cannot be said.
    """
    forward_only = _ForwardOnly.default_config().set(name="learner").instantiate(parent=None)

    def watched(state: Any, batch: Any) -> None:
        with _checked_outputs():
            _, outputs = step(state, batch, learner=forward_only)
        checkify.check(jnp.isfinite(outputs["loss"]), "the model itself, in its loss")

    try:
        error, _ = jax.jit(checkify.checkify(watched, errors=checkify.user_checks))(state, batch)
        text = error.get()
    except Exception as failure:  # such as an operation that cannot be checked
        logger.warning("which module was undefined cannot be said: %s", failure)
        return None
    return None if text is None else text.partition(" (`check` failed)")[0]


class _ForwardOnly(Module):
    """In the place of a learner: runs the forward pass, in which the first module is found."""

    def forward_and_backward(
        self, *, fn: ForwardFn, inputs: Any, opt_params: NestedOptParam
    ) -> ForwardBackwardOutputs:
        values = opt_param_values(opt_params)
        return ForwardBackwardOutputs(
            forward_outputs=fn(model_params=values, inputs=inputs),
            backward_outputs=BackwardOutputs(updated_params=values),
        )


@contextlib.contextmanager
def _checked_outputs() -> Iterator[None]:
    """Checks what modules of the hierarchy and of Linen give while it is open."""

    def check(name: str, result: Any) -> None:
        for leaf in jax.tree.leaves(result):
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating):
                undefined = jnp.any(jnp.isnan(leaf) | jnp.isposinf(leaf))
                checkify.check(~undefined, name)

    def of_hierarchy(module: Module, method: str, result: Any) -> None:
        check(f"{module.path()}, a {type(module).__name__} ({method})", result)

    def of_linen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = next_fun(*args, **kwargs)
        module = context.module
        name = "/".join(module.path) or "the model"
        check(f"{name}, a {type(module).__name__} ({context.method_name})", result)
        return result

    with observed_calls(of_hierarchy), intercept_methods(of_linen):
        yield
