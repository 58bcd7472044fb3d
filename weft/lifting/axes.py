"""Shared parts of vmap and scan: an axis that state gains and loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from weft.errors import AxisSizeError, RoleError
from weft.lifting.kind import PureResults, StateNode, Units
from weft.lifting.roles import FORK, Roles, SpecialRole, is_role

Metadata = dict[Any, Any]


def check_roles(units: Units, transformation: str, allowed: tuple[SpecialRole, ...]) -> None:
    """Raises RoleError for a role that the transformation does not support."""
    for role in units.roles:
        if isinstance(role, SpecialRole) and role not in allowed:
            raise RoleError(
                f"{transformation} has no role {role!r}; expected an axis, None"
                + "".join(f", {a!r}" for a in allowed)
                + "."
            )


def enter_axis(
    units: Units, size: int | None, transformation: str, metadata: Metadata, at_least_keys: int = 0
) -> tuple[int, Units]:
    """Returns the size of the mapped axes, and the units with forked keys and without the axis.

    The size is that after metadata hooks, which may change the shapes of values. At least
    `at_least_keys` keys are forked from each. Raises AxisSizeError if sizes disagree, an axis does
    not exist, or the size is unknown.
    """
    entered = _with_axes(units, -1, metadata)
    n = _axis_size(entered, size, transformation)
    return n, entered.with_values(
        [
            units.kind.fork(value, max(n, at_least_keys)) if is_group and role is FORK else value
            for (value, role), is_group in zip(entered.pairs(), entered.is_group, strict=True)
        ]
    )


def _with_axes(units: Units, sign: int, metadata: Metadata) -> Units:
    """Adds the axis to the metadata of the values (`sign` 1) or removes it (-1)."""
    return units.with_values(
        [
            units.kind.axis(units.static, carrier, sign, value, role, metadata)
            if carrier is not None and isinstance(role, int)
            else value
            for (value, role), carrier in zip(units.pairs(), units.carriers, strict=True)
        ]
    )


def _axis_size(units: Units, size: int | None, transformation: str) -> int:
    # Names are slow to create for many values, so only errors do so.
    found = []
    for i, (value, role) in enumerate(units.pairs()):
        if not isinstance(role, int):
            continue
        for number, leaf in enumerate(jax.tree.leaves(value)):
            shape = np.shape(leaf)
            if not -len(shape) <= role < len(shape):
                raise AxisSizeError(
                    f"{transformation}: {units.location(i, number)} of shape {shape} has no axis "
                    f"{role}; give it an axis that it has, or None to share it."
                )
            found.append((i, number, shape[role]))
    sizes = {n for *_, n in found} | ({size} if size is not None else set())
    if not sizes:
        raise AxisSizeError(
            f"{transformation}: no input is mapped, so the size is unknown; give the size."
        )
    if len(sizes) > 1:
        named = {} if size is None else {"the size given": size}
        named |= {units.location(i, number): n for i, number, n in found}
        shown = ", ".join(f"{at}: {n}" for at, n in named.items())
        raise AxisSizeError(f"{transformation}: the mapped axes have different sizes ({shown}).")
    return sizes.pop()


def leave_axis(
    units: Units, results: PureResults, out_axes: object, metadata: Metadata
) -> PureResults:
    """Returns the results, with the axis added to their metadata."""
    left = _with_axes(units.of_results(results, out_axes), 1, metadata)
    return PureResults(results.static, *left.packed())


def out_axes_of_results(units: Units, out_axes: object, of_role: Callable[[Any], Any]) -> Any:
    """Returns JAX's entry for each part of the results, as a prefix of the `PureResults`.

    Input carriers keep their roles; `out_axes` has those of the function's own results.
    """

    def of_state_node(roles: Roles) -> StateNode:
        return StateNode(tuple(map(of_role, roles.roles)))

    packed = jax.tree.map(
        lambda role: of_state_node(role) if isinstance(role, Roles) else of_role(role),
        out_axes,
        is_leaf=is_role,
    )
    carried = (role for role in units.layout.flat_roles if isinstance(role, Roles))
    state_nodes = [of_state_node(roles) for roles in carried]
    return PureResults(of_role(None), state_nodes, packed)
