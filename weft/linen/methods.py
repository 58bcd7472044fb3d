"""Methods of modules: decorators, and the wrapper around each call.

A call first runs `setup` if due, records the running module, and names the operations.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax

from weft.core.filters import in_filter
from weft.core.scope import Scope
from weft.errors import (
    CallCompactUnboundModuleError,
    CallSetupUnboundModuleError,
    TransformArgumentError,
)
from weft.linen import state as state_lib
from weft.typing import PyTree, T

F = TypeVar("F", bound=Callable[..., Any])
_NO_CONTEXT = contextlib.nullcontext()


def compact(fun: F) -> F:
    """Marks a method that creates submodules and variables where it uses them.

    A class has at most one compact method. Further calls use the same variables.

    >>> class MLP(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(2)(nn.relu(nn.Dense(4)(x)))
    >>> sorted(MLP().init(jax.random.key(0), jnp.ones((1, 3)))["params"])
    ['Dense_0', 'Dense_1']
    """
    fun.compact = True  # pyright: ignore[reportFunctionMemberAccess]
    return fun


def compact_name_scope(fun: F) -> F:
    """Marks a compact method whose submodules are in a scope with the method's name.

    A class may have several of these, and one `compact` method; only the latter can create
    parameters and variables.

    >>> class Codec(nn.Module):
    ...     @nn.compact_name_scope
    ...     def encode(self, x):
    ...         return nn.Dense(2)(x)
    ...     def __call__(self, x):
    ...         return self.encode(x)
    >>> jax.tree.map(jnp.shape, Codec().init(jax.random.key(0), jnp.ones((1, 3)))["params"])
    {'encode': {'Dense_0': {'bias': (2,), 'kernel': (3, 2)}}}
    """

    @functools.wraps(fun)
    def scoped(
        self: state_lib.ModuleVariables, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        if not isinstance(self, state_lib.ModuleVariables):
            raise TransformArgumentError(
                f"{fun} is to be a method of a module, and its first argument is {self!r} "
                f"of type {type(self).__name__}; define it in a module, and call it on an instance."
            )
        with self._state.name_scope(self, fun.__name__):
            return fun(self, *args, **kwargs)

    scoped.name_scope = True  # pyright: ignore[reportAttributeAccessIssue]
    return scoped  # pyright: ignore[reportReturnType]


def nowrap(fun: F) -> F:
    """Marks a method that is called as a plain function, without variables.

    Modules created in it belong to the module whose method runs, not to this one.
    """
    fun.nowrap = True  # pyright: ignore[reportFunctionMemberAccess]
    return fun


def wrap_methods(
    cls: type[state_lib.ModuleVariables], fields: Collection[str]
) -> None:
    """Wraps the methods that a module class itself defines, except for functions in fields."""
    for name, value in list(vars(cls).items()):
        is_special = name.startswith("__") and name != "__call__"
        if name in fields or is_special:
            continue
        if isinstance(value, property):
            getter = value.fget and _wrap_getter(value.fget)
            setattr(
                cls,
                name,
                property(getter, value.fset, value.fdel, value.__doc__),
            )
        elif isinstance(value, types.FunctionType):
            wrap = _wrap_setup if name == "setup" else wrap_method
            setattr(cls, name, wrap(value))


def _wrap_setup(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def setup(self: state_lib.ModuleVariables) -> None:
        if self.scope is None:
            raise CallSetupUnboundModuleError(type(self).__name__)
        if state_lib.RUNNING.interceptors and self._state.in_setup:
            state_lib.call_interceptors(fn, self, (), {})
        else:
            fn(self)

    return setup


def _wrap_getter(
    getter: Callable[[state_lib.ModuleVariables], T],
) -> Callable[[state_lib.ModuleVariables], T]:
    """Wraps a property's getter so that modules created in it belong to the module."""

    @functools.wraps(getter)
    def get(self: state_lib.ModuleVariables) -> T:
        state_lib.RUNNING.module_stack.append(self)
        try:
            return getter(self)
        finally:
            state_lib.RUNNING.module_stack.pop()

    return get


def wrap_method(fn: Callable[..., T]) -> Callable[..., T]:
    """Returns the wrapper of a method that is called on modules."""
    if getattr(fn, "nowrap", False) or getattr(
        fn, "method_handler_wrapped", False
    ):
        return fn
    is_compact = getattr(fn, "compact", False)
    name = fn.__name__

    @functools.wraps(fn)
    def call(
        self: state_lib.ModuleVariables, *args: PyTree, **kwargs: PyTree
    ) -> T:
        state = self._state
        scope = self.scope
        if scope is None:
            if is_compact or hasattr(fn, "name_scope"):
                cls = type(self).__name__
                raise CallCompactUnboundModuleError(
                    f"the compact method {name}", cls
                )
        elif state.setup_is_due:
            self._run_setup()
        # A compact method that a compact method calls continues with its names.
        begins = is_compact and not state.in_compact
        if begins:
            state.begin_compact(self, name)
        state_lib.RUNNING.module_stack.append(self)
        # A compact method called within a `compact_name_scope` creates its submodules outside it.
        place = (
            state.creating_at() if is_compact and state.place else _NO_CONTEXT
        )
        try:
            with _named_scope(self, name), place:
                if state_lib.RUNNING.interceptors:
                    result = state_lib.call_interceptors(fn, self, args, kwargs)
                else:
                    result = fn(self, *args, **kwargs)
            if scope is not None and "capture" in scope.flags:
                _capture(self, scope, name, result)
            return result
        finally:
            state_lib.RUNNING.module_stack.pop()
            if begins:
                state.in_compact = False

    call.method_handler_wrapped = True  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _named_scope(
    module: state_lib.ModuleVariables, method: str
) -> contextlib.AbstractContextManager[object]:
    if module.scope is None or not state_lib.named_call_enabled():
        return _NO_CONTEXT
    name = state_lib.name_of(module) or type(module).__name__
    return jax.named_scope(name if method == "__call__" else f"{name}.{method}")


def _capture(
    module: state_lib.ModuleVariables, scope: Scope, method: str, result: PyTree
) -> None:
    """Stores the result of a method, if `capture_intermediates` selects it."""
    selection = scope.flags["capture"]
    is_selected = (
        method == "__call__" if selection is True else selection(module, method)
    )
    if is_selected and in_filter(scope.mutable, "intermediates"):
        module.sow("intermediates", method, result)
