"""Shared parts of vmap and scan: an axis that state gains and loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from weft.errors import AxisSizeError, RoleError
from weft.lifting.kind import PureResults, StateNode
from weft.lifting.roles import FORK, Role, Roles, SpecialRole, is_role
from weft.lifting.units import Units
from weft.typing import PyTree

Metadata = dict[Any, Any]


def check_roles(
    units: Units, transformation: str, allowed: tuple[SpecialRole, ...]
) -> None:
    """Raises RoleError for a role that the transformation does not support."""
    for unit in units.layout.units:
        if isinstance(unit.role, SpecialRole) and unit.role not in allowed:
            special_roles = "".join(f", {role!r}" for role in allowed)
            raise RoleError(
                f"{transformation} has no role {unit.role!r}; expected an axis, None"
                f"{special_roles}."
            )


def enter_axis(
    units: Units,
    size: int | None,
    transformation: str,
    metadata: Metadata,
    at_least_keys: int = 0,
) -> tuple[int, Units]:
    """Returns the size of the mapped axes, and the units with forked keys and without the axis.

    The values keep their axis, which JAX removes; their metadata loses it. The size is that after
    metadata hooks, which may change the shapes of values. At least `at_least_keys` keys are forked
    from each. Raises AxisSizeError if sizes disagree, an axis does not exist, or the size is
    unknown.
    """
    # Metadata first: a hook may change the shape of a value.
    entered = _change_metadata(units, -1, metadata)
    n = _axis_size(entered, size, transformation)
    values: list[PyTree] = []
    for unit, value in entered.items():
        if unit.carrier is not None and unit.role is FORK:
            value = units.kind.fork(value, max(n, at_least_keys))
        values.append(value)
    return n, entered.with_values(values)


def leave_axis(
    units: Units, results: PureResults, out_axes: PyTree, metadata: Metadata
) -> PureResults:
    """Returns the results, with the axis added to their metadata."""
    returned = units.of_results(results, out_axes)
    state_nodes, packed = _change_metadata(returned, 1, metadata).packed()
    return PureResults(results.static, state_nodes, packed)


def _change_metadata(units: Units, sign: int, metadata: Metadata) -> Units:
    """Adds the axis to the metadata of the mapped groups (`sign` 1) or removes it (-1)."""
    values: list[PyTree] = []
    for unit, value in units.items():
        if unit.carrier is not None and isinstance(unit.role, int):
            value = units.kind.axis(
                units.static, unit.carrier, sign, value, unit.role, metadata
            )
        values.append(value)
    return units.with_values(values)


def _axis_size(units: Units, size: int | None, transformation: str) -> int:
    """Returns the one size of all mapped axes, and of `size` if it is given."""
    # By the indices of units and leaves: for many values, only errors can afford their names.
    sizes: dict[tuple[int, int], int] = {}
    for i, (unit, value) in enumerate(units.items()):
        axis = unit.role
        if not isinstance(axis, int):
            continue
        for number, leaf in enumerate(jax.tree.leaves(value)):
            shape = np.shape(leaf)
            if not -len(shape) <= axis < len(shape):
                raise AxisSizeError(
                    f"{transformation}: {units.location(i, number)} of shape {shape} has no axis "
                    f"{axis}; give it an axis that it has, or None to share it."
                )
            sizes[i, number] = shape[axis]
    different_sizes = set(sizes.values())
    if size is not None:
        different_sizes.add(size)
    if not different_sizes:
        raise AxisSizeError(
            f"{transformation}: no input is mapped, so the size is unknown; give the size."
        )
    if len(different_sizes) == 1:
        return different_sizes.pop()
    sizes_by_location: dict[str, int] = {}
    if size is not None:
        sizes_by_location["the size given"] = size
    for (i, number), n in sizes.items():
        sizes_by_location[units.location(i, number)] = n
    listing = ", ".join(
        f"{location}: {n}" for location, n in sizes_by_location.items()
    )
    raise AxisSizeError(
        f"{transformation}: the mapped axes have different sizes ({listing})."
    )


def out_axes_of_results(
    units: Units, out_axes: PyTree, jax_axis: Callable[[Role], PyTree]
) -> PureResults:
    """Returns JAX's entry for each part of the results, as a prefix of the `PureResults`.

    Input carriers keep their roles; `out_axes` has those of the function's own results. `jax_axis`
    returns JAX's entry for a role.
    """

    def node_axes(roles: Roles) -> StateNode:
        return StateNode(tuple(jax_axis(role) for role in roles.roles))

    def result_axes(role: Role | Roles) -> PyTree:
        if isinstance(role, Roles):
            return node_axes(role)
        return jax_axis(role)

    packed = jax.tree.map(result_axes, out_axes, is_leaf=is_role)
    state_nodes: list[StateNode] = []
    for roles in units.layout.leaf_roles:
        if isinstance(roles, Roles):
            state_nodes.append(node_axes(roles))
    return PureResults(jax_axis(None), state_nodes, packed)
