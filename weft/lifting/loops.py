"""while_loop and fori_loop: loops of unknown length, whose state is carried, shared or folded.

    carry = init
    while cond(carry):
        carry = body(carry)

`FORK` keys are folded with the number of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft.errors import RoleError
from weft.lifting import axes
from weft.lifting.creation import traced_with_state, with_created
from weft.lifting.crossing import (
    Kind,
    Results,
    Static,
    Units,
    commit,
    depart,
    run,
)
from weft.lifting.names import named_after
from weft.lifting.roles import CARRY, FORK
from weft.lifting.scan import iteration, scan
from weft.lifting.structure import traced_by_structure


def while_loop(
    kind: Kind,
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    *,
    in_axes: Any,
) -> Callable[..., Any]:
    """`jax.lax.while_loop` of functions that take carriers.

    Args:
        kind: whose carriers cross.
        cond_fn: takes the arguments and returns whether to go on. What it changes is dropped.
        body_fn: takes the arguments and returns the next values of those that are carried.
        in_axes: a prefix of the arguments: CARRY or None, and `Roles` where a carrier is, in which
            FORK is for keys.

    Returns:
        A function that returns the last values of the arguments that are carried.

    Raises:
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for a role that such a loop does not have.
    """

    def pure(static: Any, units: Units) -> Results:
        traced: list[tuple[Units, Static]] = []

        def at(i: Any, carry: list[Any]) -> Units:
            return _folded(kind, i, units).merged(CARRY, carry)

        def cond(state: tuple[Any, list[Any]]) -> Any:
            cargo = at(*state).cargo(static)
            return run(kind, lambda args: cond_fn(*args), cargo).packed

        def body(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            i, carry = state
            inside = at(i, carry)
            returned, collected = iteration("while_loop", kind, body_fn, CARRY, static, inside)
            new_carry = returned.with_roles(CARRY)
            returned.values = [v if role is None else None for v, role in returned.pairs()]
            traced[:] = [(returned, collected)]
            return i + 1, new_carry

        named_after(cond_fn, cond)
        named_after(body_fn, body)
        _, carry = jax.lax.while_loop(cond, body, (jnp.int32(0), units.with_roles(CARRY)))
        returned, collected = traced[0]
        return Results(collected, *returned.merged(CARRY, carry).packed())

    looped = traced_by_structure((cond_fn, body_fn), kind, pure)

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        units = Units.of_cargo(cargo)
        axes.refuse_roles(units, "while_loop", (CARRY, FORK))
        if any(isinstance(role, int) for role in units.roles):
            raise RoleError("while_loop: its length is unknown, so it has no axis; give CARRY.")

        def create(static: Any, values: list[Any]) -> tuple[Any, list[Any]]:
            first = _folded(kind, 0, units.having(values)).values
            roles = (CARRY, None)
            return with_created(kind, body_fn, static, units, first, values, roles, again=True)

        def loop(static: Any, values: list[Any]) -> Results:
            return looped(static, units.having(values))

        static, _ = cargo.static.value
        results = traced_with_state(kind, loop, create, static, units.values, units, in_loop=False)
        return commit(kind, outer, results)

    return call


def _folded(kind: Kind, i: Any, units: Units) -> Units:
    """What iteration `i` finds: keys that are its own."""
    return units.having(
        [kind.fold(value, i) if role is FORK else value for value, role in units.pairs()]
    )


def fori_loop(
    kind: Kind,
    lower: Any,
    upper: Any,
    body_fn: Callable[..., Any],
    *,
    in_axes: Any,
    unroll: int | bool | None = None,
) -> Callable[..., Any]:
    """`jax.lax.fori_loop` of a function that takes carriers.

    Args:
        kind: whose carriers cross.
        lower: the first index.
        upper: the index after the last. With a Python number the loop can be differentiated in
            reverse.
        body_fn: `body_fn(i, *args)`; returns the next values of the arguments that are carried.
        in_axes: as for `while_loop`.
        unroll: how many iterations are written out, where both bounds are Python numbers.

    Returns:
        A function of the arguments; it returns the last values of those that are carried.
    """

    def body(i: Any, *args: Any) -> tuple[Any, Any]:
        return i + 1, body_fn(i, *args)

    named_after(body_fn, body)

    def call(*args: Any) -> Any:
        roles = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        if isinstance(lower, int) and isinstance(upper, int):
            loop = scan(
                kind,
                named_after(body_fn, lambda *args: (body(*args), None)),
                in_axes=(CARRY, *roles),
                out_axes=(CARRY, None),
                length=max(upper - lower, 0),
                unroll=1 if unroll is None else unroll,
            )
            return loop(jnp.int32(lower), *args)[0][1]
        loop = while_loop(kind, lambda i, *_: i < upper, body, in_axes=(CARRY, *roles))
        return loop(jnp.asarray(lower, jnp.int32), *args)[1]

    return call
