"""Text of objects and states, also of a user's classes, from parts that `__nnx_repr__` yields."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from weft.core.display import (
    format_size,
    is_array,
    join_lines,
    notebook_tree,
    render_tree,
)
from weft.typing import PyTree

Rendering = Any
"""What Treescope makes of a value: an optional library, without types."""
Enclosing = frozenset[int]
"""Ids of the objects around a value, so that a cycle ends."""
_NOTHING: Enclosing = frozenset()


def object_repr(x: PyTree, inside: Enclosing = _NOTHING) -> str:
    """Returns the text of an object or a value."""
    if isinstance(x, Shown):
        if id(x) in inside:
            return f"{type(x).__name__}(...)"
        return x._repr_inside(inside | {id(x)})
    if isinstance(x, dict):
        return mapping_repr("", x.items(), inside)
    if type(x) is tuple and any(isinstance(v, Shown | dict | tuple) for v in x):
        return join_lines("(", [object_repr(v, inside) for v in x], ")")
    return value_repr(x)


def value_repr(x: PyTree) -> str:
    """Returns the text of a value without objects."""
    if isinstance(x, jax.Array | np.ndarray) and x.size > 8:
        return f"Array(shape={x.shape}, dtype={x.dtype})"
    if callable(x):
        name = getattr(x, "__name__", None)
        if isinstance(name, str):
            return name  # Python's repr of a function is an address
    return repr(x)


def mapping_repr(
    name: str, items: Iterable[tuple[Hashable, PyTree]], inside: Enclosing
) -> str:
    """Returns the text of a mapping of class `name`, or of a dict if it is empty."""
    lines = [f"{key!r}: {object_repr(value, inside)}" for key, value in items]
    if name:
        return join_lines(f"{name}({{", lines, "})")
    return join_lines("{", lines, "}")


def size_text(values: PyTree) -> str:
    """Returns the number of elements and bytes of arrays, or an empty text without arrays."""
    if not any(map(is_array, jax.tree.leaves(values))):
        return ""
    return format_size(values)


def display(*args: PyTree) -> None:
    """Shows objects: with Treescope in a notebook that has it, otherwise as text.

    >>> nnx.display(nnx.Param(1))
    Param(
      value=1
    )
    """
    show = print
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
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

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Callable[..., Rendering]
    ) -> Rendering:
        return render_tree(self, self._repr_parts(), path, subtree_renderer)

    def _repr_inside(self, inside: Enclosing) -> str:
        """Returns the text; `inside` has the object itself too."""
        raise NotImplementedError

    def _repr_parts(self) -> dict[str, PyTree]:
        """Returns the parts that a notebook's tree shows, by name."""
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

    def _repr_parts(self) -> dict[str, PyTree]:
        parts: dict[str, PyTree] = {}
        for part in self.__nnx_repr__():
            if isinstance(part, Attr):
                parts[part.key] = part.value
        return parts

    def _repr_inside(self, inside: Enclosing) -> str:
        # An Object, and then an Attr for each part.
        parts: Iterator[Any] = self.__nnx_repr__()
        head: Object = next(parts)
        name = head.type if isinstance(head.type, str) else head.type.__name__
        start = f"{name}{head.start}"
        lines: list[str] = []
        for part in parts:
            text = part.value
            if not part.use_raw_value:
                text = object_repr(part.value, inside)
            lines.append(f"{part.start}{part.key}{head.kv_sep}{text}{part.end}")
        if not lines:
            return f"{start}{head.empty_repr}{head.end}"
        if head.same_line:
            return f"{start}{', '.join(lines)}{head.end}"
        inner = ",\n".join(lines).replace("\n", f"\n{head.indent}")
        return f"{start}{head.comment}\n{head.indent}{inner}\n{head.end}"


def get_repr(obj: Representable) -> str:
    """Returns the text of an object."""
    return object_repr(obj)
