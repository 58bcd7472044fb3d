"""The parts of packed arguments or results in a flat list, each with its role.

A packed tree has a `StateNode` for each carrier, see `weft.lifting.kind`. A unit is a group of such
a node, or another leaf of the tree. Transformations treat each unit by its role: they map it over
an axis, carry it, share it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import KeyPath, keystr, tree_leaves_with_path

from weft.lifting.kind import (
    Filter,
    Group,
    Kind,
    PureArgs,
    PureResults,
    StateNode,
    Static,
    StaticHalf,
    Structure,
    is_state_node,
)
from weft.lifting.roles import Role, Roles, broadcast_roles, carrier_roles
from weft.typing import PyTree


class Unit(NamedTuple):
    """A part of a packed tree with one role: a group of a carrier, or another leaf.

    Attributes:
        where: the filter of a group; None for another leaf.
        carrier: the index of a group's carrier; None for another leaf.
        leaf: the index of the unit, or of its `StateNode`, among the leaves of the packed tree.
    """

    role: Any
    where: Filter
    carrier: int | None
    leaf: int


@dataclasses.dataclass(frozen=True)
class UnitLayout:
    """Positions and roles of the units in a packed tree.

    Attributes:
        static: the static half of the kind.
        structure: that of the packed tree, in which a `StateNode` is a leaf.
        leaf_roles: the role of each leaf, `Roles` for a `StateNode`.
        is_state_node: whether each leaf is a `StateNode`.
        holds_results: whether the tree is the pair of state nodes and results of a call.
    """

    kind: Kind = dataclasses.field(compare=False)
    static: Hashable
    structure: Structure
    leaf_roles: tuple[Any, ...]
    is_state_node: tuple[bool, ...]
    holds_results: bool = False

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        units: list[Unit] = []
        n_carriers = 0
        leaves = zip(self.leaf_roles, self.is_state_node, strict=True)
        for i, (leaf_role, is_node) in enumerate(leaves):
            if not is_node:
                units.append(Unit(leaf_role, None, None, i))
                continue
            # The groups of a node are in the order of its roles.
            for where, role in carrier_roles(leaf_role):
                units.append(Unit(role, where, n_carriers, i))
            n_carriers += 1
        return tuple(units)


class Units:
    """Packed tree as a list of its parts with roles: groups of `StateNode`s, and other leaves.

    Attributes:
        layout: where each value belongs; hashable, so part of the keys of caches.
        values: one per unit of the layout, a pytree or a leaf.
    """

    def __init__(self, layout: UnitLayout, values: Iterable[PyTree]):
        self.layout = layout
        self.values = list(values)
        self.kind = layout.kind
        self.static = layout.static

    @classmethod
    def of_pure_args(cls, kind: Kind, pure_args: PureArgs) -> Units:
        static, leaf_roles = pure_args.static.value, pure_args.roles.value
        return cls._of_packed(
            kind, static, pure_args.packed, leaf_roles, holds_results=False
        )

    def of_results(self, results: PureResults, out_roles: PyTree) -> Units:
        """Returns the units of the results of a call; input carriers keep their roles."""
        input_roles = [
            role for role in self.layout.leaf_roles if isinstance(role, Roles)
        ]
        result_roles = broadcast_roles(
            out_roles, results.packed, is_state_node, "out_axes"
        )
        packed = results.state_nodes, results.packed
        leaf_roles = (*input_roles, *result_roles)
        return Units._of_packed(
            self.kind, self.static, packed, leaf_roles, holds_results=True
        )

    @classmethod
    def _of_packed(
        cls,
        kind: Kind,
        static: Hashable,
        packed: PyTree,
        leaf_roles: tuple[Any, ...],
        holds_results: bool,
    ) -> Units:
        # A `StateNode` is a leaf here: its groups are units, whatever their own leaves are.
        leaves, structure = jax.tree.flatten(packed, is_leaf=is_state_node)
        are_state_nodes = tuple(map(is_state_node, leaves))
        values: list[PyTree] = []
        for leaf, is_node in zip(leaves, are_state_nodes, strict=True):
            if is_node:
                values.extend(leaf.groups)
            else:
                values.append(leaf)
        layout = UnitLayout(
            kind, static, structure, leaf_roles, are_state_nodes, holds_results
        )
        return cls(layout, values)

    def packed(self) -> PyTree:
        """Returns the tree with these values."""
        values = iter(self.values)
        leaves: list[Any] = []
        for leaf_role, is_node in zip(
            self.layout.leaf_roles, self.layout.is_state_node, strict=True
        ):
            if is_node:
                groups = [next(values) for _ in carrier_roles(leaf_role)]
                leaves.append(StateNode(tuple(groups)))
            else:
                leaves.append(next(values))
        return self.layout.structure.unflatten(leaves)

    def pure_args(self) -> PureArgs:
        """Returns the crossing values."""
        return PureArgs(
            Static(self.static), Static(self.layout.leaf_roles), self.packed()
        )

    def with_static(self, static: StaticHalf) -> Units:
        """Returns the same units with another static half of the kind."""
        return Units(
            dataclasses.replace(self.layout, static=static), self.values
        )

    def with_values(self, values: Iterable[PyTree]) -> Units:
        """Returns the same units with other values."""
        return Units(self.layout, values)

    def items(self) -> Iterator[tuple[Unit, PyTree]]:
        """Yields each unit with its value."""
        return zip(self.layout.units, self.values, strict=True)

    def mapped(self, fn: Callable[[PyTree, Any], PyTree]) -> Units:
        """Returns the same units with the values that `fn` returns for each value and its role."""
        return self.with_values(
            fn(value, unit.role) for unit, value in self.items()
        )

    def groups(self) -> list[Group]:
        """Returns the groups of all carriers."""
        return [
            value for unit, value in self.items() if unit.carrier is not None
        ]

    def indices_with_role(self, role: Role) -> list[int]:
        """Returns the indices of the units with the role `role`, those of carriers first.

        Results have this order, too, since the carriers' state comes before the function's own.
        """
        group_indices: list[int] = []
        leaf_indices: list[int] = []
        for i, unit in enumerate(self.layout.units):
            if unit.role is role:
                indices = (
                    leaf_indices if unit.carrier is None else group_indices
                )
                indices.append(i)
        return group_indices + leaf_indices

    def values_with_role(self, role: Role) -> list[PyTree]:
        """Returns the values of these units."""
        return [self.values[i] for i in self.indices_with_role(role)]

    def with_role_replaced(
        self, role: Role, replacements: Sequence[PyTree]
    ) -> Units:
        """Returns the units with other values of that role, in the order of `values_with_role`."""
        values = list(self.values)
        for i, value in zip(
            self.indices_with_role(role), replacements, strict=True
        ):
            values[i] = value
        return self.with_values(values)

    def location(self, i: int, leaf: int | None = None) -> str:
        """Returns the location of the i-th value, or of its leaf with that number, for errors."""
        path = ()
        if leaf is not None:
            path, _ = tree_leaves_with_path(self.values[i])[leaf]
        unit = self.layout.units[i]
        if unit.carrier is not None:
            return self.kind.location(self.static, unit.carrier, path)
        # The tree with the number of each leaf in its place, to find the path of one.
        positions = self.layout.structure.unflatten(
            range(self.layout.structure.num_leaves)
        )
        unit_path, _ = tree_leaves_with_path(positions)[unit.leaf]
        if self.layout.holds_results:
            # The tree is a pair, whose second part is the user's result.
            _, *path_in_result = unit_path
            return f"the result{keystr((*path_in_result, *path))}"
        return self.kind.location(self.static, None, (*unit_path, *path))

    def location_in_groups(self, path: KeyPath) -> str:
        """Returns a location by its JAX path in a list of all groups, for errors."""
        carriers = [
            unit.carrier
            for unit in self.layout.units
            if unit.carrier is not None
        ]
        group, *path_in_group = path
        return self.kind.location(
            self.static, carriers[group.idx], tuple(path_in_group)
        )
