"""Variables shared by the scopes of one tree."""

import operator
from collections.abc import Mapping
from typing import Any

import jax

from weft.core import filters, rngs
from weft.errors import ScopeTreeError
from weft.lifting import traces
from weft.typing import PyTree

Entry = tuple[str, rngs.Path, str]
"""A variable's collection, scope and name."""

VariableDict = Mapping[str, Mapping[str, Any]]
Entries = Mapping[str, Any]
"""Variables and child scopes by name."""

_EMPTY: Entries = {}


class VariableStore:
    """Variables of a tree of scopes.

    Args:
        variables: the collections. The dicts of mutable collections are cloned.
        path: names from the outermost root to the top of the tree, for errors.

    Attributes:
        collections: the variables, nested by collection, scope and name.
        initial_values: those of created variables, nested as in `collections`.
        lifted_by: the transformation that contains the tree, for errors.
        lifts: collections that the transformation lifts.
        empty_collections: lifted immutable collections without variables in the scope.
        has_run: whether the function has run before, to create variables.
        is_complete: whether all variables of the function were created before.
    """

    def __init__(
        self,
        variables: VariableDict,
        mutable: filters.Filter,
        path: rngs.Path = (),
    ):
        self.collections: dict[str, Any] = {}
        for col, entries in variables.items():
            is_mutable = filters.in_filter(mutable, col)
            self.collections[col] = to_dicts(entries) if is_mutable else entries
        self.initial_values: dict[str, Any] = {}
        self.lifted_by = ""
        self.lifts: filters.Filter = True
        self.empty_collections: frozenset[str] = frozenset()
        self.has_run = False
        self.is_complete = False
        self.trace = traces.current_trace()
        self._path = path
        self._created: set[Entry] = set()
        # The values of existing variables before their first change.
        self._values_before: dict[Entry, PyTree] = {}

    def copy(self, mutable: filters.Filter) -> "VariableStore":
        """Returns a store of the present trace with the same variables, none of them created."""
        store = VariableStore(self.collections, mutable, self._path)
        store.lifted_by = self.lifted_by
        store.lifts = self.lifts
        store.empty_collections = self.empty_collections
        store.has_run = self.has_run
        return store

    def entries(self, col: str, path: rngs.Path) -> Entries:
        """Returns a collection's entries in one scope; raises ScopeTreeError for a value."""
        entries = self.collections.get(col, _EMPTY)
        for depth, name in enumerate(path):
            entries = entries.get(name, _EMPTY)
            # Most are dicts, and `isinstance` with an abstract class is slow.
            if type(entries) is not dict and not isinstance(entries, Mapping):
                raise ScopeTreeError(
                    col, self.location(path[: depth + 1]), entries
                )
        return entries

    def put(self, col: str, path: rngs.Path, name: str, value: PyTree) -> None:
        """Sets a variable, created if it does not exist."""
        self.entries(col, path)  # raises for a value in the place of a scope
        entries = _descend(self.collections, col, path)
        if name not in entries:
            self._created.add((col, path, name))
            _descend(self.initial_values, col, path)[name] = copy_dicts(value)
        else:
            self._values_before.setdefault(
                (col, path, name), copy_dicts(entries[name])
            )
        _put(entries, name, copy_dicts(value))

    def changes(self) -> dict[str, Any]:
        """Returns the changed variables, nested as in `collections`."""
        changes: dict[str, Any] = {}
        for col, path, name in self.changed():
            _descend(changes, col, path)[name] = copy_dicts(
                self.entries(col, path)[name]
            )
        return changes

    def changed(self) -> list[Entry]:
        """Returns the changed variables, including those created before the change."""
        changed: list[Entry] = []
        for entry, value_before in self._values_before.items():
            col, path, name = entry
            if not is_same(value_before, self.entries(col, path)[name]):
                changed.append(entry)
        return changed

    def created(self) -> list[Entry]:
        """Returns the created variables, in a fixed order."""
        return sorted(self._created)

    def created_in(self, where: filters.Filter) -> set[rngs.Path]:
        """Returns the scopes in which variables of some collections were created."""
        return {
            path
            for col, path, _ in self._created
            if filters.in_filter(where, col)
        }

    def location(self, path: rngs.Path) -> str:
        """Returns the location of a scope as text, for errors."""
        return "/" + "/".join((*self._path, *path))


def is_same(tree: PyTree, other: PyTree) -> bool:
    """Returns whether two pytrees have the same structure and leaves."""
    if tree is other:
        return True
    leaves, structure = jax.tree.flatten(tree)
    other_leaves, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(
        map(operator.is_, leaves, other_leaves)
    )


def _descend(
    collections: dict[str, Any], col: str, path: rngs.Path
) -> dict[str, Any]:
    """Returns a collection's entries in one scope, created if there are none."""
    entries = collections.setdefault(col, {})
    for name in path:
        entries = entries.setdefault(name, {})
    return entries


def to_dicts(entries: PyTree) -> PyTree:
    """Returns nested mappings as new dicts, with the same leaves."""
    if isinstance(entries, Mapping):
        return {name: to_dicts(value) for name, value in entries.items()}
    return entries


def copy_dicts(value: PyTree) -> PyTree:
    """Copies nested dicts, but not mappings of other classes."""
    if type(value) is dict:
        return {name: copy_dicts(entry) for name, entry in value.items()}
    return value


def _put(entries: dict[str, Any], name: str, value: PyTree) -> None:
    """Sets an entry; updates dicts that scopes below reference instead of replacing them."""
    old_value = entries.get(name)
    if type(old_value) is dict and isinstance(value, Mapping):
        for inner_name, inner_value in value.items():
            _put(old_value, inner_name, inner_value)
    else:
        entries[name] = value
