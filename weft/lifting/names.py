"""Names of the user's functions on the functions that JAX traces.

JAX traces a pure function in place of the user's. Logs, profiles and dumps show its name, and error
messages its arguments and source line, so it takes all three from the user's function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_UNNAMED = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def named_after(
    fn: Callable[..., Any],
    pure: F,
    *,
    leading: Sequence[str] | None = None,
    left_out: Collection[int | str] = (),
) -> F:
    """Gives a function the name, the source line and the argument names of the user's function.

    Args:
        fn: the user's function; also a partial, a method or a callable object.
        pure: the function that JAX traces; changed and returned.
        leading: names of arguments of `pure` before those of `fn`. If None, the arguments are
            unrelated, and only the name and the source line are set.

    Example:
        >>> def train_step(state, batch): ...
        >>> pure = named_after(train_step, lambda static, *args: None, leading=("static",))
        >>> pure.__name__, str(inspect.signature(pure))
        ('train_step', '(static, /, state, batch)')
    """
    takes_name(fn, pure)
    # JAX would otherwise follow `__wrapped__` to a signature that `pure` does not have.
    pure.__signature__ = (  # pyright: ignore[reportFunctionMemberAccess]
        _UNNAMED if leading is None else _signature(fn, leading, left_out)
    )
    return pure


def takes_name(fn: Callable[..., Any], wrapper: F) -> F:
    """Gives a function the name and the source line of the function that it calls.

    The wrapper is changed and returned; it is still compared by value, see
    `weft.lifting.functions`.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    named = inner if hasattr(inner, "__name__") else type(inner)
    source = inspect.unwrap(inner)
    wrapper.__name__ = named.__name__
    wrapper.__qualname__ = getattr(named, "__qualname__", named.__name__)
    wrapper.__wrapped__ = (  # pyright: ignore[reportFunctionMemberAccess]
        source if hasattr(source, "__code__") else type(source).__call__
    )
    return wrapper


def _signature(
    fn: Callable[..., Any], leading: Sequence[str], left_out: Collection[int | str]
) -> inspect.Signature:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some functions in C have no signature
        return _UNNAMED
    kept = [p for i, p in enumerate(parameters) if i not in left_out and p.name not in left_out]
    taken = {p.name for p in kept}
    first = []
    for name in leading:
        while name in taken:
            name = f"_{name}"
        taken.add(name)
        first.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY))
    return inspect.Signature([*first, *kept])
