"""Differences between graphs of objects, for errors about branches that must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from weft.nnx.filters import Path
from weft.nnx.graph import GraphDef, NodeDef, Ref, VariableDef
from weft.nnx.structure import Fixed


class Difference(NamedTuple):
    """A path where two graphs differ, and the content of each there, in words."""

    path: Path
    seen: tuple[str, str]


def first_difference(
    graphs: tuple[GraphDef, GraphDef],
    origins: tuple[Sequence[int | None], Sequence[int | None]],
    may_lack: Callable[[int, int | None, Any], bool] = lambda *_: False,
) -> Difference | None:
    """Returns the first difference between two graphs.

    Args:
        graphs: descriptions of both.
        origins: for each graph the original number of every object, None for a new object.
        may_lack: returns whether only one graph may have an attribute; takes the index of that
            graph, the original number of the object, and the name.
    """

    def is_lacked(side: int, node: NodeDef, name: Any) -> bool:
        index = node.index
        return may_lack(side, None if index is None else origins[side][index], name)

    def find(a: Any, b: Any, path: Path) -> Difference | None:
        if _index(a) is not None and _index(b) is not None:
            known = [of[x.index] for of, x in zip(origins, (a, b), strict=True)]
            if known[0] != known[1]:
                if None not in known:
                    return Difference(path, ("one object", "a different one"))
                new, old = "a new object", "an existing object"
                return Difference(path, (new, old) if known[0] is None else (old, new))
        if not (isinstance(a, NodeDef) and isinstance(b, NodeDef) and a.type is b.type):
            return None if _without_index(a) == _without_index(b) else _seen(a, b, path)
        of_a, of_b = dict(a.attributes), dict(b.attributes)
        for name in {**of_a, **of_b}:
            if name not in of_a and not is_lacked(1, b, name):
                return Difference((*path, name), ("absent", "present"))
            if name not in of_b and not is_lacked(0, a, name):
                return Difference((*path, name), ("present", "absent"))
        for name in filter(of_b.__contains__, of_a):
            if found := find(of_a[name], of_b[name], (*path, name)):
                return found
        if a.marks != b.marks:
            return Difference(path, ("marked one way", "marked another way"))
        return (
            None if a.order == b.order else Difference(path, ("in one order", "in another order"))
        )

    return find(graphs[0].root, graphs[1].root, ())


def _index(part: Any) -> int | None:
    return getattr(part, "index", None) if isinstance(part, NodeDef | VariableDef | Ref) else None


def _without_index(part: Any) -> Any:
    # Numbers are local to each graph; the caller has compared the objects.
    return part if _index(part) is None else part._replace(index=0)


def _seen(a: Any, b: Any, path: Path) -> Difference:
    return Difference(path, (_shown(a), _shown(b)))


def _shown(part: Any) -> str:
    if isinstance(part, Fixed):
        return repr(part.value)
    return part.type.__name__ if isinstance(part, NodeDef | VariableDef) else "an array"
