"""Abstract and checked calls: eval_shape and checkify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.crossing import Cargo, Kind, Results, commit, depart, run
from weft.lifting.names import named_after


def eval_shape(kind: Kind, fn: Callable[..., Any], *, in_axes: Any = None) -> Callable[..., Any]:
    """Applies `jax.eval_shape` to a function that takes carriers.

    Args:
        kind: kind of the carriers; changed state becomes `jax.ShapeDtypeStruct`.
        in_axes: a prefix of the arguments; only the filters of `Roles` are used.
    """

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        return commit(kind, outer, jax.eval_shape(_pure(kind, fn), cargo))

    return call


def checkify(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    errors: Any = None,
    in_axes: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.experimental.checkify.checkify` to a function that takes carriers.

    The result returns a checkify error and the result of `fn`. `errors` are the enabled checks, by
    default `checkify.user_checks`.
    """
    from jax.experimental import checkify as jax_checkify  # imported only if used

    errors = jax_checkify.user_checks if errors is None else errors
    checked = jax_checkify.checkify(_pure(kind, fn), errors=errors)

    def call(*args: Any) -> tuple[Any, Any]:
        outer, cargo = depart(kind, args, in_axes)
        error, results = checked(cargo)
        return error, commit(kind, outer, results)

    return call


def _pure(kind: Kind, fn: Callable[..., Any]) -> Callable[[Cargo], Results]:
    return named_after(fn, lambda cargo: run(kind, lambda args: fn(*args), cargo))
