"""scan: a loop whose state is carried, sliced, shared or forked, group by group.

    carry, ys = init, []
    for i in range(length):
        carry, y = body(carry, xs[i])
        ys.append(y)

`CARRY` state and arguments are the carry, those with an axis are the `xs` (and come back as `ys`
along that axis), `FORK` keys are split into one per iteration, and what has the role None is the
same in every iteration.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from weft.errors import CarryStructureError, RoleError
from weft.lifting import axes
from weft.lifting.crossing import (
    Cargo,
    Kind,
    Results,
    Static,
    Units,
    commit,
    depart,
    in_results,
    run,
)
from weft.lifting.roles import CARRY, FORK, Role


def scan(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    in_axes: Any,
    out_axes: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    metadata: axes.Metadata | None = None,
) -> Callable[..., Any]:
    """`jax.lax.scan` of a function that takes carriers.

    Args:
        kind: whose carriers cross.
        fn: the body.
        in_axes: a prefix of the arguments: CARRY, an axis, None, or `Roles` where a carrier is.
        out_axes: a prefix of the results: CARRY or the axis along which they are stacked. The n-th
            CARRY among the results is what the n-th among the arguments is in the next iteration.
        length: the number of iterations, where no argument tells it.
        reverse: whether to run from the last index to the first.
        unroll: as for `jax.lax.scan`.
        metadata: handed to axis metadata that gains or loses the axis.

    Raises:
        AxisSizeError: if the scanned axes do not agree.
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for a role that a loop does not have.
    """
    metadata = metadata or {}

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        units = Units.of_cargo(cargo)
        axes.refuse_roles(units, "scan", (CARRY, FORK))
        n = axes.axis_size(units, length, "scan")
        values = axes.enter_axis(kind, units, n, metadata)
        shared = {
            id(leaf)
            for value, role in zip(values, units.roles, strict=True)
            if role is None
            for leaf in jax.tree.leaves(value)
        }
        # The body's results are known only once it was traced; their structure is all that is kept
        # of them.
        traced: list[tuple[Units, Static]] = []

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            packed = units.rebuild(_fill(units.roles, values, carry, xs))
            results = run(kind, lambda args: fn(*args), Cargo(cargo.static, packed), out_axes)
            returned = in_results(cargo, results, out_axes)
            new_carry, new_ys = returned.with_roles(CARRY), _stacked(returned, shared)
            _check_carry(carry, new_carry)
            returned.values = [v if role is None else None for v, role in returned.pairs()]
            traced[:] = [(returned, results.static)]
            return new_carry, new_ys

        carry, ys = jax.lax.scan(
            body,
            [v for v, role in zip(values, units.roles, strict=True) if role is CARRY],
            [_front(v, r) for v, r in zip(values, units.roles, strict=True) if _is_sliced(r)],
            length=n,
            reverse=reverse,
            unroll=unroll,
        )
        returned, static = traced[0]
        parcels, packed = returned.rebuild(_fill(returned.roles, returned.values, carry, ys, True))
        results = Results(static, parcels, packed)
        return commit(kind, outer, axes.leave_axis(kind, cargo, results, out_axes, metadata))

    return call


def _is_sliced(role: Role) -> bool:
    return role is FORK or isinstance(role, int)


def _front(value: Any, role: Any) -> Any:
    """The scanned axis in front, where `jax.lax.scan` wants it."""
    return value if role is FORK else jax.tree.map(lambda x: jnp.moveaxis(x, role, 0), value)


def _fill(
    roles: Sequence[Role],
    values: Sequence[Any],
    carry: Sequence[Any],
    sliced: Sequence[Any],
    stacked: bool = False,
) -> list[Any]:
    """`values`, with the carried and the sliced ones replaced in order."""
    next_carry, next_sliced = iter(carry), iter(sliced)

    def pick(role: Any, value: Any) -> Any:
        if role is CARRY:
            return next(next_carry)
        if not _is_sliced(role):
            return value
        slice_ = next(next_sliced)
        if stacked and role is not FORK:
            return jax.tree.map(lambda y: jnp.moveaxis(y, 0, role), slice_)
        return slice_

    return [pick(role, value) for role, value in zip(roles, values, strict=True)]


def _stacked(returned: Units, shared: set[int]) -> list[Any]:
    """What the body adds to the stacked results; `shared` are the ids of arrays from outside."""
    for value, role in returned.pairs():
        if role is None and not all(id(leaf) in shared for leaf in jax.tree.leaves(value)):
            raise RoleError(
                "scan: the body returns or changes something with the role None, which is the "
                "same in every "
                "iteration; give it CARRY, or an axis along which to stack it."
            )
    return [v for v, role in zip(returned.values, returned.roles, strict=True) if _is_sliced(role)]


def _check_carry(before: list[Any], after: list[Any]) -> None:
    """Raises CarryStructureError if the body's carry differs from the one it was given."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise CarryStructureError(
            "scan: the body returns a carry of another structure than it was given: "
            f"given {jax.tree.structure(before)}, returned {jax.tree.structure(after)}."
        )
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        old_type, new_type = jax.typeof(old), jax.typeof(new)
        # Python numbers take the dtype of what they meet, which `jax.lax.scan` sorts out itself.
        same_dtype = old_type.dtype == new_type.dtype or old_type.weak_type
        if old_type.shape != new_type.shape or not same_dtype:
            raise CarryStructureError(
                f"scan: carry{jax.tree_util.keystr(path)} is given as {old_type.str_short()} and "
                "returned as "
                f"{new_type.str_short()}; a carry keeps its shape and dtype in every iteration."
            )
