"""Roles of groups of state and of arguments in a transformation.

A role is an integer (mapped over that axis), `None` (shared by all), `CARRY` (passed from one
iteration to the next), `DIFF` (differentiated) or `FORK` (PRNG keys, one per index of the axis).

Roles are a pytree prefix of the arguments, as JAX's `in_axes`. For a carrier of state, `Roles`
gives each group of the state its own role: an entry belongs to the first filter that matches, and
entries without a match do not cross.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax

from weft.errors import RoleError
from weft.typing import PyTree


class SpecialRole(enum.Enum):
    """Roles that are not an axis."""

    CARRY = "CARRY"
    DIFF = "DIFF"
    FORK = "FORK"

    def __repr__(self) -> str:
        return self.value


CARRY = SpecialRole.CARRY
"""The role of what is passed from one iteration to the next."""
DIFF = SpecialRole.DIFF
"""The role of what is differentiated."""
FORK = SpecialRole.FORK
"""The role of PRNG keys, which become one per index of the axis."""

Role = int | None | SpecialRole


class Roles(tuple):
    """`((filter, role), ...)` for the state of one carrier."""

    @property
    def filters(self) -> tuple[Any, ...]:
        return tuple(where for where, _ in self)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role for _, role in self)

    def __repr__(self) -> str:
        return f"Roles({super().__repr__()})"


def is_role(x: PyTree) -> bool:
    """Returns whether `x` is a leaf of a role prefix."""
    return x is None or isinstance(x, int | SpecialRole | Roles)


def carrier_roles(role: Role | Roles) -> Roles:
    """Returns the roles of a carrier's groups; a bare role applies to all its state."""
    return role if isinstance(role, Roles) else Roles(((True, role),))


def broadcast_roles(
    prefix: PyTree,
    tree: PyTree,
    is_leaf: Callable[[PyTree], bool],
    prefix_name: str,
) -> list[Any]:
    """Returns one role for each leaf of `tree`, from a pytree prefix with a name for errors.

    Raises RoleError if `prefix` is not a prefix of `tree`.
    """
    leaf_roles: list[Any] = []

    def extend(role: Role | Roles, subtree: PyTree) -> None:
        n_leaves = len(jax.tree.leaves(subtree, is_leaf=is_leaf))
        leaf_roles.extend([role] * n_leaves)

    try:
        jax.tree.map(extend, prefix, tree, is_leaf=is_role)
    except ValueError:
        # `Roles` are made by Weft, so such a prefix is not what the user has written.
        is_of_user = not (
            isinstance(prefix, tuple) and any(type(x) is Roles for x in prefix)
        )
        mismatch = _PrefixMismatch(is_leaf, prefix_name, is_of_user).describe(
            prefix, tree
        )
        shown = f"{prefix_name}={prefix!r}" if is_of_user else prefix_name
        raise RoleError(f"{shown} {mismatch}") from None
    return leaf_roles


_Entries = dict[str, PyTree]


@dataclasses.dataclass(frozen=True)
class _PrefixMismatch:
    """Description of the first difference of a prefix and a tree.

    Attributes:
        shows_locations: whether the description may name parts of the prefix.
    """

    is_leaf: Callable[[PyTree], bool]
    prefix_name: str
    shows_locations: bool

    def describe(self, prefix: PyTree, tree: PyTree) -> str:
        difference = self._find(prefix, tree, "")
        if difference is None:
            difference = f"does not fit {self._tree_location('')}"
        return f"{difference}. Give one entry for all, or one for each."

    def _find(self, prefix: PyTree, tree: PyTree, path: str) -> str | None:
        """Returns the first difference of two subtrees at a path, depth first."""
        prefix_entries = _entries(prefix, is_role)
        if prefix_entries is None:
            return None
        entries = _entries(tree, self.is_leaf)
        if (
            entries is None
            or type(prefix) is not type(tree)
            or [*prefix_entries] != [*entries]
        ):
            return self._difference(prefix, prefix_entries, tree, entries, path)
        for key, entry in prefix_entries.items():
            difference = self._find(entry, entries[key], path + key)
            if difference is not None:
                return difference
        return None

    def _difference(
        self,
        prefix: PyTree,
        prefix_entries: _Entries,
        tree: PyTree,
        entries: _Entries | None,
        path: str,
    ) -> str:
        shown_prefix, shown_tree = (
            _describe(prefix, prefix_entries),
            _describe(tree, entries),
        )
        if not self.shows_locations:
            return (
                f"has {shown_prefix}, where what it speaks of is {shown_tree}"
            )
        is_for_args = (
            not path and not self._is_for_results and isinstance(prefix, tuple)
        )
        if is_for_args and entries is not None:
            n_entries = _with_count(prefix_entries, "entry", "entries")
            n_arguments = _with_count(entries, "argument", "arguments")
            return (
                f"has {n_entries}, and the call has {n_arguments} by position"
            )
        location = self._tree_location(path)
        return f"has {shown_prefix} at {self.prefix_name}{path}, where {location} is {shown_tree}"

    @property
    def _is_for_results(self) -> bool:
        return self.prefix_name.startswith("out")

    def _tree_location(self, path: str) -> str:
        if self._is_for_results:
            return f"the result{path}"
        return f"args{path}" if path else "the arguments"


def _entries(
    tree: PyTree, is_leaf: Callable[[PyTree], bool]
) -> _Entries | None:
    """Returns the direct children of a tree by their JAX keys, or None for a leaf."""
    if tree is not None and is_leaf(tree):
        return None
    children = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    if len(children) == 1 and children[0][1] is tree:
        return None
    return {jax.tree_util.keystr(path): child for path, child in children}


def _describe(tree: PyTree, entries: _Entries | None) -> str:
    if isinstance(tree, jax.Array):
        return "an array"
    type_name = type(tree).__name__
    if entries is None:
        return f"one {type_name}"
    description = f"a {type_name} of {_with_count(entries, 'entry', 'entries')}"
    if isinstance(tree, dict) and entries:
        description += f" ({', '.join(entries)})"
    return description


def _with_count(entries: _Entries, singular: str, plural: str) -> str:
    return f"{len(entries)} {singular if len(entries) == 1 else plural}"


def changed_shared_message(transformation: str, location: str) -> str:
    """Returns the error message about a body that changes a value shared by all iterations."""
    return (
        f"{transformation}: the body returns or changes what is shared by all iterations (None), "
        f"at {location}; have it carried from one to the next, or give an axis along which to "
        "stack it."
    )
