"""Variables shared by the scopes of one tree."""

import operator
from collections.abc import Mapping
from typing import Any

import jax

from weft.core import filters, rngs
from weft.errors import ScopeTreeError
from weft.lifting import traces

Entry = tuple[str, rngs.Path, str]
"""A variable's collection, scope and name."""

VariableDict = Mapping[str, Mapping[str, Any]]
_EMPTY: Mapping[str, Any] = {}


class VariableStore:
    """Variables of a tree of scopes.

    Args:
        variables: the collections. The dicts of mutable collections are cloned.
        path: names from the outermost root to the top of the tree, for errors.

    Attributes:
        collections: the variables, nested by collection, scope and name.
        lifted_by: the transformation that contains the tree, for errors.
        lifts: collections that the transformation lifts.
        given: lifted immutable collections without variables in the scope.
        has_run: whether the function has run before, to create variables.
        is_complete: whether all variables of the function were created before.
        made: initial values of created variables, nested as in `collections`.
    """

    def __init__(self, variables: VariableDict, mutable: filters.Filter, path: rngs.Path = ()):
        self.collections: dict[str, Any] = {
            col: to_dicts(entries) if filters.in_filter(mutable, col) else entries
            for col, entries in variables.items()
        }
        self._path = path
        self.lifted_by = ""
        self.lifts: filters.Filter = True
        self.given: frozenset[str] = frozenset()
        self.has_run = False
        self.is_complete = False
        self.trace = traces.current_trace()
        self.made: dict[str, Any] = {}
        self._made: set[Entry] = set()
        self._written: dict[Entry, Any] = {}

    def copy(self, mutable: filters.Filter) -> "VariableStore":
        """Returns a store of the present trace with the same variables, none of them created."""
        store = VariableStore(self.collections, mutable, self._path)
        store.lifted_by, store.lifts, store.given = self.lifted_by, self.lifts, self.given
        store.has_run = self.has_run
        return store

    def entries(self, col: str, path: rngs.Path) -> Mapping[str, Any]:
        """Returns a collection's entries in one scope; raises ScopeTreeError for a value."""
        found = self.collections.get(col, _EMPTY)
        for depth, name in enumerate(path):
            found = found.get(name, _EMPTY)
            if type(found) is not dict and not isinstance(found, Mapping):
                raise ScopeTreeError(col, self.where(path[: depth + 1]), found)
        return found

    def put(self, col: str, path: rngs.Path, name: str, value: object) -> None:
        self.entries(col, path)
        entries = _descend(self.collections, col, path)
        if name not in entries:
            self._made.add((col, path, name))
            _descend(self.made, col, path)[name] = copy_dicts(value)
        else:
            self._written.setdefault((col, path, name), copy_dicts(entries[name]))
        _put(entries, name, copy_dicts(value))

    def changes(self) -> dict[str, Any]:
        """Returns the changed variables, nested as in `collections`."""
        found: dict[str, Any] = {}
        for col, path, name in self.changed():
            _descend(found, col, path)[name] = copy_dicts(self.entries(col, path)[name])
        return found

    def changed(self) -> list[Entry]:
        """Returns the changed variables, including those created before the change."""
        return [
            (col, path, name)
            for (col, path, name), before in self._written.items()
            if not is_same(before, self.entries(col, path)[name])
        ]

    def created(self) -> list[Entry]:
        """Returns the created variables, in a fixed order."""
        return sorted(self._made)

    def where(self, path: rngs.Path) -> str:
        """Returns the location of a scope as text, for errors."""
        return "/" + "/".join((*self._path, *path))

    def created_in(self, where: filters.Filter) -> set[rngs.Path]:
        """Returns the scopes in which variables of some collections were created."""
        return {path for col, path, _ in self._made if filters.in_filter(where, col)}


def is_same(before: object, now: object) -> bool:
    """Returns whether two pytrees have the same structure and leaves."""
    if before is now:
        return True
    (old, old_tree), (new, new_tree) = map(jax.tree.flatten, (before, now))
    return old_tree == new_tree and all(map(operator.is_, old, new))


def _descend(collections: dict[str, Any], col: str, path: rngs.Path) -> dict[str, Any]:
    entries = collections.setdefault(col, {})
    for name in path:
        entries = entries.setdefault(name, {})
    return entries


def to_dicts(entries: object) -> Any:
    """Returns nested mappings as new dicts, with the same leaves."""
    if isinstance(entries, Mapping):
        return {name: to_dicts(value) for name, value in entries.items()}
    return entries


def copy_dicts(value: object) -> Any:
    """Copies nested dicts, but not mappings of other classes."""
    if type(value) is dict:
        return {name: copy_dicts(below) for name, below in value.items()}
    return value


def _put(entries: dict[str, Any], name: str, value: object) -> None:
    """Sets an entry; updates dicts that scopes below reference instead of replacing them."""
    before = entries.get(name)
    if type(before) is dict and isinstance(value, Mapping):
        for below, new in value.items():
            _put(before, below, new)
    else:
        entries[name] = value
