"""What runs at the moment, in each thread: the modules whose methods are being called.

A module that is made inside of another one's method belongs to that one; interceptors see each
call; and operations carry the names of modules in profiles. All of it is known here.
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
    """Which call an interceptor sees.

    Attributes:
        module: whose method is called.
        method_name: its name.
        orig_method: the method, which is called without further interceptors.
    """

    module: "Module"
    method_name: str
    orig_method: Callable[..., Any]


class Interceptor(Protocol):
    """Called in place of each method of each module; `next_fun` is what would be called."""

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
        self.lifted = 0  # how many transformed functions are being traced

    def __reduce__(self) -> str:
        return "RUNNING"  # methods of classes that are pickled by value refer to it


RUNNING = _Running()
_named_call: contextvars.ContextVar[bool] = contextvars.ContextVar("named_call", default=True)


# The classes whose modules have asked, inside of a transformation, where in their tree they are. A
# trace of such a module holds for that place alone, while all others share theirs.
PLACED: "weakref.WeakSet[type[Module]]" = weakref.WeakSet()


def place_is_read(module: "Module") -> None:
    """Notes that a module reads its name or path."""
    if RUNNING.lifted:
        PLACED.update(type(m) for m in (module, *RUNNING.modules) if m is not None)


def name_of(module: "Module") -> str | None:
    """A module's name, without a note that it was read."""
    return vars(module).get("name")


class Name:
    """The field `name` of modules."""

    def __get__(self, module: "Module | None", cls: type) -> Any:
        if module is None:
            return None
        place_is_read(module)
        return name_of(module)

    def __set__(self, module: "Module", name: str | None) -> None:
        vars(module)["name"] = name


def current_module() -> "Module | None":
    """The module whose method runs, None outside of all."""
    return RUNNING.modules[-1] if RUNNING.modules else None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context outside of all modules: what is made in it is nobody's submodule."""
    RUNNING.modules.append(None)
    try:
        yield
    finally:
        RUNNING.modules.pop()


@contextlib.contextmanager
def intercept_methods(interceptor: Interceptor) -> Iterator[None]:
    """Within this context an interceptor is called in place of each method of each module.

    Args:
        interceptor: `interceptor(next_fun, args, kwargs, context)`; what it returns is the result
            of the call. Of several, the outermost context's is called first.

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
    """Whether operations carry the names of the modules that they are in."""
    return _named_call.get()


def enable_named_call() -> None:
    """Operations carry the names of the modules that they are in, as they do by default."""
    _named_call.set(True)


def disable_named_call() -> None:
    """Operations do not carry the names of modules, in this thread."""
    _named_call.set(False)


@contextlib.contextmanager
def override_named_call(enable: bool = True) -> Iterator[None]:
    """Within this context operations carry the names of modules, or do not.

    Args:
        enable: whether they do.
    """
    token = _named_call.set(enable)
    try:
        yield
    finally:
        _named_call.reset(token)
