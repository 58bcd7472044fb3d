"""Symbols that select parts of an object's state by filters; the first match decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax

from weft import errors, lifting
from weft.lifting.roles import is_role
from weft.nnx.filters import Filter, Path, PathIn, predicates, to_predicate
from weft.nnx.pytree import Pytree, data_children
from weft.nnx.state import State, to_flat_state
from weft.nnx.variables import Variable


class Carry:
    """Marker in `in_axes` and `out_axes` of a scan for the carry."""


class _StateFilters:
    def __init__(self, by_filter: Mapping[Filter, Any] | Iterable[tuple[Filter, Any]]):
        if isinstance(by_filter, State):
            items = to_flat_state(by_filter)
            roles = (x.get_raw_value() if isinstance(x, Variable) else x for _, x in items)
            by_filter = _by_role(zip(items.paths, roles, strict=True))
        items = by_filter.items() if isinstance(by_filter, Mapping) else by_filter
        self._items = tuple(items)
        self._predicates = predicates([where for where, _ in self._items])

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_filters" in state:  # pickled by Flax: filters, and what each of them gets
            self.__init__(zip(*state.values(), strict=True))
        else:
            vars(self).update(state)

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters, as functions of a path and a variable."""
        return self._predicates

    def map_prefix(self, path: Path, variable: object) -> Any:
        """Returns the role of a variable at a path; raises StateFilterError without one."""
        for matches, (_, role) in zip(self._predicates, self._items, strict=True):
            if matches(path, variable):
                return role
        raise errors.StateFilterError(
            f"no filter of {self!r} matches the {type(variable).__name__} at {path!r}; add `...` "
            "as the last one."
        )

    @property
    def roles(self) -> lifting.Roles:
        """The roles for `weft.lifting`."""
        roles = (_role(what) for _, what in self._items)
        return _RolesByFilter(self, zip(self._predicates, roles, strict=True))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.roles == other.roles  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        return hash((type(self), self.roles))

    def __repr__(self) -> str:
        items = ", ".join(f"{_name(where)}: {_name(role)}" for where, role in self._items)
        return f"{type(self).__name__}({{{items}}})"


def _name(x: object) -> str:
    return "..." if x is ... else x.__name__ if isinstance(x, type) else repr(x)


class _RolesByFilter(lifting.Roles):
    source: _StateFilters

    def __new__(cls, source: _StateFilters, items: Iterable[tuple[Any, Any]]) -> "_RolesByFilter":
        made = super().__new__(cls, items)
        made.source = source
        return made

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

    def __init__(self, filter_axes: Mapping[Filter, Any] | Iterable[tuple[Filter, Any]]):
        super().__init__(filter_axes)

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axes, in the filters' order."""
        return tuple(axis for _, axis in self._items)

    def items(self) -> Iterable[tuple[Filter, Any]]:
        """Returns pairs of a filter and an axis."""
        return zip(self.filters, self.axes, strict=True)


class StateSharding(_StateFilters):
    """The sharding of each part of an object's state.

    Args:
        filter_sharding: maps filters to a sharding, or for `shard_map` a `PartitionSpec`; or a
            `State` with these in place of variables or of their values.
    """

    def __init__(self, filter_sharding: Mapping[Filter, Any] | Iterable[tuple[Filter, Any]]):
        super().__init__(filter_sharding)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings, in the filters' order."""
        return tuple(sharding for _, sharding in self._items)


@dataclasses.dataclass(frozen=True)
class DiffState:
    """The position of an argument, and a filter of its state to differentiate."""

    argnum: int
    filter: Any

    def map_prefix(self, path: Path, variable: object) -> bool:
        """Returns whether a variable is differentiated."""
        return to_predicate(self.filter)(path, variable)


def _role(role: object) -> Any:
    return lifting.CARRY if role is Carry else role


def as_roles(prefix: object) -> Any:
    """Converts a prefix of arguments or results to roles of `weft.lifting`.

    `prefix` has axes or shardings, `Carry`, `StateAxes`, `StateSharding`, or objects with axes in
    place of variables (see `nnx.prefix`).
    """
    if isinstance(prefix, list):
        prefix = tuple(prefix)
    return jax.tree.map(_as_role, prefix, is_leaf=_is_role_leaf)


def as_axes(prefix: object, name: str, has_carry: bool = False) -> Any:
    """Converts a prefix of axes to roles of `weft.lifting`.

    Raises TransformArgumentError if an entry is not an axis, or a `Carry` without `has_carry`.
    """
    roles = as_roles(prefix)
    _check_kind(roles, name, StateAxes)

    def check(role: object) -> None:
        for one in role.roles if isinstance(role, lifting.Roles) else (role,):
            if one is lifting.CARRY and not has_carry:
                raise errors.RoleKindError(
                    f"{name} has a Carry, which only loops support; use an axis or None."
                )
            if not (one is None or one is lifting.CARRY or isinstance(one, int)):
                raise errors.TransformArgumentError(
                    f"{name} has {one!r}, a {type(one).__name__}, where an axis is expected; use "
                    "an integer, or None for an argument that is not mapped."
                )

    jax.tree.map(check, roles, is_leaf=is_role)
    return roles


def as_shardings(prefix: object, name: str) -> Any:
    """Converts a prefix of shardings to roles of `weft.lifting`.

    Raises RoleKindError if an entry is a `StateAxes`.
    """
    roles = as_roles(prefix)
    _check_kind(roles, name, StateSharding)
    return roles


def _check_kind(roles: object, name: str, kind: type[_StateFilters]) -> None:
    for role in jax.tree.leaves(roles, is_leaf=is_role):
        if isinstance(role, _RolesByFilter) and not isinstance(role.source, kind):
            raise errors.RoleKindError(
                f"{name} has a {type(role.source).__name__}, where a {kind.__name__} is expected; "
                f"use nnx.{kind.__name__}."
            )


def _is_role_leaf(x: object) -> bool:
    return x is None or x is Carry or isinstance(x, _StateFilters | Pytree | Variable)


def _as_role(x: object) -> Any:
    if isinstance(x, _StateFilters):
        return x.roles
    if isinstance(x, Pytree):
        return _roles_of_object(x)
    if isinstance(x, Variable):
        raise errors.TransformArgumentError(
            f"a {type(x).__name__} is given where an axis or a sharding is expected; replace it "
            "by the axis or sharding of the whole variable."
        )
    return _role(x)


def _roles_of_object(prefix: Pytree) -> lifting.Roles:
    items: list[tuple[Path, Any]] = []

    def walk(x: object, path: Path) -> None:
        if isinstance(x, Variable):
            _as_role(x)
        below = data_children(x)
        for name, value in below:
            walk(value, (*path, name))
        if not below and not isinstance(x, Pytree):
            items.append((path, _role(x)))

    walk(prefix, ())
    return lifting.Roles(_by_role(items))


def _by_role(items: Iterable[tuple[Path, Any]]) -> list[tuple[PathIn, Any]]:
    by_role: dict[Hashable, list[Path]] = {}
    for path, role in items:
        by_role.setdefault(role, []).append(path)
    return [(PathIn(frozenset(paths)), role) for role, paths in by_role.items()]
