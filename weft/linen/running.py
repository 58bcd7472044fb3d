"""Thread-local stack of modules whose methods run, interceptors, and names in profiles.

A module created in another module's method belongs to that module.
"""

import contextlib
import contextvars
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weft.linen.module import Module


@dataclasses.dataclass(frozen=True)
class InterceptorContext:
    """Call seen by an interceptor; `orig_method` is the method without further interceptors."""

    module: "Module"
    method_name: str
    orig_method: Callable[..., Any]


class Interceptor(Protocol):
    """Function called in place of each method; `next_fun` is the next interceptor or the method."""

    def __call__(
        self,
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: InterceptorContext,
    ) -> Any: ...


class _Running(threading.local):
    def __init__(self) -> None:
        self.modules: list[Module | None] = []
        self.interceptors: tuple[Interceptor, ...] = ()
        self.lifted = 0  # number of transformed functions being traced

    def __reduce__(self) -> str:
        return "RUNNING"  # classes pickled by value refer to it in their methods


RUNNING = _Running()
_named_call: contextvars.ContextVar[bool] = contextvars.ContextVar("named_call", default=True)


# The classes whose modules read their path inside of a transformation. A trace of such a module is
# valid only at that path, while all other modules share traces.
PLACED: "weakref.WeakSet[type[Module]]" = weakref.WeakSet()


def place_is_read(module: "Module") -> None:
    """Records that a module reads its name or path."""
    if RUNNING.lifted:
        PLACED.update(type(m) for m in (module, *RUNNING.modules) if m is not None)


def name_of(module: "Module") -> str | None:
    """Returns a module's name, without recording the read."""
    return vars(module).get("name")


class Name:
    """Field `name` of modules."""

    def __get__(self, module: "Module | None", cls: type) -> Any:
        if module is None:
            return None
        place_is_read(module)
        return name_of(module)

    def __set__(self, module: "Module", name: str | None) -> None:
        vars(module)["name"] = name


def current_module() -> "Module | None":
    """Returns the module whose method runs, or None."""
    return RUNNING.modules[-1] if RUNNING.modules else None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Enters a context in which new modules have no parent."""
    RUNNING.modules.append(None)
    try:
        yield
    finally:
        RUNNING.modules.pop()


@contextlib.contextmanager
def intercept_methods(interceptor: Interceptor) -> Iterator[None]:
    """Enters a context in which an interceptor replaces each method call of each module.

    Args:
        interceptor: `interceptor(next_fun, args, kwargs, context)` returns the result of the call.
            Of several interceptors, the outermost is called first.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import linen as nn
        >>> def doubled(next_fun, args, kwargs, context):
        ...     result = next_fun(*args, **kwargs)
        ...     return 2 * result if context.method_name == "__call__" else result
        >>> class Identity(nn.Module):
        ...     def __call__(self, x):
        ...         return x
        >>> with nn.intercept_methods(doubled):
        ...     print(Identity().apply({}, 3))
        6
    """
    before = RUNNING.interceptors
    RUNNING.interceptors = (*before, interceptor)
    try:
        yield
    finally:
        RUNNING.interceptors = before


def intercepted(fn: Callable[..., Any], module: "Module", args: Any, kwargs: Any) -> Any:
    """Calls a method through the interceptors."""
    context = InterceptorContext(module, fn.__name__, fn.__get__(module))

    def call(depth: int, *args: Any, **kwargs: Any) -> Any:
        if depth == len(interceptors):
            return fn(module, *args, **kwargs)
        return interceptors[depth](lambda *a, **k: call(depth + 1, *a, **k), args, kwargs, context)

    interceptors = RUNNING.interceptors
    return call(0, *args, **kwargs)


def named_call_is_on() -> bool:
    """Returns whether operations are named after their modules."""
    return _named_call.get()


def enable_named_call() -> None:
    """Names operations after their modules, the default, in this thread."""
    _named_call.set(True)


def disable_named_call() -> None:
    """Stops naming operations after their modules, in this thread."""
    _named_call.set(False)


@contextlib.contextmanager
def override_named_call(enable: bool = True) -> Iterator[None]:
    """Enters a context in which operations are named after their modules, or not."""
    token = _named_call.set(enable)
    try:
        yield
    finally:
        _named_call.reset(token)
