"""Functions that take a context, for passing it through transformations."""

from collections.abc import Callable
from typing import Any

from weft.hierarchy.context import InvocationContext, set_current_context
from weft.hierarchy.context_kind import ContextKind
from weft.lifting.names import named_after

CONTEXTS = ContextKind()


def in_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with an additional first argument: the context to run in."""

    def call(context: InvocationContext, *args: Any, **kwargs: Any) -> Any:
        with set_current_context(context, require_parent=False):
            return fn(*args, **kwargs)

    return named_after(fn, call, leading=("context",))


def spread(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` as a function of a context, a tuple of arguments and a dict of keywords."""

    def call(context: InvocationContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_context(fn)(context, *args, **kwargs)

    return named_after(fn, call)
