"""Loops of unknown length, with carried, shared or folded state: while_loop and fori_loop.

carry = init
while cond(carry):
    carry = body(carry)

`FORK` keys are folded with the index of the iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft.errors import RoleError
from weft.lifting import axes
from weft.lifting.creation import Made, body_with_state, with_begun
from weft.lifting.crossing import (
    Kind,
    Results,
    Units,
    commit,
    depart,
    run,
)
from weft.lifting.names import named_after
from weft.lifting.roles import CARRY, FORK
from weft.lifting.scan import Trees, iteration, own_where_same, scan, trees_of_arguments
from weft.lifting.structure import traced_by_structure


def while_loop(
    kind: Kind,
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    *,
    in_axes: Any,
) -> Callable[..., Any]:
    """Applies `jax.lax.while_loop` to functions that take carriers.

    The result returns the last values of the carried arguments; changes by `cond_fn` are dropped.

    Args:
        body_fn: takes the arguments and returns the next values of the carried ones.
        in_axes: a prefix of the arguments: CARRY or None, or `Roles` for a carrier, with FORK for
            keys.

    Raises:
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for an unsupported role.
    """

    def pure(of_call: Any, units: Units) -> Results:
        static, trees = of_call
        make = functools.partial(_Body, kind, body_fn, trees)
        body, run_body, made = body_with_state(
            "while_loop", kind, make, static, units, lambda body: body.first
        )
        same: list[bool] = []

        def cond(state: tuple[Any, list[Any]]) -> Any:
            cargo = body.inside(*state).cargo(kind.for_condition(static, body.static))
            return run(kind, lambda args: cond_fn(*args), cargo).packed

        def noted(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            i, carry = state
            new_carry = run_body(i, carry)
            same[:] = [a is b for a, b in zip(carry, new_carry, strict=True)]
            return i + 1, new_carry

        named_after(cond_fn, cond)
        named_after(body_fn, noted)
        _, carry = jax.lax.while_loop(cond, noted, body.first)
        carry = own_where_same(body.first[1], carry, same)
        return with_begun(kind, body.results(carry), made)

    looped = traced_by_structure((cond_fn, body_fn), kind, pure)

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        units = Units.of_cargo(cargo)
        axes.refuse_roles(units, "while_loop", (CARRY, FORK))
        if any(isinstance(role, int) for role in units.roles):
            raise RoleError("while_loop: its length is unknown, so it has no axis; give CARRY.")

        static, _ = cargo.static.value
        of_call = static, trees_of_arguments(in_axes, cargo.packed)
        return commit(kind, outer, looped(of_call, units))

    return call


class _Body:
    """Body as a function of an iteration's index and of the leaves of the carry."""

    def __init__(self, kind: Kind, fn: Callable[..., Any], trees: Trees, static: Any, units: Units):
        self._kind, self.fn, self.static, self._units = kind, fn, static, units
        self._trees = trees
        carry, self._tree = jax.tree.flatten(units.with_roles(CARRY))
        self.first = jnp.int32(0), carry
        self.made: Made | None = None

    def inside(self, i: Any, carry: list[Any]) -> Units:
        """Returns the inputs of the i-th iteration."""
        folded = _folded(self._kind, i, self._units)
        return folded.merged(CARRY, self._tree.unflatten(carry))

    def __call__(self, i: Any, carry: list[Any]) -> list[Any]:
        inside = self.inside(i, carry)
        returned, self.collected, made = iteration(
            "while_loop", self._kind, self.fn, CARRY, self._trees, self.static, inside
        )
        if made is not None:
            leaves, tree = jax.tree.flatten(made)
            self.made = Made(tree, self.collected.value)
            return leaves
        new_carry = jax.tree.leaves(returned.with_roles(CARRY))
        returned.values = [v if role is None else None for v, role in returned.pairs()]
        self._returned = returned
        return new_carry

    def results(self, carry: list[Any]) -> Results:
        """Returns the results of the loop."""
        merged = self._returned.merged(CARRY, self._tree.unflatten(carry))
        return Results(self.collected, *merged.packed())


def _folded(kind: Kind, i: Any, units: Units) -> Units:
    """Returns the units with iteration `i`'s own keys."""
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
    """Applies `jax.lax.fori_loop` to a function that takes carriers; see `while_loop`.

    Args:
        upper: the index after the last. Reverse differentiation requires a Python number.
        body_fn: `body_fn(i, *args)` returns the next values of the carried arguments.
        unroll: number of iterations to unroll, if both bounds are Python numbers.
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
