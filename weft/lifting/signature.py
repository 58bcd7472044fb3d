"""Signatures of the user's functions: names for the functions that JAX traces, and argnums.

JAX traces a pure function in place of the user's. Logs, profiles and dumps show its name, and error
messages its arguments and source line, so it takes all three from the user's function.
"""

import functools
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from weft.errors import TransformArgumentError
from weft.typing import Fn

F = TypeVar("F", bound=Fn)
T = TypeVar("T", int, str)

_ANY_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def named_after(
    fn: Fn, pure: F, *, leading: Sequence[str] | None = None, left_out: Collection[int | str] = ()
) -> F:
    """Gives a function the name, the source line and the argument names of the user's function.

    Args:
        fn: the user's function; also a partial, a method or a callable object.
        pure: the function that JAX traces; changed and returned.
        leading: names of arguments of `pure` before those of `fn`. If None, the arguments are
            unrelated, and only the name and the source line are set.
    """
    copy_name(fn, pure)
    # JAX would otherwise follow `__wrapped__` to a signature that `pure` does not have.
    pure.__signature__ = (  # pyright: ignore[reportFunctionMemberAccess]
        _ANY_SIGNATURE if leading is None else _signature(fn, leading, left_out)
    )
    return pure


def copy_name(fn: Fn, wrapper: F) -> F:
    """Gives a function the name and the source line of the function that it calls.

    The wrapper is changed and returned.
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
    fn: Fn, leading: Sequence[str], left_out: Collection[int | str]
) -> inspect.Signature:
    signature = signature_of(fn)
    if signature is _ANY_SIGNATURE:
        return signature
    parameters = list(signature.parameters.values())
    kept = [p for i, p in enumerate(parameters) if i not in left_out and p.name not in left_out]
    taken = {p.name for p in kept}
    first = []
    for name in leading:
        while name in taken:
            name = f"_{name}"
        taken.add(name)
        first.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY))
    return inspect.Signature([*first, *kept])


def signature_of(fn: Fn) -> inspect.Signature:
    """Returns the signature of a function, `(*args, **kwargs)` if it is unknown."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # some functions in C have no signature
        return _ANY_SIGNATURE


def as_tuple(arguments: T | Iterable[T]) -> tuple[T, ...]:
    """Returns one or several positions or names of arguments as a tuple."""
    is_one = isinstance(arguments, int | str)
    return (arguments,) if is_one else tuple(arguments)  # pyright: ignore[reportReturnType, reportArgumentType]


def check_argnums(title: str, what: str, fn: Fn, argnums: int | Iterable[int]) -> None:
    """Raises TransformArgumentError for positions of arguments that a function does not have.

    `what` is the parameter with the positions. An unknown signature allows any position.
    """
    numbers = as_tuple(argnums)
    try:
        parameters = inspect.signature(fn).parameters.values() if numbers else ()
    except (TypeError, ValueError):
        return
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        n = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        _check_positions(title, what, fn, numbers, n, "takes")


def resolve_argnums(
    title: str, what: str, fn: Fn, argnums: int | Iterable[int], args: Sequence[Any]
) -> list[int]:
    """Returns positions among the arguments of a call, counted from 0; see `check_argnums`."""
    numbers = as_tuple(argnums)
    _check_positions(title, what, fn, numbers, len(args), "is called with")
    return [i % len(args) for i in numbers]


def _check_positions(
    title: str, what: str, fn: Fn, numbers: Iterable[int], n: int, has: str
) -> None:
    for number in numbers:
        if not -n <= number < n:
            raise TransformArgumentError(
                f"{title}({getattr(fn, '__name__', type(fn).__name__)}): {what} has {number}, "
                f"and the function {has} {n} argument{'' if n == 1 else 's'} by position; give "
                "positions that it has."
            )
