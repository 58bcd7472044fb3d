"""Text of objects and states."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import jax
import numpy as np


def shown(x: Any, inside: frozenset[int] = frozenset()) -> str:
    """Returns the text of an object, with the sizes of its variables."""
    from weft.nnx.pytree import Pytree
    from weft.nnx.state import State
    from weft.nnx.variables import Variable

    if id(x) in inside:
        return f"{type(x).__name__}(...)"
    if isinstance(x, Variable):
        return variable_repr(x)
    if isinstance(x, list) and isinstance(x, Pytree):
        return _lines("List([", [shown(v, inside | {id(x)}) for v in x], "])")
    if isinstance(x, dict | State):
        name = type(x).__name__ + "(" if type(x) is not dict else ""
        items = [f"{k!r}: {shown(v, inside | {id(x)})}" for k, v in x.items()]
        return _lines(name + "{", items, "})" if name else "}")
    if type(x) is tuple and any(isinstance(v, Pytree | Variable) for v in x):
        return _lines("(", [shown(v, inside) for v in x], ")")
    if isinstance(x, Pytree):
        items = [f"{k}={shown(v, inside | {id(x)})}" for k, v in vars(x).items() if k != "_watch"]
        return _lines(f"{type(x).__name__}({_sizes(x)}", items, ")")
    return _value(x)


def variable_repr(variable: Any) -> str:
    """Returns the text of a variable: its value and its metadata."""
    items = [f"value={_value(variable._value)}"]
    items += [f"{name}={value!r}" for name, value in variable._metadata.items()]
    sizes = _size([variable._value])
    return _lines(f"{type(variable).__name__}({' # ' + sizes if sizes else ''}", items, ")")


def _lines(start: str, items: list[str], end: str) -> str:
    if not items:
        return start + end
    inner = ",\n".join(items).replace("\n", "\n  ")
    return f"{start}\n  {inner}\n{end}"


def _value(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray) and x.size > 8:
        return f"Array(shape={x.shape}, dtype={x.dtype})"
    if callable(x) and isinstance(name := getattr(x, "__name__", None), str):
        return name  # Python's repr of a function is an address
    return repr(x)


def _size(values: list[Any]) -> str:
    leaves = [x for x in jax.tree.leaves(values) if hasattr(x, "shape") and hasattr(x, "dtype")]
    if not leaves:
        return ""
    numbers = sum(int(np.prod(x.shape)) for x in leaves)
    size: float = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in leaves)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{numbers:,} ({size if unit == 'B' else f'{size:.1f}'} {unit})"


def _sizes(x: Any) -> str:
    from weft.nnx.graph import iter_graph
    from weft.nnx.variables import Variable

    found: dict[str, list[Any]] = {}
    for _, node in iter_graph(x):
        if isinstance(node, Variable):
            found.setdefault(type(node).__name__, []).append(node._value)
    if not found:
        return ""
    parts = [f"{name}: {_size(values)}" for name, values in sorted(found.items())]
    total = _size([v for values in found.values() for v in values])
    return " # " + ", ".join(parts + ([f"Total: {total}"] if len(parts) > 1 else []))


def display(*args: Any) -> None:
    """Shows objects: with Treescope in a notebook that has it, otherwise as text.

    Example:
        >>> from weft import nnx
        >>> nnx.display(nnx.Param(1))
        Param(
          value=1
        )
    """
    show: Any = print
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        with contextlib.suppress(ImportError):
            show = importlib.import_module("treescope").display
    for x in args:
        show(x)
