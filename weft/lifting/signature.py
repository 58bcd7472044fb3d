"""Signatures of the user's functions: names for the functions that JAX traces, and argnums.

JAX traces a pure function in place of the user's. Logs, profiles and dumps show its name, and error
messages its arguments and source line, so it takes all three from the user's function.
"""

import functools
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import SupportsIndex, TypeVar

from weft.errors import TransformArgumentError
from weft.typing import Fn, PyTree

F = TypeVar("F", bound=Fn)
T = TypeVar("T", int, str)

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_ANY_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def named_after(
    fn: Fn,
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
    """
    copy_name(fn, pure)
    # JAX would otherwise follow `__wrapped__` to a signature that `pure` does not have.
    signature = (
        _ANY_SIGNATURE if leading is None else _signature(fn, leading, left_out)
    )
    pure.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return pure


def copy_name(fn: Fn, wrapper: F) -> F:
    """Gives a function the name and the source line of the function that it calls.

    The wrapper is changed and returned.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    named = inner if hasattr(inner, "__name__") else type(inner)
    wrapper.__name__ = named.__name__
    wrapper.__qualname__ = getattr(named, "__qualname__", named.__name__)
    source = inspect.unwrap(inner)
    if not hasattr(source, "__code__"):
        source = type(source).__call__
    wrapper.__wrapped__ = source  # pyright: ignore[reportFunctionMemberAccess]
    return wrapper


def _signature(
    fn: Fn, leading: Sequence[str], left_out: Collection[int | str]
) -> inspect.Signature:
    signature = signature_of(fn)
    if signature is _ANY_SIGNATURE:
        return signature
    fn_parameters: list[inspect.Parameter] = []
    for i, parameter in enumerate(signature.parameters.values()):
        if i not in left_out and parameter.name not in left_out:
            fn_parameters.append(parameter)
    used_names = {parameter.name for parameter in fn_parameters}
    leading_parameters: list[inspect.Parameter] = []
    for name in leading:
        while name in used_names:
            name = f"_{name}"
        used_names.add(name)
        leading_parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
        )
    return inspect.Signature([*leading_parameters, *fn_parameters])


def signature_of(fn: Fn) -> inspect.Signature:
    """Returns the signature of a function, `(*args, **kwargs)` if it is unknown."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # some functions in C have no signature
        return _ANY_SIGNATURE


def as_tuple(arguments: T | Iterable[T]) -> tuple[T, ...]:
    """Returns one or several positions or names of arguments as a tuple."""
    if isinstance(arguments, str) or not isinstance(arguments, Iterable):
        return (arguments,)  # pyright: ignore[reportReturnType]
    return tuple(arguments)  # pyright: ignore[reportArgumentType]


def check_argnums(
    title: str, parameter: str, fn: Fn, argnums: int | Iterable[int]
) -> None:
    """Raises TransformArgumentError for positions of arguments that a function does not have.

    So it does for what is not a position, such as a name of an argument.
    `parameter` is the name of the one with the positions. An unknown signature allows any position.
    """
    positions = as_tuple(argnums)
    if not positions:
        return
    _check_are_positions(title, parameter, fn, positions)
    n_args = 0
    for fn_parameter in signature_of(fn).parameters.values():
        if fn_parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return
        if fn_parameter.kind in _POSITIONAL:
            n_args += 1
    _check_positions(title, parameter, fn, positions, n_args, "takes")


def resolve_argnums(
    title: str,
    parameter: str,
    fn: Fn,
    argnums: int | Iterable[int],
    args: Sequence[PyTree],
) -> list[int]:
    """Returns positions among the arguments of a call, counted from 0; see `check_argnums`."""
    positions = as_tuple(argnums)
    _check_are_positions(title, parameter, fn, positions)
    _check_positions(
        title, parameter, fn, positions, len(args), "is called with"
    )
    return [position % len(args) for position in positions]


def _check_are_positions(
    title: str, parameter: str, fn: Fn, positions: Iterable[object]
) -> None:
    for position in positions:
        if not isinstance(position, SupportsIndex):
            fn_name = getattr(fn, "__name__", type(fn).__name__)
            raise TransformArgumentError(
                f"{title}({fn_name}): {parameter} has {position!r}; give positions of arguments, "
                "such as 0 or (0, 1)."
            )


def _check_positions(
    title: str,
    parameter: str,
    fn: Fn,
    positions: Iterable[int],
    n_args: int,
    verb: str,
) -> None:
    for position in positions:
        if not -n_args <= position < n_args:
            fn_name = getattr(fn, "__name__", type(fn).__name__)
            plural = "" if n_args == 1 else "s"
            raise TransformArgumentError(
                f"{title}({fn_name}): {parameter} has {position}, and the function {verb} {n_args} "
                f"argument{plural} by position; give positions that it has."
            )
