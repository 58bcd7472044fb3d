"""Symbols that select parts of an object's state by filters; the first match decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from weft import errors, lifting
from weft.lifting.roles import carrier_roles, is_role
from weft.nnx.filters import (
    Filter,
    Path,
    PathIn,
    Predicate,
    predicates,
    to_predicate,
)
from weft.nnx.pytree import Pytree, data_children
from weft.nnx.state import State, to_flat_state
from weft.nnx.variables import Variable
from weft.typing import PyTree


class Carry:
    """Marker in `in_axes` and `out_axes` of a scan for the carry."""


# An axis, None, `Carry`, a sharding or a `PartitionSpec`; all are hashable.
RoleMarker = Any
ByFilter = Mapping[Filter, RoleMarker] | Iterable[tuple[Filter, RoleMarker]]


class _StateFilters:
    """Pairs of a filter and what the matching part of an object's state gets, called its role."""

    def __init__(self, by_filter: ByFilter):
        if isinstance(by_filter, State):
            paths_and_roles: list[tuple[Path, RoleMarker]] = []
            for path, leaf in to_flat_state(by_filter):
                if isinstance(leaf, Variable):
                    leaf = leaf.get_raw_value()
                paths_and_roles.append((path, leaf))
            by_filter = _filters_by_role(paths_and_roles)
        elif isinstance(by_filter, Mapping):
            by_filter = by_filter.items()
        self._items = tuple(by_filter)
        self._predicates = predicates([where for where, _ in self._items])

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickled by Flax: two tuples, of the filters and of what each of them gets.
        if "_filters" in state:
            self.__init__(zip(*state.values(), strict=True))
        else:
            vars(self).update(state)

    @property
    def filters(self) -> tuple[Predicate, ...]:
        """The filters, as functions of a path and a variable."""
        return self._predicates

    def map_prefix(self, path: Path, variable: Variable[Any]) -> RoleMarker:
        """Returns the role of a variable at a path; raises StateFilterError without one."""
        for matches, (_, role) in zip(
            self._predicates, self._items, strict=True
        ):
            if matches(path, variable):
                return role
        raise errors.StateFilterError(
            f"no filter of {self!r} matches the {type(variable).__name__} at {path!r}; add `...` "
            "as the last one."
        )

    @property
    def roles(self) -> lifting.Roles:
        """The roles for `weft.lifting`."""
        items: list[tuple[Predicate, RoleMarker]] = []
        for matches, (_, marker) in zip(
            self._predicates, self._items, strict=True
        ):
            items.append((matches, _without_marker(marker)))
        return _RolesByFilter(self, items)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.roles == other.roles  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        return hash((type(self), self.roles))

    def __repr__(self) -> str:
        items = [
            f"{_name(where)}: {_name(role)}" for where, role in self._items
        ]
        return f"{type(self).__name__}({{{', '.join(items)}}})"


def _name(x: object) -> str:
    if x is ...:
        return "..."
    return x.__name__ if isinstance(x, type) else repr(x)


class _RolesByFilter(lifting.Roles):
    """The roles of `StateAxes` or `StateSharding`, which errors show instead."""

    source: _StateFilters

    def __new__(
        cls,
        source: _StateFilters,
        items: Iterable[tuple[Predicate, RoleMarker]],
    ) -> "_RolesByFilter":
        roles = super().__new__(cls, items)
        roles.source = source
        return roles

    def __repr__(self) -> str:
        return repr(self.source)


class StateAxes(_StateFilters):
    """The mapped axis of each part of an object's state.

    Args:
        filter_axes: maps filters to an axis, None to share, or for a scan `Carry`; or a `State`
            with these in place of variables or of their values.

    >>> model = nnx.Dict(w=nnx.Param(jnp.ones((2, 3))), n=nnx.BatchStat(jnp.array(1.0)))
    >>> axes = nnx.StateAxes({nnx.Param: 1, ...: None})
    >>> nnx.vmap(lambda m: m.w.sum() + m.n, in_axes=axes)(model)
    Array([3., 3., 3.], dtype=float32)
    """

    def __init__(self, filter_axes: ByFilter):
        super().__init__(filter_axes)

    @property
    def axes(self) -> tuple[RoleMarker, ...]:
        """The axes, in the filters' order."""
        return tuple(axis for _, axis in self._items)

    def items(self) -> Iterable[tuple[Filter, RoleMarker]]:
        """Returns pairs of a filter and an axis."""
        return zip(self.filters, self.axes, strict=True)


class StateSharding(_StateFilters):
    """The sharding of each part of an object's state.

    Args:
        filter_sharding: maps filters to a sharding, or for `shard_map` a `PartitionSpec`; or a
            `State` with these in place of variables or of their values.
    """

    def __init__(self, filter_sharding: ByFilter):
        super().__init__(filter_sharding)

    @property
    def shardings(self) -> tuple[RoleMarker, ...]:
        """The shardings, in the filters' order."""
        return tuple(sharding for _, sharding in self._items)


@dataclasses.dataclass(frozen=True)
class DiffState:
    """The position of an argument, and a filter of its state to differentiate."""

    argnum: int
    filter: Filter

    def map_prefix(self, path: Path, variable: Variable[Any]) -> bool:
        """Returns whether a variable is differentiated."""
        return to_predicate(self.filter)(path, variable)


def _without_marker(marker: RoleMarker) -> RoleMarker:
    """Returns the role of `weft.lifting` for an axis, a sharding or `Carry`."""
    return lifting.CARRY if marker is Carry else marker


def as_roles(prefix: PyTree) -> PyTree:
    """Converts a prefix of arguments or results to roles of `weft.lifting`.

    `prefix` has axes or shardings, `Carry`, `StateAxes`, `StateSharding`, or objects with axes in
    place of variables (see `nnx.prefix`).
    """
    # As in JAX; the arguments of a call are a tuple, and a list could not be their prefix.
    if isinstance(prefix, list):
        prefix = tuple(prefix)
    return jax.tree.map(_as_role, prefix, is_leaf=_is_role_leaf)


def as_axes(prefix: PyTree, name: str, has_carry: bool = False) -> PyTree:
    """Converts a prefix of axes to roles of `weft.lifting`.

    Raises TransformArgumentError if an entry is not an axis, or a `Carry` without `has_carry`.
    """
    roles = as_roles(prefix)
    _check_class(roles, name, StateAxes)
    for role in jax.tree.leaves(roles, is_leaf=is_role):
        for axis in carrier_roles(role).roles:
            _check_axis(axis, name, has_carry)
    return roles


def _check_axis(axis: RoleMarker, name: str, has_carry: bool) -> None:
    if axis is None or isinstance(axis, int):
        return
    if axis is not lifting.CARRY:
        raise errors.TransformArgumentError(
            f"{name} has {axis!r}, a {type(axis).__name__}, where an axis is expected; use "
            "an integer, or None for an argument that is not mapped."
        )
    if not has_carry:
        raise errors.RoleKindError(
            f"{name} has a Carry, which only loops support; use an axis or None."
        )


def as_shardings(prefix: PyTree, name: str) -> PyTree:
    """Converts a prefix of shardings to roles of `weft.lifting`.

    Raises RoleKindError if an entry is a `StateAxes`.
    """
    roles = as_roles(prefix)
    _check_class(roles, name, StateSharding)
    return roles


def _check_class(roles: PyTree, name: str, cls: type[_StateFilters]) -> None:
    """Raises RoleKindError for `StateSharding` among axes, or `StateAxes` among shardings."""
    for role in jax.tree.leaves(roles, is_leaf=is_role):
        if isinstance(role, _RolesByFilter) and not isinstance(
            role.source, cls
        ):
            raise errors.RoleKindError(
                f"{name} has a {type(role.source).__name__}, where a {cls.__name__} is expected; "
                f"use nnx.{cls.__name__}."
            )


def _is_role_leaf(x: PyTree) -> bool:
    is_marker = x is None or x is Carry
    return is_marker or isinstance(x, _StateFilters | Pytree | Variable)


def _as_role(x: PyTree) -> RoleMarker:
    if isinstance(x, _StateFilters):
        return x.roles
    if isinstance(x, Pytree):
        return _roles_of_object(x)
    _refuse_variable(x)
    return _without_marker(x)


def _refuse_variable(x: PyTree) -> None:
    if isinstance(x, Variable):
        raise errors.TransformArgumentError(
            f"a {type(x).__name__} is given where an axis or a sharding is expected; replace it "
            "by the axis or sharding of the whole variable."
        )


def _roles_of_object(prefix: Pytree) -> lifting.Roles:
    """Returns the roles of an object with axes or shardings in place of its variables."""
    items: list[tuple[Path, RoleMarker]] = []

    def walk(x: PyTree, path: Path) -> None:
        _refuse_variable(x)
        children = data_children(x)
        for name, value in children:
            walk(value, (*path, name))
        if not children and not isinstance(x, Pytree):
            items.append((path, _without_marker(x)))

    walk(prefix, ())
    return lifting.Roles(_filters_by_role(items))


def _filters_by_role(
    items: Iterable[tuple[Path, RoleMarker]],
) -> list[tuple[PathIn, RoleMarker]]:
    """Returns one filter for each role, of the paths that have it."""
    paths_by_role: dict[RoleMarker, list[Path]] = {}
    for path, role in items:
        paths_by_role.setdefault(role, []).append(path)
    filters: list[tuple[PathIn, RoleMarker]] = []
    for role, paths in paths_by_role.items():
        filters.append((PathIn(frozenset(paths)), role))
    return filters
