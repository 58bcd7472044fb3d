"""Text of objects and states."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterable

import jax
import numpy as np

from weft.core.tabulate import format_size, is_array

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


def join_lines(start: str, items: list[str], end: str) -> str:
    """Returns items on indented lines of their own, between `start` and `end`."""
    if not items:
        return start + end
    inner = ",\n".join(items).replace("\n", "\n  ")
    return f"{start}\n  {inner}\n{end}"


def size_text(values: object) -> str:
    """Returns the number of elements and bytes of arrays, or an empty text without arrays."""
    return format_size(values) if any(map(is_array, jax.tree.leaves(values))) else ""


def display(*args: object) -> None:
    """Shows objects: with Treescope in a notebook that has it, otherwise as text.

    Example:
        >>> from weft import nnx
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
