"""Gradients with respect to arguments and to groups of state."""

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.crossing import Cargo, Kind, Results, Units, commit, depart, is_parcel, run
from weft.lifting.roles import DIFF


def value_and_grad(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    wrt: Any,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of a function that takes carriers.

    Args:
        kind: whose carriers cross.
        fn: returns a scalar, or with `has_aux` a pair of a scalar and anything.
        wrt: a prefix of the arguments: DIFF where to differentiate, None elsewhere, `Roles` where a
            carrier is.
        has_aux: whether `fn` returns a pair.
        holomorphic: as for `jax.grad`.
        allow_int: as for `jax.grad`.

    Returns:
        A function whose result is that of `fn`, and the gradients: a tree shaped like the
            arguments, with None where
        nothing was differentiated and, where a carrier was, a tuple with one entry per group.
    """

    def call(*args: Any) -> tuple[Any, Any]:
        outer, cargo = depart(kind, args, wrt, "wrt")
        units = Units.of_cargo(cargo)

        def loss(diff: list[Any]) -> tuple[Any, Results]:
            packed = units.merged(DIFF, diff)
            results = run(kind, lambda args: fn(*args), Cargo(cargo.static, packed))
            value, aux = results.packed if has_aux else (results.packed, None)
            return value, results._replace(packed=aux)

        differentiated = jax.value_and_grad(
            loss, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )
        (value, results), grads = differentiated(units.with_roles(DIFF))
        aux = commit(kind, outer, results)
        rest = iter(grads)
        by_unit = units.rebuild([next(rest) if role is DIFF else None for role in units.roles])
        grads = jax.tree.map(lambda x: x.groups if is_parcel(x) else x, by_unit, is_leaf=is_parcel)
        return (value, aux) if has_aux else value, grads

    return call


def grad(kind: Kind, fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """The gradients of `value_and_grad`; with `has_aux` a pair of them and the rest."""
    both = value_and_grad(kind, fn, **kwargs)

    def call(*args: Any) -> Any:
        value, grads = both(*args)
        return (grads, value[1]) if kwargs.get("has_aux") else grads

    return call
