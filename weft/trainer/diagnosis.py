"""Search for the first module with an undefined value, by running the step again with checks.

The outputs of modules, and in the backward pass their gradients, are checked inside the compiled
step, including its loops, by JAX's `checkify`, which reports the first check that failed.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from weft.errors import ProcessesNotReadyError, ProcessLostError
from weft.hierarchy.module import Module
from weft.nnx.pytree import Pytree
from weft.nnx.variables import Variable
from weft.trainer.gradients import forward_and_gradients
from weft.trainer.interruption import compiled_unless_stopped
from weft.trainer.module_calls import ModuleCall, watched_calls
from weft.trainer.optimizer_base import NestedOptParam, opt_param_values, tree_paths
from weft.trainer.update_transformation import BackwardOutputs, ForwardBackwardOutputs, ForwardFn
from weft.typing import Tensor

logger = logging.getLogger(__name__)

UNKNOWN = "not known"
"""Name of the module if the search fails or the run is stopping."""

_ROOT = "the model itself"


class Diagnosis:
    """Finds where a step becomes undefined; compiles one program for each kind of search."""

    def __init__(self, step: Callable[..., Any]):
        self._step = step
        self._forward = _checked(self._run_forward)
        self._backward = _checked(self._run_backward)
        self._compiled: set[Callable[..., Any]] = set()
        self._ended_calls: list[str] = []
        self._trained: frozenset[str] = frozenset()

    def first_module(self, state: Any, batch: Any) -> str | None:
        """Returns the first module, in the order in which calls end, with an undefined output.

        Minus infinity does not count, since masks use it. The result is path, class and method,
        or `UNKNOWN`; None if all outputs are defined. `state` must be that before the step.
        """
        return self._first_failure(self._forward, state, batch)

    def first_gradient(
        self, state: Any, batch: Any, undefined: Sequence[str], trained: Collection[str]
    ) -> tuple[str | None, list[str]]:
        """Returns the first module in the backward pass that makes a gradient undefined.

        For steps in which `first_module` finds none; the result has the same form. Also returns
        the `undefined` parameters in the order of the backward pass. `undefined` and `trained` are
        paths of parameters.
        """
        self._trained = frozenset(trained)
        found = self._first_failure(self._backward, state, batch)
        last_call = {path: i for i, path in enumerate(self._ended_calls)}

        def used(name: str) -> int:
            owners = {_common(path, name): i for path, i in last_call.items()}
            return owners[max(owners)] if owners and max(owners) else -1

        return found, sorted(undefined, key=used, reverse=True)

    def _first_failure(self, checked: Any, state: Any, batch: Any) -> str | None:
        try:
            if checked not in self._compiled:
                lowered = checked.lower(state, batch)
                if not compiled_unless_stopped(lowered, "the search for the undefined module"):
                    logger.warning(
                        "the search for the undefined module is skipped: the run is stopping, or "
                        "another process could not compile it"
                    )
                    return UNKNOWN
                self._compiled.add(checked)
            text = checked(state, batch)[0].get()
        except (ProcessLostError, ProcessesNotReadyError):
            raise
        except Exception as failure:  # such as an operation that cannot be checked
            logger.warning("the search for the undefined module failed: %s", failure)
            return UNKNOWN
        return None if text is None else text.partition(" (`check` failed)")[0]

    def _run_forward(self, state: Any, batch: Any) -> None:
        self._ended_calls.clear()

        def check(call: ModuleCall, method: Any, args: Any, kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            for leaf in filter(_is_floating, jax.tree.leaves(result)):
                _check(~jnp.any(jnp.isnan(leaf) | jnp.isposinf(leaf)), str(call))
            self._ended_calls.append(call.path)
            return result

        with watched_calls(check):
            _, outputs = self._step(state, batch, learner=_learner(_ForwardOnly))
        _check(jnp.isfinite(outputs["loss"]), f"{_ROOT}, in its loss")

    def _run_backward(self, state: Any, batch: Any) -> None:
        open_calls = [_ROOT]

        def check(call: ModuleCall, method: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = _watched_backward((args, kwargs), str(call))
            open_calls.append(str(call))
            try:
                result = method(*args, **kwargs)
            finally:
                open_calls.pop()
            return _watched_backward(result, f"{open_calls[-1]}, after {call.path}")

        learner = _learner(_BackwardOnly)
        learner.trained = self._trained
        with watched_calls(check):
            self._step(state, batch, learner=learner)


def _checked(run: Callable[..., None]) -> Callable[..., Any]:
    return jax.jit(checkify.checkify(run, errors=checkify.user_checks))


def _check(holds: Tensor, name: str) -> None:
    checkify.check(holds, name.replace("{", "{{").replace("}", "}}"))


def _is_floating(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _watched_backward(tree: Any, name: str) -> Any:
    """Returns the same values with a check of their gradients in the backward pass."""

    @jax.custom_vjp
    def same(x: Tensor) -> Tensor:
        return x

    def backward(_: None, gradient: Tensor) -> tuple[Tensor]:
        _check(jnp.all(jnp.isfinite(gradient)), name)
        return (gradient,)

    same.defvjp(lambda x: (x, None), backward)
    return jax.tree.map(
        lambda x: same(x) if _is_floating(x) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Pytree | Variable),  # which have an identity
    )


def _common(module: str, parameter: str) -> int:
    """Returns how many last names of a module's path occur, in order, in a parameter's path."""
    names = parameter.split("/")[:-1]
    best, parts = 0, module.split(".")
    for start in range(len(parts)):
        rest = iter(names)
        if all(part in rest for part in parts[start:]):
            best = max(best, len(parts) - start)
    return best


def _learner(kind: type[Module]) -> Any:
    return kind.default_config().set(name="learner").instantiate(parent=None)


class _ForwardOnly(Module):
    """Substitute for a learner that runs the forward pass only."""

    def forward_and_backward(
        self, *, fn: ForwardFn, inputs: Any, opt_params: NestedOptParam
    ) -> ForwardBackwardOutputs:
        values = opt_param_values(opt_params)
        return ForwardBackwardOutputs(
            forward_outputs=fn(model_params=values, inputs=inputs),
            backward_outputs=BackwardOutputs(updated_params=values),
        )


class _BackwardOnly(Module):
    """Substitute for a learner that differentiates and changes nothing."""

    trained: frozenset[str] = frozenset()

    def forward_and_backward(
        self, *, fn: ForwardFn, inputs: Any, opt_params: NestedOptParam
    ) -> ForwardBackwardOutputs:
        trainable = jax.tree.map(lambda path: path in self.trained, tree_paths(opt_params))
        forward_pass, _ = forward_and_gradients(
            fn, inputs=inputs, opt_params=opt_params, trainable=trainable
        )
        return ForwardBackwardOutputs(
            forward_outputs=forward_pass.outputs,
            backward_outputs=BackwardOutputs(updated_params=opt_param_values(opt_params)),
        )
