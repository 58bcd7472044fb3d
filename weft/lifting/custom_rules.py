"""Functions with custom derivatives: custom_vjp and custom_jvp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import zero_from_primal

from weft.lifting.crossing import Cargo, Kind, Results, Units, commit, depart, run
from weft.lifting.names import named_after
from weft.lifting.roles import DIFF


def custom_vjp(
    kind: Kind,
    fn: Callable[..., Any],
    forward_fn: Callable[..., Any],
    backward_fn: Callable[..., Any],
    *,
    wrt: Any,
    of_state: bool = False,
) -> Callable[..., Any]:
    """Applies `jax.custom_vjp` to a function that takes carriers.

    The state that `fn` changes comes from `forward_fn` when derivatives are taken.

    Args:
        forward_fn: takes the same arguments; returns the result of `fn`, and residuals.
        backward_fn: takes the residuals and a cotangent of the result; returns one gradient for
            each argument and group of state with role DIFF, in order.
        wrt: a prefix of the arguments: DIFF for gradients of `backward_fn`, None elsewhere.
        of_state: whether `backward_fn` also takes the cotangents of changed state, which are the
            groups of each carrier, and the collected static half.
    """

    def call(*args: Any) -> Any:
        outer, diff, rest, run_with = _of_call(kind, args, wrt)

        def pure(diff: list[Any], rest: list[Any]) -> Results:
            return run_with(fn, diff, rest)

        def forward(diff: list[Any], rest: list[Any]) -> tuple[Results, Any]:
            results = run_with(forward_fn, diff, rest)
            value, residuals = results.packed
            return results._replace(packed=value), residuals

        def backward(residuals: Any, cotangents: Results) -> tuple[list[Any], None]:
            static, groups = cotangents.static.value, [p.groups for p in cotangents.parcels]
            more = (groups, static) if of_state else ()
            return list(backward_fn(residuals, cotangents.packed, *more)), None

        with_rule = jax.custom_vjp(named_after(fn, pure))
        with_rule.defvjp(named_after(forward_fn, forward), named_after(backward_fn, backward))
        return commit(kind, outer, with_rule(diff, rest))

    return call


def custom_jvp(
    kind: Kind, fn: Callable[..., Any], jvp_fn: Callable[..., Any], *, wrt: Any
) -> Callable[..., Any]:
    """Applies `jax.custom_jvp` to a function that takes carriers.

    The state that `fn` changes comes from `jvp_fn` when derivatives are taken.

    Args:
        jvp_fn: `jvp_fn(tangents, *args)`, with one tangent for each argument and group of state
            with role DIFF, in order. It returns the result of `fn` and its tangent.
        wrt: a prefix of the arguments: DIFF for tangents of `jvp_fn`, None elsewhere.
    """

    def call(*args: Any) -> Any:
        outer, diff, rest, run_with = _of_call(kind, args, wrt)

        def pure(diff: list[Any], rest: list[Any]) -> Results:
            return run_with(fn, diff, rest)

        def rule(primals: Any, tangents: Any) -> tuple[Results, Results]:
            results = run_with(lambda *args: jvp_fn(tangents[0], *args), *primals)
            value, tangent = results.packed
            results = results._replace(packed=value)
            zeros = jax.tree.map(zero_from_primal, results)
            return results, zeros._replace(packed=tangent)

        with_rule = jax.custom_jvp(named_after(fn, pure))
        with_rule.defjvp(named_after(jvp_fn, rule))
        return commit(kind, outer, with_rule(diff, rest))

    return call


def _of_call(kind: Kind, args: Any, wrt: Any) -> tuple[Any, list[Any], list[Any], Any]:
    """Returns a call's differentiable values, the rest, and a function to run on both."""
    outer, cargo = depart(kind, args, wrt, "wrt")
    units = Units.of_cargo(cargo)
    diff = units.with_roles(DIFF)
    rest = [None if role is DIFF else value for value, role in units.pairs()]
    # Values that outlive the call hold no arrays of it.
    empty, static = units.emptied(), cargo.static

    def run_with(fn: Callable[..., Any], diff: list[Any], rest: list[Any]) -> Results:
        packed = empty.having(rest).merged(DIFF, diff).packed()
        return run(kind, lambda args: fn(*args), Cargo(static, packed))

    return outer, diff, rest, run_with
