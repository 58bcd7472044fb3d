"""Functions that take a context, for the engine, which hands it through transformations."""

from collections.abc import Callable
from typing import Any

from weft.hierarchy.context import InvocationContext, set_current_context
from weft.hierarchy.context_kind import ContextKind
from weft.lifting.names import named_after

CONTEXTS = ContextKind()


def in_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with a context as an additional first argument, in which it runs."""

    def call(context: InvocationContext, *args: Any, **kwargs: Any) -> Any:
        with set_current_context(context, require_parent=False):
            return fn(*args, **kwargs)

    return named_after(fn, call, leading=("context",))


def spread(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a function of a context, positional and named arguments."""

    def call(context: InvocationContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_context(fn)(context, *args, **kwargs)

    return named_after(fn, call)
