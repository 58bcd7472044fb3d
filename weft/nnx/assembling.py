"""Making a graph of objects from its description and values.

Objects that are there already become what the description says. What is to become of them is found
first, and looked at before any of them changes, so that nothing is done by halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from weft.errors import GraphStructureError
from weft.nnx.graph import GraphDef, Leaf, NodeDef, Ref, VariableDef
from weft.nnx.structure import Fixed, Watch
from weft.nnx.variables import Variable

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Change(NamedTuple):
    """What an object is to become.

    Attributes:
        object: the object.
        part: its description.
        items: its attributes.
    """

    object: Any
    part: NodeDef
    items: list[tuple[Any, Any]]


def check_changes(changes: Sequence[Change]) -> None:
    """Refuses changes of objects of another trace.

    Raises:
        TraceContextError: if one of them may not be changed here.
    """
    for made, _, _ in changes:
        made._watch.check(made)


def make_changes(changes: Sequence[Change]) -> None:
    """Makes objects what they are to become."""
    for made, part, items in changes:
        if type(made) is not part.type:
            made.__class__ = part.type
        made._become(items, dict(part.marks), part.order)


def plan_together(
    graphdef: GraphDef,
    leaves: Iterable[Any],
    share: bool = False,
    existing: Mapping[int, Any] = _NOTHING,
    known: Mapping[int, Any] = _NOTHING,
) -> tuple[Any, list[Any], list[Change]]:
    """As `put_together`, with what is still to be done, so that nothing need be done by halves."""
    leaves = list(leaves)
    if len(leaves) != graphdef.num_leaves:
        raise GraphStructureError(
            f"the description has {graphdef.num_leaves} values, and {len(leaves)} were given; give "
            "those that nnx.flatten gave."
        )
    rest = iter(leaves)
    objects: dict[int, Any] = dict(known)
    changes: list[Change] = []
    watch = Watch()  # of the first of those that are made here, which all are made at once

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
            return next(rest)
        if kind is Ref:
            if part.index not in objects:
                raise GraphStructureError(
                    f"the description refers to object {part.index} of another one, with which it "
                    "was split; merge both inside of one nnx.merge_context(), that one first."
                )
            return objects[part.index]
        if part.index is None:
            return jax.tree.unflatten(part.marks, [build(below) for _, below in part.attributes])
        is_new = part.index not in existing
        made = part.type._blank(watch) if is_new else existing[part.index]
        objects[part.index] = made
        # Most attributes are static, which is seen here without a call.
        items = [
            (name, below.value if type(below) is Fixed else build(below))
            for name, below in part.attributes
        ]
        change = Change(made, part, items)
        if is_new:
            make_changes([change])
            return made
        is_same = type(made) is part.type
        if not is_same or not made._is_already(items, dict(part.marks), part.order):
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
    """The graph of a description and values.

    Args:
        graphdef: the description.
        leaves: for each of its values a variable, of which a copy is used, or what a variable
            holds. A copy has the `jax.Ref` of the variable, if there is one.
        share: whether variables among the values are used themselves.
        existing: objects that are used, by index; they get the attributes of the description, and
            variables keep their values.
        known: the objects of other descriptions to which this one refers, by index.

    Returns:
        The outermost object, and all objects by index.

    Raises:
        GraphStructureError: if there are more or fewer values than the description has, or it
            refers to an object that is not known.
    """
    root, objects, changes = plan_together(graphdef, leaves, share, existing, known)
    check_changes(changes)
    make_changes(changes)
    return root, objects
