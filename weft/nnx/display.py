"""Text of objects and states, also of a user's classes, from parts that `__nnx_repr__` yields."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from weft.core.display import format_size, is_array, join_lines

Enclosing = frozenset[int]
"""Ids of the objects around a value, so that a cycle ends."""
_NOTHING: Enclosing = frozenset()


@functools.singledispatch
def object_repr(x: object, inside: Enclosing = _NOTHING) -> str:
    """Returns the text of an object or a value; classes of objects register their own."""
    if isinstance(x, jax.Array | np.ndarray) and x.size > 8:
        return f"Array(shape={x.shape}, dtype={x.dtype})"
    if callable(x) and isinstance(name := getattr(x, "__name__", None), str):
        return name  # Python's repr of a function is an address
    return repr(x)


value_repr = object_repr.dispatch(object)


@object_repr.register
def _(x: dict, inside: Enclosing = _NOTHING) -> str:
    return mapping_repr("", x.items(), inside | {id(x)})


@object_repr.register
def _(x: tuple, inside: Enclosing = _NOTHING) -> str:
    has_objects = any(object_repr.dispatch(type(v)) is not value_repr for v in x)
    if type(x) is not tuple or not has_objects:
        return repr(x)
    return join_lines("(", [object_repr(v, inside) for v in x], ")")


def mapping_repr(name: str, items: Iterable[tuple[object, object]], inside: Enclosing) -> str:
    """Returns the text of a mapping of class `name`, or of a dict if it is empty."""
    lines = [f"{key!r}: {object_repr(value, inside)}" for key, value in items]
    return join_lines(name + "({" if name else "{", lines, "})" if name else "}")


def size_text(values: object) -> str:
    """Returns the number of elements and bytes of arrays, or an empty text without arrays."""
    return format_size(values) if any(map(is_array, jax.tree.leaves(values))) else ""


def display(*args: object) -> None:
    """Shows objects: with Treescope in a notebook that has it, otherwise as text.

    >>> nnx.display(nnx.Param(1))
    Param(
      value=1
    )
    """
    show = print
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        with contextlib.suppress(ImportError):
            show = importlib.import_module("treescope").display
    for x in args:
        show(x)


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
def _(x: Representable, inside: Enclosing = _NOTHING) -> str:
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
