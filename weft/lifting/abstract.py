"""eval_shape and checkify: what a call would return, and whether something went wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.crossing import Cargo, Kind, Results, commit, depart, run
from weft.lifting.names import named_after


def eval_shape(kind: Kind, fn: Callable[..., Any], *, in_axes: Any = None) -> Callable[..., Any]:
    """`jax.eval_shape` of a function that takes carriers: shapes instead of arrays.

    Args:
        kind: whose carriers cross. What `fn` changes is changed to `jax.ShapeDtypeStruct`.
        fn: the function.
        in_axes: a prefix of the arguments, of which only the filters of `Roles` are used.
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
    """`jax.experimental.checkify.checkify` of a function that takes carriers.

    Args:
        kind: whose carriers cross.
        fn: the function.
        errors: which checks are made; None for `checkify.user_checks`.
        in_axes: as for `eval_shape`.

    Returns:
        A function that returns the error, which may be none, and the result of `fn`.
    """
    from jax.experimental import checkify as jax_checkify  # it is not imported without use

    errors = jax_checkify.user_checks if errors is None else errors
    checked = jax_checkify.checkify(_pure(kind, fn), errors=errors)

    def call(*args: Any) -> tuple[Any, Any]:
        outer, cargo = depart(kind, args, in_axes)
        error, results = checked(cargo)
        return error, commit(kind, outer, results)

    return call


def _pure(kind: Kind, fn: Callable[..., Any]) -> Callable[[Cargo], Results]:
    return named_after(fn, lambda cargo: run(kind, lambda args: fn(*args), cargo))
