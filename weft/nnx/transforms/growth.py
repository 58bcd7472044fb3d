"""Graphs that have gained objects, in the body of a loop or in only some branches.

An input object is identified by its number, a new one by its first path, so that graphs of several
runs can be compared and merged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from weft.nnx.filters import Path
from weft.nnx.graph import GraphDef, Leaf, NodeDef, Ref, VariableDef
from weft.nnx.structure import Fixed, cannot_change

Ident = int | Path

_FIRST_NEW = 1 << 31


def number_of(path: Path) -> int:
    """Returns the number of a new value at a path, equal in all runs and processes."""
    digest = hashlib.blake2b(repr(path).encode(), digest_size=7).digest()
    return _FIRST_NEW + int.from_bytes(digest)


def is_new(number: int) -> bool:
    """Returns whether a number is that of a new value."""
    return number >= _FIRST_NEW


class _At(NamedTuple):
    ident: Ident


class _Value(NamedTuple):
    number: int


class _Held(NamedTuple):
    """A variable with the number of its value."""

    part: VariableDef
    number: int


class Described(NamedTuple):
    """A graph description, the original number of each object (None if new), and value numbers."""

    graphdef: GraphDef
    origins: Sequence[int | None]
    numbers: Sequence[int]


class Objects:
    """A graph as a table of its objects, with `_At` in place of objects in descriptions."""

    def __init__(self, root: Any, known: dict[Ident, Any]):
        self.root, self.known = root, known

    @classmethod
    def of(cls, described: Described) -> Objects:
        graphdef, origins, numbers = described
        rest, known, idents = iter(numbers), {}, {}

        def walk(part: Any, path: Path) -> Any:
            kind = type(part)
            if kind is Ref:
                return _At(idents[part.index])
            if kind is Leaf:
                return _Value(next(rest))
            if kind is Fixed:
                return part
            at: Ident = path
            if part.index is not None:
                origin = origins[part.index]
                idents[part.index] = at = path if origin is None else origin
            if kind is VariableDef:
                known[at] = _Held(part._replace(index=0), next(rest))
                return _At(at)
            inside = tuple([(name, walk(x, (*path, name))) for name, x in part.attributes])
            if part.index is None:
                return part._replace(attributes=inside)
            known[at] = part._replace(index=0, attributes=inside)
            return _At(at)

        return cls(walk(graphdef.root, ()), known)

    def described(self) -> Described:
        index: dict[Ident, int] = {}
        paths: list[Path] = []
        numbers: list[int] = []

        def note(path: Path, number: int) -> None:
            paths.append(path)
            numbers.append(number)

        def build(part: Any, path: Path) -> Any:
            if isinstance(part, _Value):
                note(path, part.number)
                return Leaf()
            if isinstance(part, _At):
                if part.ident in index:
                    return Ref(index[part.ident])
                i = index[part.ident] = len(index)
                known = self.known[part.ident]
                if isinstance(known, _Held):
                    note(path, known.number)
                    return known.part._replace(index=i)
                return within(known._replace(index=i), path)
            return within(part, path) if isinstance(part, NodeDef) else part

        def within(part: NodeDef, path: Path) -> NodeDef:
            inside = tuple([(name, build(x, (*path, name))) for name, x in part.attributes])
            return part._replace(attributes=inside)

        graphdef = GraphDef(build(self.root, ()), paths)
        origins = tuple(at if isinstance(at, int) else None for at in index)
        return Described(graphdef, origins, tuple(numbers))

    def may_make(self, ident: Ident | None, name: Hashable) -> bool:
        """Returns whether an attribute can be made earlier: new objects with variables only."""
        attributes = dict(self.known[ident].attributes) if isinstance(ident, int) else {}
        if name not in attributes or not isinstance(name, str):
            return False  # an item of a list would change its length
        inside = list(self._inside(attributes[name], set()))
        return any(isinstance(x, _At) for x in inside) and all(map(_is_makeable, inside))

    def numbers_in(self, ident: Ident | None, name: Hashable) -> list[int]:
        """Returns the numbers of the variables in an attribute."""
        attribute = dict(self.known[ident].attributes)[name] if ident is not None else None
        found = (x for x in self._inside(attribute, set()) if isinstance(x, _At))
        held = (self.known[x.ident] for x in found)
        return [x.number for x in held if isinstance(x, _Held)]

    def _inside(self, part: Any, seen: set[Ident]) -> Iterable[Any]:
        yield part
        if isinstance(part, _At):
            if part.ident in seen or isinstance(part.ident, int):
                return
            seen.add(part.ident)
            yield from self._inside(self.known[part.ident], seen)
        elif isinstance(part, NodeDef):
            for _, below in part.attributes:
                yield from self._inside(below, seen)


def _is_makeable(x: Any) -> bool:
    if isinstance(x, _At):
        return not isinstance(x.ident, int)
    if isinstance(x, Fixed):
        return cannot_change(x.value)
    return not isinstance(x, _Value)


def grown(before: Described, after: Described, made: Iterable[tuple[int, Hashable]]) -> Described:
    """Returns the graph before with the attributes `made`, ignoring other changes in `after`."""
    old, new, gained = Objects.of(before), Objects.of(after), set(made)
    known = {**new.known, **old.known}
    for i in {i for i, _ in gained}:
        own, now = dict(old.known[i].attributes), new.known[i]
        kept = [name for name, _ in now.attributes if name in own or (i, name) in gained]
        attributes = tuple((n, own.get(n, part)) for n, part in now.attributes if n in kept)
        known[i] = now._replace(
            attributes=attributes,
            marks=tuple(mark for mark in now.marks if mark[0] in kept),
            order=now.order and tuple(name for name in now.order if name in kept),
        )
    return Objects(old.root, known).described()


def united(before: Described, graphs: Sequence[Described]) -> Described | None:
    """Returns one graph with the objects that any branch made, or None if they differ otherwise."""
    tables = [Objects.of(graph) for graph in graphs]
    if any(table.root != tables[0].root for table in tables):
        return None
    old = Objects.of(before).known
    known: dict[Ident, Any] = {}
    for at in dict.fromkeys(at for table in tables for at in table.known):
        versions = [(table, table.known[at]) for table in tables if at in table.known]
        one = versions[0][1]
        if any(version != one for _, version in versions):
            one = _united_object(at, old[at], versions) if isinstance(at, int) else None
        if one is None:
            return None
        known[at] = one
    return Objects(tables[0].root, known).described()


def _united_object(at: int, old: Any, versions: Sequence[tuple[Objects, Any]]) -> NodeDef | None:
    nodes = [node for _, node in versions]
    if not all(isinstance(node, NodeDef) and node.order is None for node in nodes):
        return None
    if len({node.type for node in nodes}) > 1:
        return None
    there = dict(old.attributes)
    attributes: dict[Hashable, Any] = {}
    marks: dict[Hashable, bool] = {}
    for table, node in versions:
        for name, part in node.attributes:
            is_alike = attributes.setdefault(name, part) == part
            is_everywhere = all(name in dict(other.attributes) for other in nodes)
            may_pass = name not in there and table.may_make(at, name)
            if not is_alike or not (is_everywhere or may_pass):
                return None
        for name, mark in node.marks:
            if marks.setdefault(name, mark) != mark:
                return None
    return nodes[0]._replace(
        attributes=tuple(sorted(attributes.items(), key=lambda item: _sorted_as(item[0]))),
        marks=tuple((name, marks[name]) for name in sorted(marks, key=str)),
    )


def _sorted_as(name: Any) -> tuple[bool, str, Any]:
    # Items of a list come before its attributes, those of a dict by type and name.
    return isinstance(name, str), str(type(name)), name
