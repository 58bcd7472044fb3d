"""Positions of arguments, as in `static_argnums`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weft.errors import TransformArgumentError


def as_tuple(argnums: int | Iterable[int]) -> tuple[int, ...]:
    """Returns one or several positions as a tuple."""
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def check_argnums(
    title: str, what: str, fn: Callable[..., Any], argnums: int | Iterable[int]
) -> None:
    """Raises TransformArgumentError for positions of arguments that a function does not have.

    `what` is the parameter with the positions. If the signature is unknown, any position is
    allowed.
    """
    numbers = as_tuple(argnums)
    try:
        parameters = inspect.signature(fn).parameters.values() if numbers else ()
    except (TypeError, ValueError):
        return
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        n = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        _check(title, what, fn, numbers, n, "takes")


def given_at(
    title: str, what: str, fn: Callable[..., Any], argnums: int | Iterable[int], args: Sequence[Any]
) -> list[int]:
    """Returns positions among the arguments of a call, counted from 0; see `check_argnums`."""
    numbers = as_tuple(argnums)
    _check(title, what, fn, numbers, len(args), "is called with")
    return [i % len(args) for i in numbers]


def _check(
    title: str, what: str, fn: Callable[..., Any], numbers: Iterable[int], n: int, has: str
) -> None:
    for number in numbers:
        if not -n <= number < n:
            raise TransformArgumentError(
                f"{title}({getattr(fn, '__name__', type(fn).__name__)}): {what} has {number}, "
                f"and the function {has} {n} argument{'' if n == 1 else 's'} by position; give "
                "positions that it has."
            )
