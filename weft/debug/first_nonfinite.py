"""Search for the first module with an undefined value, by running the step again with checks.

The outputs of modules, and in the backward pass their gradients, are checked inside the compiled
step, including its loops, by JAX's `checkify`, which reports the first check that failed.

One observer receives the calls of a model's modules, of any library. These may be nested, and each
library names its own modules from its own root; here a path starts at the outermost root:

    trainer.model.decoder.head.layers.0    of NNX, in a module of Linen, in a layer of the hierarchy

Equinox and Flax NNX modules report no calls; the layer around them does.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from weft import errors, linen, nnx
from weft.distributed.peers import ThreadStack
from weft.distributed.preemption import compile_unless_stopped
from weft.hierarchy.context import ModuleNode, current_context
from weft.hierarchy.module import Module, intercept_module_calls
from weft.nnx.intercept import (
    intercept_calls,
    iter_objects,
    original_class,
    visiting,
)
from weft.trainer import gradients, train_step
from weft.trainer.optimizers.base import (
    NestedOptParam,
    opt_param_values,
    tree_paths,
)
from weft.trainer.update_transformation import (
    BackwardOutputs,
    ForwardBackwardOutputs,
    ForwardFn,
)
from weft.typing import NestedTensor, T, Tensor

logger = logging.getLogger(__name__)

UNKNOWN = "not known"
"""Name of the module if the search fails or the run is stopping."""

_ROOT = "the model itself"

Method = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class NonfiniteSearch:
    """Finds where a step becomes undefined; compiles one program for each kind of search."""

    def __init__(self, step: Callable[..., Any]):
        self._step = step
        self._forward = _jit_with_checks(self._run_forward)
        self._backward = _jit_with_checks(self._run_backward)
        self._compiled: set[Callable[..., Any]] = set()
        self._ended_calls: list[str] = []
        self._trained: frozenset[str] = frozenset()

    def first_module(
        self, state: train_step.TrainerState, batch: NestedTensor
    ) -> str | None:
        """Returns the first module, in the order in which calls end, with an undefined output.

        Minus infinity does not count, since masks use it. The result is path, class and method,
        or `UNKNOWN`; None if all outputs are defined. `state` must be that before the step.
        """
        return self._first_failure(self._forward, state, batch)

    def first_gradient(
        self,
        state: train_step.TrainerState,
        batch: NestedTensor,
        undefined: Sequence[str],
        trained: Collection[str],
    ) -> tuple[str | None, list[str]]:
        """Returns the first module in the backward pass that makes a gradient undefined.

        For steps in which `first_module` finds none; the result has the same form. Also returns
        the paths of `undefined` parameters, in the order of the backward pass.
        """
        self._trained = frozenset(trained)
        module = self._first_failure(self._backward, state, batch)
        order_of_use = {name: self._index_of_use(name) for name in undefined}
        return module, sorted(
            undefined, key=order_of_use.__getitem__, reverse=True
        )

    def _index_of_use(self, parameter: str) -> int:
        """Returns the index of the last call of the module that has a parameter; -1 for none."""
        index_of_use = -1
        most_names = 1
        for i, path in enumerate(self._ended_calls):
            common_names = _count_common_names(path, parameter)
            if common_names >= most_names:
                most_names = common_names
                index_of_use = i
        return index_of_use

    def _first_failure(
        self,
        checked: jax.stages.Wrapped,
        state: train_step.TrainerState,
        batch: NestedTensor,
    ) -> str | None:
        try:
            if checked not in self._compiled:
                lowered = checked.lower(state, batch)
                if not compile_unless_stopped(
                    lowered, "the search for the undefined module"
                ):
                    logger.warning(
                        "the search for the undefined module is skipped: the run is stopping, or "
                        "another process could not compile it"
                    )
                    return UNKNOWN
                self._compiled.add(checked)
            error, _ = checked(state, batch)
            text = error.get()
        except (errors.ProcessLostError, errors.ProcessesNotReadyError):
            raise
        except (
            Exception
        ) as failure:  # such as an operation that cannot be checked
            logger.warning(
                "the search for the undefined module failed: %s", failure
            )
            return UNKNOWN
        if text is None:
            return None
        module, _, _ = text.partition(" (`check` failed)")
        return module

    def _run_forward(
        self, state: train_step.TrainerState, batch: NestedTensor
    ) -> None:
        self._ended_calls.clear()

        def check(
            call: ModuleCall, method: Method, args: Args, kwargs: Kwargs
        ) -> Any:
            result = method(*args, **kwargs)
            for leaf in filter(_is_floating, jax.tree.leaves(result)):
                _check(
                    ~jnp.any(jnp.isnan(leaf) | jnp.isposinf(leaf)), str(call)
                )
            self._ended_calls.append(call.path)
            return result

        with trace_calls(check):
            _, outputs = self._step(state, batch, learner=_idle_learner(None))
        _check(jnp.isfinite(outputs["loss"]), f"{_ROOT}, in its loss")

    def _run_backward(
        self, state: train_step.TrainerState, batch: NestedTensor
    ) -> None:
        open_calls = [_ROOT]

        def check(
            call: ModuleCall, method: Method, args: Args, kwargs: Kwargs
        ) -> Any:
            args, kwargs = _check_gradients((args, kwargs), str(call))
            open_calls.append(str(call))
            try:
                result = method(*args, **kwargs)
            finally:
                open_calls.pop()
            return _check_gradients(
                result, f"{open_calls[-1]}, after {call.path}"
            )

        with trace_calls(check):
            self._step(state, batch, learner=_idle_learner(self._trained))


def _jit_with_checks(run: Callable[..., None]) -> jax.stages.Wrapped:
    return jax.jit(checkify.checkify(run, errors=checkify.user_checks))


def _check(holds: Tensor, name: str) -> None:
    checkify.check(holds, name.replace("{", "{{").replace("}", "}}"))


def _is_floating(x: object) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _check_gradients(tree: T, name: str) -> T:
    """Returns the same values with a check of their gradients in the backward pass."""

    @jax.custom_vjp
    def same(x: Tensor) -> Tensor:
        return x

    def backward(_: None, gradient: Tensor) -> tuple[Tensor]:
        _check(jnp.all(jnp.isfinite(gradient)), name)
        return (gradient,)

    same.defvjp(lambda x: (x, None), backward)

    def has_identity(x: object) -> bool:
        return isinstance(x, nnx.Pytree | nnx.Variable)

    return jax.tree.map(
        lambda x: same(x) if _is_floating(x) else x, tree, is_leaf=has_identity
    )


def _count_common_names(module: str, parameter: str) -> int:
    """Returns how many last names of a module's path occur, in order, in a parameter's path."""
    *parameter_names, _ = parameter.split("/")
    module_names = module.split(".")
    for start in range(len(module_names)):
        # An iterator is searched from the last hit on, so that the order counts.
        names_after_hit = iter(parameter_names)
        if all(name in names_after_hit for name in module_names[start:]):
            return len(module_names) - start
    return 0


class IdleLearner(Module):
    """Substitute for a learner that changes nothing.

    Attributes:
        trained: paths of the parameters to differentiate; None runs the forward pass only.
    """

    trained: frozenset[str] | None = None

    def forward_and_backward(
        self, *, fn: ForwardFn, inputs: NestedTensor, opt_params: NestedOptParam
    ) -> ForwardBackwardOutputs:
        values = opt_param_values(opt_params)
        trained_paths = self.trained
        if trained_paths is None:
            outputs = fn(model_params=values, inputs=inputs)
        else:
            trainable = jax.tree.map(
                lambda path: path in trained_paths, tree_paths(opt_params)
            )
            forward_pass, _ = gradients.forward_and_gradients(
                fn, inputs=inputs, opt_params=opt_params, trainable=trainable
            )
            outputs = forward_pass.outputs
        return ForwardBackwardOutputs(
            outputs, BackwardOutputs(updated_params=values)
        )


def _idle_learner(trained: frozenset[str] | None) -> IdleLearner:
    learner = (
        IdleLearner.default_config()
        .set(name="learner")
        .instantiate(parent=None)
    )
    learner.trained = trained
    return learner


_PATH_ATTRIBUTE = "_place_in_model"
"""Attribute with the path of an NNX module; static, so that transformations keep it."""


class ModuleCall(NamedTuple):
    """Call of a module's method, with the module's path and the name of its class."""

    path: str
    kind: str
    method: str

    def __str__(self) -> str:
        return f"{self.path}, a {self.kind} ({self.method})"


Observer = Callable[[ModuleCall, Method, Args, Kwargs], Any]
"""Function that receives a call, the method and its arguments, and calls the method."""


@contextlib.contextmanager
def trace_calls(observer: Observer) -> Iterator[None]:
    """Passes calls of modules' methods to an observer, which calls the method, while open.

    The observer runs inside the transformations around the call.
    """
    tracer = _CallTracer(observer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(intercept_module_calls(tracer.on_hierarchy_call))
        stack.enter_context(linen.intercept_methods(tracer.on_linen_call))
        # A model with modules of these libraries has imported them.
        if "flax.linen" in sys.modules:
            stack.enter_context(
                sys.modules["flax.linen"].intercept_methods(
                    tracer.on_linen_call
                )
            )
        if "haiku" in sys.modules:
            stack.enter_context(
                sys.modules["haiku"].intercept_methods(tracer.on_haiku_call)
            )
        stack.enter_context(visiting(tracer.on_nnx_model))
        _TRACERS.items.append(tracer)
        try:
            yield
        finally:
            _TRACERS.items.remove(tracer)


class _OpenCall(NamedTuple):
    """Call in progress.

    `root` is the outermost module in a hierarchy, None in other libraries; `prefix` is the path of
    the outermost module of a library whose modules know their own paths.
    """

    path: str
    context: Any
    root: ModuleNode | None = None
    prefix: str | None = None


class _CallTracer:
    def __init__(self, observer: Observer):
        self._observer = observer
        self._open: list[_OpenCall] = []

    def see(
        self,
        call: ModuleCall,
        method: Method,
        args: Args,
        kwargs: Kwargs,
        *,
        root: ModuleNode | None = None,
        prefix: str | None = None,
    ) -> Any:
        self._open.append(_OpenCall(call.path, current_context(), root, prefix))
        try:
            return self._observer(call, method, args, kwargs)
        finally:
            self._open.pop()

    def on_hierarchy_call(
        self,
        module: Module,
        name: str,
        method: Method,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        call = ModuleCall(
            self._absolute_path(module), type(module).__name__, name
        )
        return self.see(call, method, args, kwargs, root=_root(module))

    def on_linen_call(
        self, next_fun: Method, args: Args, kwargs: Kwargs, context: Any
    ) -> Any:
        module = context.module
        prefix = self._prefix()
        path = _join_path(prefix, *module.path)
        call = ModuleCall(path, type(module).__name__, context.method_name)
        return self.see(call, next_fun, args, kwargs, prefix=prefix)

    def on_haiku_call(
        self, next_fun: Method, args: Args, kwargs: Kwargs, context: Any
    ) -> Any:
        if context.method_name == "__init__":
            return next_fun(*args, **kwargs)
        module = context.module
        prefix = self._prefix()
        names = [name for name in module.module_name.split("/") if name != "~"]
        path = _join_path(prefix, *names)
        call = ModuleCall(path, type(module).__name__, context.method_name)
        return self.see(call, next_fun, args, kwargs, prefix=prefix)

    def on_nnx_model(self, model: nnx.Pytree) -> None:
        prefix = self._innermost_path()
        for path, x in list(iter_objects(model)):
            if not isinstance(x, nnx.Rngs | nnx.RngStream):
                vars(x)[_PATH_ATTRIBUTE] = _join_path(prefix, *path)
                intercept_calls(x, _on_nnx_call)

    def _prefix(self) -> str:
        """Returns the path of the outermost module of a library whose modules know their paths."""
        if self._open:
            innermost = self._open[-1]
            if (
                innermost.prefix is not None
                and innermost.context is current_context()
            ):
                return innermost.prefix
        return self._innermost_path()

    def _innermost_path(self) -> str:
        context = current_context()
        if self._open:
            innermost = self._open[-1]
            if context is None or innermost.context is context:
                return innermost.path
        if context is None or context.module is None:
            return ""
        return self._absolute_path(context.module)

    def _absolute_path(self, module: ModuleNode) -> str:
        """Returns the path of a hierarchy layer, also inside a model of another library."""
        root = _root(module)
        for call in reversed(self._open):
            if call.root is not root:
                _, _, path_below_root = module.path().partition(".")
                return _join_path(call.path, path_below_root)
        return module.path()


_TRACERS = ThreadStack[_CallTracer]()


def _on_nnx_call(
    x: object, name: str, method: Method, args: Args, kwargs: Kwargs
) -> Any:
    path = vars(x).get(_PATH_ATTRIBUTE)
    tracer = _TRACERS.top
    if tracer is None or path is None:
        return method(*args, **kwargs)
    call = ModuleCall(path, original_class(x).__name__, name)
    return tracer.see(call, method, args, kwargs)


def _root(module: ModuleNode) -> ModuleNode:
    while module.parent is not None:
        module = module.parent
    return module


def _join_path(*parts: object) -> str:
    return ".".join(str(part) for part in parts if part != "")
