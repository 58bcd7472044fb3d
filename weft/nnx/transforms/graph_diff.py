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
    present = {index for index in origins if index is not None}
    replaced: dict[int, int] = {}

    def walk(old: object, new: object) -> None:
        if isinstance(old, NodeDef) and isinstance(new, NodeDef) and old.type is new.type:
            if old.index is not None and new.index is not None:
                is_new = origins[new.index] is None and old.index not in present
                if is_new and may_replace(old):
                    replaced[new.index] = old.index
                elif origins[new.index] != old.index:
                    return
            of_old = dict(old.attributes)
            for name, part in new.attributes:
                if name in of_old:
                    walk(of_old[name], part)
        elif isinstance(old, VariableDef) and isinstance(new, VariableDef):
            is_new = origins[new.index] is None and old.index not in present
            if old.type is new.type and is_new and may_replace(old):
                replaced[new.index] = old.index

    walk(dict(before.root.attributes)[0], dict(after.root.attributes)[0])
    return replaced
