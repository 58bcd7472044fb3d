"""Comparison of graphs of objects, before and after a loop's body or between branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from weft.nnx.filters import Path
from weft.nnx.graph import GraphDef, NodeDef, NodeRef, VariableDef
from weft.nnx.versions import StaticValue


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
    a_number, b_number = _number_of(a, origins[0]), _number_of(b, origins[1])
    is_node = isinstance(a, NodeDef) and isinstance(b, NodeDef) and a.type is b.type
    are_objects = index_of(a) is not None and index_of(b) is not None
    if are_objects and a_number != b_number:
        seen = "one object", "a different one"
        if a_number is None:
            seen = "a new object", "an existing object"
        elif b_number is None:
            seen = "an existing object", "a new object"
        yield Difference(path, seen, parts)
    elif not is_node and _without_index(a) != _without_index(b):
        yield Difference(path, (_describe_part(a), _describe_part(b)), parts)
    if not is_node:
        return
    a_attributes, b_attributes = dict(a.attributes), dict(b.attributes)
    for name in {**a_attributes, **b_attributes}:
        if name not in a_attributes:
            both_parts = None, b_attributes[name]
            yield Difference((*path, name), ("absent", "present"), both_parts, b_number)
        elif name not in b_attributes:
            both_parts = a_attributes[name], None
            yield Difference((*path, name), ("present", "absent"), both_parts, a_number)
    for name, part in a_attributes.items():
        if name in b_attributes:
            yield from differences((part, b_attributes[name]), origins, (*path, name))
    if a.marks != b.marks:
        yield Difference(path, ("marked one way", "marked another way"), parts)
    elif a.order != b.order:
        yield Difference(path, ("in one order", "in another order"), parts)


def index_of(part: object) -> int | None:
    """Returns the index of an object in a description; None for other parts."""
    return part.index if isinstance(part, NodeDef | VariableDef | NodeRef) else None


def _number_of(part: object, origins: Sequence[int | None]) -> int | None:
    index = index_of(part)
    return None if index is None else origins[index]


def _without_index(part: Any) -> Any:
    # Indices are local to each graph; the caller has compared the objects.
    return part if index_of(part) is None else part._replace(index=0)


def _describe_part(part: object) -> str:
    if isinstance(part, StaticValue):
        return repr(part.value)
    if isinstance(part, NodeDef | VariableDef):
        return part.type.__name__
    return "an array"


class NumberedGraph(NamedTuple):
    """A graph description, and the original number of each object, None for a new one."""

    graphdef: GraphDef
    origins: Sequence[int | None]


def replaced_objects(
    before: GraphDef,
    after: GraphDef,
    origins: Sequence[int | None],
    may_replace: Callable[[NodeDef | VariableDef], bool],
) -> dict[int, int]:
    """Returns the new objects in the places of objects that are gone, as indices after and before.

    Args:
        before, after: descriptions of pairs of objects and results.
        origins: for each object after the index before, None for a new one.
        may_replace: whether a new object of its class may replace one.
    """
    kept_indices = {index for index in origins if index is not None}
    replaced: dict[int, int] = {}

    def replaces(new_index: int, old_index: int) -> bool:
        """Returns whether an object is new, and the one in its place before is gone."""
        return origins[new_index] is None and old_index not in kept_indices

    def walk(old: object, new: object) -> None:
        if isinstance(old, VariableDef) and isinstance(new, VariableDef):
            is_like = old.type is new.type
            if is_like and replaces(new.index, old.index) and may_replace(old):
                replaced[new.index] = old.index
            return
        if not (isinstance(old, NodeDef) and isinstance(new, NodeDef) and old.type is new.type):
            return
        if old.index is not None and new.index is not None:
            if replaces(new.index, old.index) and may_replace(old):
                replaced[new.index] = old.index
            elif origins[new.index] != old.index:
                return
        old_attributes = dict(old.attributes)
        for name, part in new.attributes:
            if name in old_attributes:
                walk(old_attributes[name], part)

    walk(dict(before.root.attributes)[0], dict(after.root.attributes)[0])
    return replaced
