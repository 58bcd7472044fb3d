"""Text of objects and states, also of a user's classes, from parts that `__nnx_repr__` yields."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from weft.core.display import format_size, is_array, join_lines, notebook_tree, render_tree

Enclosing = frozenset[int]
"""Ids of the objects around a value, so that a cycle ends."""
_NOTHING: Enclosing = frozenset()


def object_repr(x: object, inside: Enclosing = _NOTHING) -> str:
    """Returns the text of an object or a value."""
    if isinstance(x, Shown):
        return f"{type(x).__name__}(...)" if id(x) in inside else x._repr_inside(inside | {id(x)})
    if isinstance(x, dict):
        return mapping_repr("", x.items(), inside)
    if type(x) is tuple and any(isinstance(v, Shown | dict | tuple) for v in x):
        return join_lines("(", [object_repr(v, inside) for v in x], ")")
    return value_repr(x)


def value_repr(x: object) -> str:
    """Returns the text of a value without objects."""
    if isinstance(x, jax.Array | np.ndarray) and x.size > 8:
        return f"Array(shape={x.shape}, dtype={x.dtype})"
    if callable(x) and isinstance(name := getattr(x, "__name__", None), str):
        return name  # Python's repr of a function is an address
    return repr(x)


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


class Shown:
    """Base class of objects with a text, and in notebooks a tree, of their parts."""

    __slots__ = ()

    def __repr__(self) -> str:
        return object_repr(self)

    _repr_mimebundle_ = notebook_tree

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return render_tree(self, self._repr_parts(), path, subtree_renderer)

    def _repr_inside(self, inside: Enclosing) -> str:
        raise NotImplementedError

    def _repr_parts(self) -> dict[str, Any]:
        raise NotImplementedError


class Representable(Shown):
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

    def _repr_parts(self) -> dict[str, Any]:
        return {part.key: part.value for part in self.__nnx_repr__() if isinstance(part, Attr)}

    def _repr_inside(self, inside: Enclosing) -> str:
        parts: Iterator[Any] = self.__nnx_repr__()
        head = next(parts)
        name = head.type if isinstance(head.type, str) else head.type.__name__

        def line(part: Attr) -> str:
            value = part.value if part.use_raw_value else object_repr(part.value, inside)
            return f"{part.start}{part.key}{head.kv_sep}{value}{part.end}"

        lines = [line(part) for part in parts]
        if not lines:
            return f"{name}{head.start}{head.empty_repr}{head.end}"
        if head.same_line:
            return f"{name}{head.start}{', '.join(lines)}{head.end}"
        inner = ",\n".join(lines).replace("\n", f"\n{head.indent}")
        return f"{name}{head.start}{head.comment}\n{head.indent}{inner}\n{head.end}"


def get_repr(obj: Representable) -> str:
    """Returns the text of an object."""
    return object_repr(obj)
