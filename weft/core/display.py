"""Text of objects over lines, their trees in notebooks, and tables of models.

Models run abstractly, and FLOPs are counted by XLA in lowered functions, without compilation.
"""

import importlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.core import meta
from weft.lifting.kind import SelectedLeaves


def join_lines(start: str, items: list[str], end: str) -> str:
    """Returns items on indented lines of their own, between `start` and `end`.

    >>> print(join_lines("Point(", ["x=1", "y=2"], ")"))
    Point(
      x=1,
      y=2
    )
    """
    if not items:
        return start + end
    inner = ",\n".join(items).replace("\n", "\n  ")
    return f"{start}\n  {inner}\n{end}"


def notebook_tree(x: object, **kwargs: object) -> dict[str, str]:
    """Returns Treescope's tree of an object, as HTML by its type; nothing without Treescope.

    Classes whose objects notebooks show as trees have it as their method `_repr_mimebundle_`.
    """
    try:
        treescope = importlib.import_module("treescope")
    except ImportError:
        return {}  # notebooks show the text
    return {"text/html": treescope.render_to_html(x, ignore_exceptions=True)}


def render_tree(
    x: object, attributes: Mapping[str, Any], path: str | None, subtree_renderer: Any
) -> Any:
    """Returns what Treescope's method `__treescope_repr__` returns, for an object's attributes."""
    from treescope.repr_lib import render_object_constructor

    return render_object_constructor(type(x), attributes, path, subtree_renderer)


def to_shapes(tree: Any) -> Any:
    """Replaces arrays and tracers in a tree by `jax.ShapeDtypeStruct`s.

    >>> to_shapes({"x": jnp.ones(2), "n": 3})
    {'n': 3, 'x': ShapeDtypeStruct(shape=(2,), dtype=float32)}
    """

    def one(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x

    return jax.tree.map(one, tree)


def is_array(x: object) -> bool:
    """Returns whether a value has a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def split_arrays(tree: object) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays of a tree, and a function that replaces them in the tree."""
    leaves = SelectedLeaves.of(tree, is_array, None)
    return leaves.selected, leaves.replace


def format_tree(value: Any) -> str:
    """Formats a tree of shapes in lines: `name: value` in dicts, `- value` in lists.

    >>> print(format_tree({"a": jnp.ones(2), "b": [1, None]}))
    a: float32[2]
    b:
    - 1
    - None
    """
    if isinstance(value, Mapping):
        items = ((f"{name}:", v) for name, v in value.items())
        return "\n".join(_format_entry(mark, v) for mark, v in items) or "{}"
    if isinstance(value, list | tuple):
        return "\n".join(_format_entry("-", v) for v in value) or "[]"
    if isinstance(value, meta.AxisMetadata):
        names = getattr(value, "names", None)
        where = f" P({', '.join(map(str, names))})" if names else f" {type(value).__name__}"
        return format_tree(value.unbox()) + where
    if is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return getattr(value, "__name__", None) or str(value)


def _format_entry(mark: str, value: object) -> str:
    shown = format_tree(value)
    nested = isinstance(value, Mapping | list | tuple) and bool(value)
    if mark == "-":
        return "- " + shown.replace("\n", "\n  ")
    if not nested:
        return f"{mark} {shown}"
    step = "" if isinstance(value, list | tuple) else "  "
    return f"{mark}\n{step}" + shown.replace("\n", f"\n{step}")


def format_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Formats the arguments of a call, without a list around a single one."""
    every = [*args, dict(kwargs)] if kwargs else list(args)
    return format_tree(every[0] if len(every) == 1 else every)


def format_size(tree: object) -> str:
    """Returns the number of elements in a tree and their bytes, as `"8 (32 B)"`."""
    leaves = [x for x in jax.tree.leaves(tree) if is_array(x)]
    numbers = sum(math.prod(x.shape) for x in leaves)
    number_of_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if number_of_bytes < 1000 or unit == "TB":
            break
        number_of_bytes /= 1000
    shown = number_of_bytes if unit == "B" else f"{number_of_bytes:.1f}"
    return f"{numbers:,} ({shown} {unit})"


def flops(fn: Callable[..., Any], *args: object, with_vjp: bool = False) -> int:
    """Returns the FLOPs that XLA counts in a function of trees of arrays or their shapes.

    With `with_vjp`, includes the gradient of all inputs.
    """

    def run(args: Any) -> Any:
        return [x for x in jax.tree.leaves(fn(*args)) if is_array(x)]

    def backward(args: Any) -> Any:
        out, pullback = jax.vjp(run, args)
        gradients = jax.tree.leaves(pullback(jax.tree.map(_cotangent, out)))
        return [x for x in gradients if x.dtype != jax.dtypes.float0]

    cost: Any = jax.jit(backward if with_vjp else run).lower(args).cost_analysis() or {}
    return int(cost.get("flops", 0))


def _cotangent(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return x if is_float else np.zeros(x.shape, jax.dtypes.float0)


def render_table(
    model: object,
    names: Sequence[str],
    variables: Mapping[str, Any],
    rows: Sequence[Sequence[str]],
    table_kwargs: Mapping[str, Any],
    column_kwargs: Mapping[str, Any],
    console_kwargs: Mapping[str, Any] | None,
) -> str:
    """Returns the table of a model as text, made by rich.

    Args:
        names: names of the first columns.
        variables: variables by the name of their column, which is one of the last.
    """
    # Imported here, since rich takes longer to import than all modules of this package.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    defaults = {
        "title": f"{type(model).__name__} Summary",
        "caption": f"\nTotal Parameters: {format_size(variables)}",
        **{"show_header": True, "show_lines": True, "show_footer": True},
    }
    table = Table(**{**defaults, **table_kwargs})
    *others, last = names
    for name in others:
        table.add_column(name, footer=Text(""), **column_kwargs)
    table.add_column(last, footer=Text("Total", justify="right"), **column_kwargs)
    for name, tree in variables.items():
        table.add_column(name, footer=Text(format_size(tree)), **column_kwargs)
    for row in rows:
        table.add_row(*map(Text, row))
    terminal = {"force_terminal": True, "force_jupyter": False, **(console_kwargs or {})}
    console = Console(file=io.StringIO(), **terminal)
    console.print(table)
    return "\n" + console.file.getvalue() + "\n"  # pyright: ignore[reportAttributeAccessIssue]
