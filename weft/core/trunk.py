"""The variables that the scopes of one tree share."""

from collections.abc import Mapping
from typing import Any

from weft.core.filters import Filter, in_filter
from weft.core.rngs import Path
from weft.core.tracing import current_trace

VariableDict = Mapping[str, Mapping[str, Any]]
_EMPTY: Mapping[str, Any] = {}


class Trunk:
    """The variables of a tree of scopes, and where it may be used.

    Args:
        variables: the collections. Of those that are mutable the dicts are copied.
        mutable: which collections can be changed.
        lifted_by: the transformation whose inside the tree is, for errors.

    Attributes:
        collections: the variables, nested by collection, scope and name.
        trace: the JAX trace in which the tree was made.
        firsts: nested likewise, what variables were made with that were written to again since.
    """

    def __init__(self, variables: VariableDict, mutable: Filter, lifted_by: str = ""):
        self.collections: dict[str, Any] = {
            col: copied(entries) if in_filter(mutable, col) else entries
            for col, entries in variables.items()
        }
        self.lifted_by = lifted_by
        self.trace = current_trace()
        self.firsts: dict[str, Any] = {}
        self._created: set[tuple[str, Path, str]] = set()
        self._written: dict[tuple[str, Path, str], None] = {}

    def entries(self, col: str, path: Path) -> Mapping[str, Any]:
        """What a collection has in one scope."""
        found = self.collections.get(col, _EMPTY)
        for name in path:
            found = found.get(name, _EMPTY)
        return found

    def put(self, col: str, path: Path, name: str, value: Any) -> None:
        """Sets a variable."""
        entries = _descend(self.collections, col, path)
        if name not in entries:
            self._created.add((col, path, name))
        elif (col, path, name) in self._created:
            _descend(self.firsts, col, path).setdefault(name, entries[name])
        self._written[col, path, name] = None
        _put(entries, name, value)

    def changes(self) -> dict[str, Any]:
        """The variables that were made or written to, nested as in `collections`."""
        found: dict[str, Any] = {}
        for col, path, name in self._written:
            _descend(found, col, path)[name] = copied(self.entries(col, path)[name])
        return found


def _descend(collections: dict[str, Any], col: str, path: Path) -> dict[str, Any]:
    entries = collections.setdefault(col, {})
    for name in path:
        entries = entries.setdefault(name, {})
    return entries


def copied(entries: Any) -> Any:
    """Nested mappings as new dicts, with the same leaves."""
    if isinstance(entries, Mapping):
        return {name: copied(value) for name, value in entries.items()}
    return entries


def _put(entries: dict[str, Any], name: str, value: Any) -> None:
    """Sets an entry; dicts that scopes below hold are updated and not replaced."""
    before = entries.get(name)
    if isinstance(before, dict) and isinstance(value, Mapping):
        for below, new in value.items():
            _put(before, below, new)
    else:
        entries[name] = value
