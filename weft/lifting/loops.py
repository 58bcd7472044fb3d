"""Loops of unknown length, with carried, shared or folded state: while_loop and fori_loop.

carry = init
while cond(carry):
    carry = body(carry)

`FORK` keys are folded with the index of the iteration.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from weft.errors import RoleError
from weft.lifting import axes
from weft.lifting.kind import Kind, PureResults, Units, call_pure, commit_results, split_args
from weft.lifting.roles import CARRY, FORK
from weft.lifting.scan import CarryStructures, LoopBody, carry_structures_of_args, scan
from weft.lifting.signature import named_after
from weft.lifting.state_creation import body_with_state, final_results
from weft.lifting.trace_cache import flatten_units, jit_by_structure, restore_unchanged
from weft.typing import ArrayLike, Fn


def while_loop(kind: Kind, cond_fn: Fn, body_fn: Fn, *, in_axes: object) -> Fn:
    """Applies `jax.lax.while_loop` to functions that take carriers.

    The result returns the last values of the carried arguments; changes by `cond_fn` are dropped.

    Args:
        body_fn: takes the arguments and returns the next values of the carried ones.
        in_axes: a prefix of the arguments: CARRY, None, or `Roles` of a carrier, FORK for keys.

    Raises:
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for an unsupported role, or a condition that reads references (`jax.Ref`).
    """

    def pure(fns: Any, trees: CarryStructures, units: Units) -> PureResults:
        cond_fn, body_fn = fns
        make = functools.partial(_WhileBody, body_fn, CARRY, trees)
        body, step, initial = body_with_state(make, units, lambda body: (body.carry, jnp.int32(0)))
        if step is None:
            return final_results(kind, body.undefined_results(), initial, body.end)

        def is_on(state: tuple[Any, list[Any]]) -> Any:
            i, carry = state
            of_condition = kind.static_in_condition(units.static, body.static)
            inside = body.inside(carry, i).with_static(of_condition)
            return call_pure(kind, cond_fn, inside.pure_args()).packed

        def iteration(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            i, carry = state
            return i + 1, step(carry, i)[0]

        named_after(cond_fn, is_on)
        named_after(body_fn, iteration)
        start = jnp.int32(0), body.carry
        if body.has_refs and jax.make_jaxpr(is_on)(start).effects:
            raise RoleError(
                "while_loop: the condition reads a jax.Ref (a variable with ref=True), and JAX "
                "does not show it what the body writes there; carry the value that it reads."
            )
        _, carry = jax.lax.while_loop(is_on, iteration, start)
        return final_results(kind, body.results(carry, []), initial, body.end)

    looped = jit_by_structure((cond_fn, body_fn), kind, pure)

    def call(*args: object) -> Any:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "while_loop", (CARRY, FORK))
        if any(isinstance(role, int) for role in units.roles):
            raise RoleError("while_loop: its length is unknown, so it has no axis; give CARRY.")

        trees = carry_structures_of_args(in_axes, pure_args.packed)
        structure, leaves = flatten_units(trees, units)
        results = restore_unchanged(leaves, looped(structure, leaves))
        return commit_results(kind, outer, results)

    return call


class _WhileBody(LoopBody):
    """Body whose slices are the iteration's index, which is folded into keys."""

    transformation = "while_loop"

    def inside(self, carry: list[Any], xs: object) -> Units:
        folded = self._units.with_values(
            [self.kind.fold(v, xs) if role is FORK else v for v, role in self._units.pairs()]
        )
        return folded.with_role_replaced(CARRY, self._carried(carry))


def fori_loop(
    kind: Kind,
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Fn,
    *,
    in_axes: object,
    unroll: int | bool | None = None,
) -> Fn:
    """Applies `jax.lax.fori_loop` to a function that takes carriers; see `while_loop`.

    Args:
        upper: the index after the last. Reverse differentiation requires a Python number.
        body_fn: `body_fn(i, *args)` returns the next values of the carried arguments.
        unroll: number of iterations to unroll, if both bounds are Python numbers.
    """

    def body(i: Any, *args: Any) -> tuple[Any, Any]:
        return i + 1, body_fn(i, *args)

    named_after(body_fn, body)

    def call(*args: object) -> Any:
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
