"""Comparison and union of graphs of objects, of loops and branches that make objects.

An input object is identified by its number, a new one by its first path, so that graphs of several
runs can be compared and merged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from weft.nnx.filters import Path
from weft.nnx.graph import GraphDef, LeafDef, NodeDef, NodeRef, VariableDef
from weft.nnx.versions import StaticValue, is_immutable


class Difference(NamedTuple):
    """A path where two graphs differ, and the content of each there, in words.

    Attributes:
        parts: the parts there, None in place of an attribute that one of the graphs lacks.
        owner: original number of the object whose attribute the other graph lacks.
    """

    path: Path
    seen: tuple[str, str]
    parts: tuple[Any, Any]
    owner: int | None = None


def differences(
    parts: tuple[Any, Any],
    origins: tuple[Sequence[int | None], Sequence[int | None]],
    path: Path = (),
) -> Iterator[Difference]:
    """Yields the differences between two graphs, outer ones first.

    Args:
        parts: descriptions of both, at `path`.
        origins: for each graph the original number of every object, None for a new object.
    """
    a, b = parts
    indices = [index_of(part) for part in parts]
    numbers = [None if i is None else of[i] for i, of in zip(indices, origins, strict=True)]
    is_node = isinstance(a, NodeDef) and isinstance(b, NodeDef) and a.type is b.type
    if None not in indices and numbers[0] != numbers[1]:
        names = ["a new object" if n is None else "an existing object" for n in numbers]
        seen = ("one object", "a different one") if None not in numbers else (names[0], names[1])
        yield Difference(path, seen, parts)
    elif not is_node and _without_index(a) != _without_index(b):
        yield Difference(path, (_describe_part(a), _describe_part(b)), parts)
    if not is_node:
        return
    of_a, of_b = dict(a.attributes), dict(b.attributes)
    for name in {**of_a, **of_b}:
        if name not in of_a:
            seen, owner = ("absent", "present"), numbers[1]
            yield Difference((*path, name), seen, (None, of_b[name]), owner)
        elif name not in of_b:
            seen, owner = ("present", "absent"), numbers[0]
            yield Difference((*path, name), seen, (of_a[name], None), owner)
    for name in filter(of_b.__contains__, of_a):
        yield from differences((of_a[name], of_b[name]), origins, (*path, name))
    if a.marks != b.marks:
        yield Difference(path, ("marked one way", "marked another way"), parts)
    elif a.order != b.order:
        yield Difference(path, ("in one order", "in another order"), parts)


def index_of(part: object) -> int | None:
    """Returns the index of an object in a description; None for other parts."""
    return part.index if isinstance(part, NodeDef | VariableDef | NodeRef) else None


def _without_index(part: Any) -> Any:
    # Numbers are local to each graph; the caller has compared the objects.
    return part if index_of(part) is None else part._replace(index=0)


def _describe_part(part: object) -> str:
    if isinstance(part, StaticValue):
        return repr(part.value)
    return part.type.__name__ if isinstance(part, NodeDef | VariableDef) else "an array"


ObjectId = int | Path

_FIRST_NEW = 1 << 31


def new_number(path: Path) -> int:
    """Returns the number of a new value at a path, equal in all runs and processes."""
    digest = hashlib.blake2b(repr(path).encode(), digest_size=7).digest()
    return _FIRST_NEW + int.from_bytes(digest)


def is_new_number(number: int) -> bool:
    """Returns whether a number is that of a new value."""
    return number >= _FIRST_NEW


class _ObjectAt(NamedTuple):
    ident: ObjectId


class _Numbered(NamedTuple):
    part: VariableDef | LeafDef
    number: int


class NumberedGraph(NamedTuple):
    """A graph description, the original number of each object (None if new), and value numbers."""

    graphdef: GraphDef
    origins: Sequence[int | None]
    numbers: Sequence[int]


class ObjectTable:
    """A graph as a table of its objects, with `_ObjectAt` in place of objects in descriptions."""

    def __init__(self, root: object, known: dict[ObjectId, Any]):
        self.root, self.known = root, known

    @classmethod
    def of(cls, described: NumberedGraph) -> ObjectTable:
        graphdef, origins, numbers = described
        rest, known, idents = iter(numbers), {}, {}

        def walk(part: Any, path: Path) -> Any:
            kind = type(part)
            if kind is NodeRef:
                return _ObjectAt(idents[part.index])
            if kind is LeafDef:
                return _Numbered(part, next(rest))
            if kind is StaticValue:
                return part
            at: ObjectId = path
            if part.index is not None:
                origin = origins[part.index]
                idents[part.index] = at = path if origin is None else origin
            if kind is VariableDef:
                known[at] = _Numbered(part._replace(index=0), next(rest))
                return _ObjectAt(at)
            inside = tuple([(name, walk(x, (*path, name))) for name, x in part.attributes])
            if part.index is None:
                return part._replace(attributes=inside)
            known[at] = part._replace(index=0, attributes=inside)
            return _ObjectAt(at)

        return cls(walk(graphdef.root, ()), known)

    def described(self) -> NumberedGraph:
        index: dict[ObjectId, int] = {}
        paths: list[Path] = []
        numbers: list[int] = []

        def build(part: Any, path: Path) -> Any:
            at: dict[str, int] = {}
            if isinstance(part, _ObjectAt):
                if part.ident in index:
                    return NodeRef(index[part.ident])
                at["index"] = index[part.ident] = len(index)
                part = self.known[part.ident]
            if isinstance(part, _Numbered):
                paths.append(path)
                numbers.append(part.number)
                return part.part._replace(**at)
            if isinstance(part, NodeDef):
                inside = tuple([(name, build(x, (*path, name))) for name, x in part.attributes])
                return part._replace(attributes=inside, **at)
            return part

        graphdef = GraphDef(build(self.root, ()), paths)
        origins = tuple(at if isinstance(at, int) else None for at in index)
        return NumberedGraph(graphdef, origins, tuple(numbers))

    def can_hoist(
        self, ident: ObjectId | None, name: Hashable, is_always_made: bool = False
    ) -> bool:
        """Returns whether an attribute can be made earlier: it has no existing objects.

        Only what is always made may be a static value or an item of a list: they show a run.
        """
        attributes = dict(self.known[ident].attributes) if isinstance(ident, int) else {}
        if name not in attributes:
            return False
        inside = list(self._inside(attributes[name], set()))
        has_values = any(isinstance(x, _ObjectAt | _Numbered) for x in inside)
        return (is_always_made or (isinstance(name, str) and has_values)) and all(
            map(_can_be_hoisted, inside)
        )

    def variable_numbers(self, ident: ObjectId | None, name: Hashable) -> list[int]:
        """Returns the numbers of the variables in an attribute."""
        attribute = dict(self.known[ident].attributes)[name] if ident is not None else None
        found = (x for x in self._inside(attribute, set()) if isinstance(x, _ObjectAt))
        held = (self.known[x.ident] for x in found)
        return [x.number for x in held if isinstance(x, _Numbered)]

    def _inside(self, part: object, seen: set[ObjectId]) -> Iterable[Any]:
        yield part
        if isinstance(part, _ObjectAt):
            if part.ident in seen or isinstance(part.ident, int):
                return
            seen.add(part.ident)
            yield from self._inside(self.known[part.ident], seen)
        elif isinstance(part, NodeDef):
            for _, below in part.attributes:
                yield from self._inside(below, seen)


def _can_be_hoisted(x: object) -> bool:
    if isinstance(x, _ObjectAt):
        return not isinstance(x.ident, int)
    return not isinstance(x, StaticValue) or is_immutable(x.value)


def replaced_objects(
    before: GraphDef,
    after: GraphDef,
    origins: Sequence[int | None],
    may_replace: Callable[[VariableDef, int], bool],
) -> dict[int, int]:
    """Returns the new objects in the places of objects that are gone, as indices after and before.

    Args:
        before, after: descriptions of pairs of objects and results.
        origins: for each object after the index before, None for a new one.
        may_replace: whether a new variable, given its index, may take the place of another one.
    """
    present, found = {i for i in origins if i is not None}, {}

    def walk(a: object, b: object) -> None:
        if isinstance(a, NodeDef) and isinstance(b, NodeDef) and a.type is b.type:
            if a.index is not None and b.index is not None:
                if origins[b.index] is None and a.index not in present:
                    found[b.index] = a.index
                elif origins[b.index] != a.index:
                    return
            old = dict(a.attributes)
            for name, part in b.attributes:
                if name in old:
                    walk(old[name], part)
        elif isinstance(a, VariableDef) and isinstance(b, VariableDef) and a.type is b.type:
            is_new = origins[b.index] is None and a.index not in present
            if is_new and may_replace(b, a.index):
                found[b.index] = a.index

    walk(dict(before.root.attributes)[0], dict(after.root.attributes)[0])
    return found


def with_new_attributes(
    before: NumberedGraph, after: NumberedGraph, made: Iterable[tuple[int, Hashable]]
) -> NumberedGraph:
    """Returns the graph before with the attributes `made`, ignoring other changes in `after`."""
    old, new, gained = ObjectTable.of(before), ObjectTable.of(after), set(made)
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
    return ObjectTable(old.root, known).described()


def union_of_graphs(before: NumberedGraph, graphs: Sequence[NumberedGraph]) -> NumberedGraph | None:
    """Returns one graph with the objects that any branch made, or None if they differ otherwise."""
    tables = [ObjectTable.of(graph) for graph in graphs]
    if any(table.root != tables[0].root for table in tables):
        return None
    old = ObjectTable.of(before).known
    known: dict[ObjectId, Any] = {}
    for at in dict.fromkeys(at for table in tables for at in table.known):
        versions = [(table, table.known[at]) for table in tables if at in table.known]
        one = versions[0][1]
        if any(version != one for _, version in versions):
            one = _union_of_nodes(at, old[at], versions) if isinstance(at, int) else None
        if one is None:
            return None
        known[at] = one
    return ObjectTable(tables[0].root, known).described()


def _union_of_nodes(
    at: int, old: NodeDef, versions: Sequence[tuple[ObjectTable, Any]]
) -> NodeDef | None:
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
            may_pass = name not in there and table.can_hoist(at, name)
            if not is_alike or not (is_everywhere or may_pass):
                return None
        for name, mark in node.marks:
            if marks.setdefault(name, mark) != mark:
                return None
    return nodes[0]._replace(
        attributes=tuple(sorted(attributes.items(), key=lambda item: _attribute_sort_key(item[0]))),
        marks=tuple((name, marks[name]) for name in sorted(marks, key=str)),
    )


def _attribute_sort_key(name: object) -> tuple[bool, str, Any]:
    # Items of a list come before its attributes, those of a dict by type and name.
    return isinstance(name, str), str(type(name)), name
