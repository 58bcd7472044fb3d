"""Construction of a graph of objects from its description and values.

All changes of existing objects are planned and checked before the first is made, so that an error
leaves every object unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from weft.errors import GraphStructureError
from weft.nnx.graph import GraphDef, Leaf, NodeDef, Ref, VariableDef
from weft.nnx.pytree import is_data
from weft.nnx.structure import Fixed, Watch
from weft.nnx.variables import Variable

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Change(NamedTuple):
    """Planned change of an object: its new description and attributes."""

    object: Any
    part: NodeDef
    items: list[tuple[Any, Any]]
    marks: dict[str, bool]


def check_changes(changes: Sequence[Change]) -> None:
    """Raises `TraceContextError` if an object may not be changed in this trace."""
    for made, *_ in changes:
        made._watch.check(made)


def make_changes(changes: Sequence[Change]) -> None:
    """Applies planned changes."""
    for made, part, items, marks in changes:
        if type(made) is not part.type:
            made.__class__ = part.type
        made._become(items, marks, part.order)


def plan_together(
    graphdef: GraphDef,
    leaves: Iterable[Any],
    share: bool = False,
    existing: Mapping[int, Any] = _NOTHING,
    known: Mapping[int, Any] = _NOTHING,
) -> tuple[Any, list[Any], list[Change]]:
    """Returns the results of `put_together`, and the changes that are still to be made."""
    leaves = list(leaves)
    if len(leaves) != graphdef.num_leaves:
        raise GraphStructureError(
            f"the description has {graphdef.num_leaves} values, and {len(leaves)} were given; give "
            "those that nnx.flatten returned."
        )
    rest = iter(leaves)
    objects: dict[int, Any] = dict(known)
    changes: list[Change] = []
    numbers: list[Any] = []  # values in place of arrays: their attributes stay data
    watch = Watch()  # shared: all objects are made at the same place

    def build(part: Any) -> Any:
        kind = type(part)
        if kind is VariableDef:
            value = next(rest)
            if part.index in existing:
                made = existing[part.index]
            elif isinstance(value, Variable):
                made = value if share else value.copy(_copy_ref=False)
            else:
                made = part.type.from_metadata(value, dict(part.metadata.value))
            objects[part.index] = made
            return made
        if kind is Fixed:
            return part.value
        if kind is Leaf:
            value = next(rest)
            if not is_data(value):
                numbers.append(value)
            return value
        if kind is Ref:
            if part.index not in objects:
                raise GraphStructureError(
                    f"the description refers to object {part.index} of another one, with which it "
                    "was split; merge both in one nnx.merge_context(), that one first."
                )
            return objects[part.index]
        if part.index is None:
            return jax.tree.unflatten(part.marks, [build(below) for _, below in part.attributes])
        is_new = part.index not in existing
        made = part.type._blank(watch) if is_new else existing[part.index]
        objects[part.index] = made
        # Fast path: most attributes are static.
        items = [
            (name, below.value if type(below) is Fixed else build(below))
            for name, below in part.attributes
        ]
        marks = dict(part.marks)
        if numbers:
            marks |= {name: True for name, below in part.attributes if type(below) is Leaf}
        change = Change(made, part, items, marks)
        if is_new:
            make_changes([change])
            return made
        is_same = type(made) is part.type
        if not is_same or not made._is_already(items, marks, part.order):
            changes.append(change)
        return made

    root = build(graphdef.root)
    return root, [objects[i] for i in sorted(objects)], changes


def put_together(
    graphdef: GraphDef,
    leaves: Iterable[Any],
    share: bool = False,
    existing: Mapping[int, Any] = _NOTHING,
    known: Mapping[int, Any] = _NOTHING,
) -> tuple[Any, list[Any]]:
    """Builds the graph of a description and values; returns the outermost object, and all by index.

    Args:
        leaves: for each value a variable, which is copied with its `jax.Ref`, or a variable's
            value.
        share: whether to use the given variables themselves.
        existing: objects to update by index; variables keep their values.
        known: objects of other descriptions that this one refers to, by index.

    Raises:
        GraphStructureError: if the number of values is wrong, or a referenced object is unknown.
    """
    root, objects, changes = plan_together(graphdef, leaves, share, existing, known)
    check_changes(changes)
    make_changes(changes)
    return root, objects
