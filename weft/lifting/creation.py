"""State that a loop's body, or only one of several branches, makes.

A loop carries what it begins with, and branches return alike. So new state is made before: the body
is traced once as it would run first, and of that trace only the initial values of the new state are
computed. What the body then finds is as if it had been there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft.lifting.crossing import Kind, Parcel, Results, Units, run
from weft.lifting.structure import traced_by_structure


class StateCreated(Exception):
    """Raised in a body that makes state which must have been made before."""


def traced_with_state(
    kind: Kind,
    loop: Callable[[Any, list[Any]], Results],
    create: Callable[[Any, list[Any]], tuple[Any, list[Any]]],
    static: Any,
    values: list[Any],
    units: Units,
    in_loop: bool = True,
) -> Results:
    """Traces a loop, after its body has made its state if it makes any.

    Where a model is initialized that is expected, so that the body is traced twice. Elsewhere it is
    not, so that the body is traced once.

    Args:
        kind: whose carriers cross.
        loop: takes the static half and the values that cross; raises `StateCreated`.
        create: takes and gives the same, with the new state.
        static: the kind's static half.
        values: the values of `units` as they cross.
        units: what crosses.
        in_loop: whether the body runs as a scan's, see `Kind.in_loop`.

    Returns:
        What `loop` returns, with the state that was made before.
    """
    creates = any(
        is_group and not isinstance(role, int) and kind.creates(static, where)
        for is_group, role, where in zip(units.is_group, units.roles, units.filters, strict=True)
    )
    if creates:
        static, values = create(static, values)
    try:
        results = loop(_in_loop(kind, loop, static, values) if in_loop else static, values)
    except StateCreated:
        static, values = create(static, values)
        results = loop(static, values)
    begun = iter(
        kind.begun(kind.created(outside, inside), after)
        for outside, inside, after in zip(
            _group_values(units.values, units),
            _group_values(values, units),
            [group for parcel in results.parcels for group in parcel.groups],
            strict=True,
        )
    )
    parcels = [Parcel(tuple(next(begun) for _ in parcel.groups)) for parcel in results.parcels]
    return results._replace(parcels=parcels)


def _in_loop(kind: Kind, loop: Callable[..., Results], static: Any, values: list[Any]) -> Any:
    """The static half for a scan's body."""
    inside = kind.in_loop(static)
    untraced = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if untraced and inside is not static:
        # The body is not traced, but run as it is: what a trace would tell has to be known before.
        with jax.disable_jit(False):
            after = jax.eval_shape(lambda: loop(inside, values)).static.value
        inside = kind.in_loop(static, after)
    return inside


def _group_values(values: Sequence[Any], units: Units) -> list[Any]:
    return [v for v, is_group in zip(values, units.is_group, strict=True) if is_group]


def has_created(kind: Kind, units: Units, results: Results, roles: Sequence[Any]) -> bool:
    """Whether a run has made state in a group of one of these roles."""
    return any(
        role in roles and kind.created(before, after) is not None
        for before, after, role in groups(units, results)
    )


def with_created(
    kind: Kind,
    fn: Callable[..., Any],
    static: Any,
    units: Units,
    first: Sequence[Any],
    values: Sequence[Any],
    roles: Sequence[Any],
    again: bool = False,
) -> tuple[Any, list[Any]]:
    """Runs a body once, for the state that it makes.

    Args:
        kind: whose carriers cross.
        fn: the body; it may return anything.
        static: the kind's static half.
        units: what crosses.
        first: the values of `units` as the first run finds them.
        values: the values of `units` as they are outside.
        roles: the roles of groups in which state is made; the others make it in each run anew.
        again: whether the next run begins with the counters of this one, and not with those it
            left.

    Returns:
        The static half for the next run, and `values` with the new state.
    """

    def once(static: Any, units: Units) -> Any:
        cargo = units.cargo(static)
        results = run(kind, lambda args: (fn(*args), None)[1], cargo)
        created = [
            kind.created(before, after) if role in roles else None
            for before, after, role in groups(units, results)
        ]
        return created, results.static

    # Under jit, so that what the body computes beside is not computed.
    traced = traced_by_structure(fn, (kind, tuple(roles)), once)
    created, collected = traced(static, units.having(first))
    new = iter(created)
    added = [
        kind.union(value, made) if is_group and (made := next(new)) is not None else value
        for value, is_group in zip(values, units.is_group, strict=True)
    ]
    return kind.follow(static, None if again else collected.value), added


def groups(units: Units, results: Results) -> list[tuple[Any, Any, Any]]:
    """Each group of the carriers that went in: before, after, and its role."""
    before = [
        (value, role)
        for value, role, is_group in zip(units.values, units.roles, units.is_group, strict=True)
        if is_group
    ]
    after = [group for parcel in results.parcels for group in parcel.groups]
    return [(b, a, role) for (b, role), a in zip(before, after, strict=True)]
