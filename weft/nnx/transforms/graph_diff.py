"""Comparison of graphs of objects, before and after a loop's body or between branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from weft.nnx.filters import Path
from weft.nnx.graph import GraphDef, LeafDef, NodeDef, NodeRef, VariableDef
from weft.nnx.versions import StaticValue

Part = NodeDef | VariableDef | NodeRef | LeafDef | StaticValue
Origins = Sequence[int | None]
"""For each object of a graph its index in the graph of the arguments, None for a new object."""


class Difference(NamedTuple):
    """A path where two graphs differ, and the content of each there, in words.

    Attributes:
        parts: the parts there, None in place of an attribute that one of the graphs lacks.
    """

    path: Path
    texts: tuple[str, str]
    parts: tuple[Part | None, Part | None]


def differences(
    parts: tuple[Part, Part], origins: tuple[Origins, Origins], path: Path = ()
) -> Iterator[Difference]:
    """Yields the differences between two graphs, outer ones first.

    Args:
        parts: descriptions of both, at `path`.
        origins: those of the objects of both.
    """
    # Objects are compared by their origins, all else by value; then, if both parts have
    # attributes, the attributes.
    a, b = parts
    a_origin = _origin_of(a, origins[0])
    b_origin = _origin_of(b, origins[1])
    are_objects = index_of(a) is not None and index_of(b) is not None
    are_nodes = False
    if isinstance(a, NodeDef) and isinstance(b, NodeDef):
        are_nodes = a.type is b.type
    if are_objects and a_origin != b_origin:
        texts = "one object", "a different one"
        if a_origin is None:
            texts = "a new object", "an existing object"
        elif b_origin is None:
            texts = "an existing object", "a new object"
        yield Difference(path, texts, parts)
    elif not are_nodes and _without_index(a) != _without_index(b):
        yield Difference(path, (_describe_part(a), _describe_part(b)), parts)
    if not are_nodes:
        return
    assert isinstance(a, NodeDef) and isinstance(b, NodeDef)
    a_attributes = dict(a.attributes)
    b_attributes = dict(b.attributes)
    for name, part in a_attributes.items():
        if name not in b_attributes:
            yield Difference((*path, name), ("present", "absent"), (part, None))
    for name, part in b_attributes.items():
        if name not in a_attributes:
            yield Difference((*path, name), ("absent", "present"), (None, part))
    for name, part in a_attributes.items():
        if name in b_attributes:
            attribute_parts = part, b_attributes[name]
            yield from differences(attribute_parts, origins, (*path, name))
    if a.marks != b.marks:
        yield Difference(path, ("marked one way", "marked another way"), parts)
    elif a.order != b.order:
        yield Difference(path, ("in one order", "in another order"), parts)


def index_of(part: Part | None) -> int | None:
    """Returns the index of an object in a description; None for other parts."""
    if isinstance(part, NodeDef | VariableDef | NodeRef):
        return part.index
    return None


def _origin_of(part: Part, origins: Origins) -> int | None:
    index = index_of(part)
    return None if index is None else origins[index]


def _without_index(part: Part) -> Part:
    # Indices are local to each graph; the caller has compared the objects.
    if isinstance(part, NodeDef | VariableDef | NodeRef):
        return part if part.index is None else part._replace(index=0)
    return part


def _describe_part(part: Part) -> str:
    if isinstance(part, StaticValue):
        return repr(part.value)
    if isinstance(part, NodeDef | VariableDef):
        return part.type.__name__
    return "an array"


class NumberedGraph(NamedTuple):
    """A graph description, and the origins of its objects."""

    graphdef: GraphDef
    origins: Origins

    def first_difference(self, other: NumberedGraph) -> Difference | None:
        """Returns the outermost difference from another graph; None if it equals this one."""
        parts = self.graphdef.root, other.graphdef.root
        origins = self.origins, other.origins
        return next(differences(parts, origins), None)


def replaced_objects(
    input_graphdef: GraphDef,
    output_graphdef: GraphDef,
    origins: Origins,
    may_replace: Callable[[NodeDef | VariableDef], bool],
) -> dict[int, int]:
    """Returns the new objects in the places of objects that are gone: input indices by output ones.

    Args:
        input_graphdef, output_graphdef: descriptions of pairs of objects and results.
        origins: those of the objects of the output.
        may_replace: whether a new object of its class may replace one.
    """
    remaining_indices = set(origins)
    replaced: dict[int, int] = {}

    def replaces(new_index: int, old_index: int) -> bool:
        """Returns whether an object is new, and the one in its place before is gone."""
        is_new = origins[new_index] is None
        return is_new and old_index not in remaining_indices

    def walk(old: Part, new: Part) -> None:
        if isinstance(old, VariableDef) and isinstance(new, VariableDef):
            is_like = old.type is new.type
            if is_like and replaces(new.index, old.index) and may_replace(old):
                replaced[new.index] = old.index
            return
        if not isinstance(old, NodeDef) or not isinstance(new, NodeDef):
            return
        if old.type is not new.type:
            return
        # Containers without an identity have no index, and are always walked.
        if old.index is not None and new.index is not None:
            if replaces(new.index, old.index) and may_replace(old):
                replaced[new.index] = old.index
            elif origins[new.index] != old.index:
                return
        old_attributes = dict(old.attributes)
        for name, part in new.attributes:
            if name in old_attributes:
                walk(old_attributes[name], part)

    input_part = dict(input_graphdef.root.attributes)[0]
    output_part = dict(output_graphdef.root.attributes)[0]
    walk(input_part, output_part)
    return replaced
