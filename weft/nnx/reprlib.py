"""Texts of objects of one's own, in the style of NNX, from parts that `__nnx_repr__` yields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from weft.nnx.display import Enclosing, object_repr


@dataclasses.dataclass
class Object:
    """Type of an object, the first part of its text, and the signs around its attributes."""

    type: str | type
    start: str = "("
    end: str = ")"
    kv_sep: str = "="
    indent: str = "  "
    empty_repr: str = ""
    comment: str = ""
    same_line: bool = False


@dataclasses.dataclass
class Attr:
    """Attribute of an object; a text may be the value itself, with `use_raw_value`."""

    key: str
    value: Any
    start: str = ""
    end: str = ""
    use_raw_value: bool = False
    use_raw_key: bool = False


class Representable:
    """Base class of objects whose `__nnx_repr__` yields an `Object`, and an `Attr` for each part.

    Example:
        >>> class Range(Representable):
        ...     def __nnx_repr__(self):
        ...         yield Object(type(self))
        ...         yield Attr("start", 1)
        >>> Range()
        Range(
          start=1
        )
    """

    __slots__ = ()

    def __nnx_repr__(self) -> Iterator[Object | Attr]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return object_repr(self)


def get_repr(obj: Representable) -> str:
    """Returns the text of an object."""
    return object_repr(obj)


@object_repr.register
def _(x: Representable, inside: Enclosing = frozenset()) -> str:
    if id(x) in inside:
        return f"{type(x).__name__}(...)"
    parts: Iterator[Any] = x.__nnx_repr__()
    head = next(parts)
    name = head.type if isinstance(head.type, str) else head.type.__name__

    def line(part: Attr) -> str:
        value = part.value if part.use_raw_value else object_repr(part.value, inside | {id(x)})
        return f"{part.start}{part.key}{head.kv_sep}{value}{part.end}"

    lines = [line(part) for part in parts]
    if not lines:
        return f"{name}{head.start}{head.empty_repr}{head.end}"
    if head.same_line:
        return f"{name}{head.start}{', '.join(lines)}{head.end}"
    inner = ",\n".join(lines).replace("\n", f"\n{head.indent}")
    return f"{name}{head.start}{head.comment}\n{head.indent}{inner}\n{head.end}"
