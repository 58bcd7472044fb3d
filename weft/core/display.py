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
from weft.typing import PyTree, Tensor


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


def notebook_tree(x: object, **kwargs: Any) -> dict[str, str]:
    """Returns Treescope's tree of an object, as HTML by its type; nothing without Treescope.

    Classes whose objects notebooks show as trees have it as their method `_repr_mimebundle_`.
    """
    try:
        treescope = importlib.import_module("treescope")
    except ImportError:
        return {}  # notebooks show the text
    return {"text/html": treescope.render_to_html(x, ignore_exceptions=True)}


def render_tree(
    x: object,
    attributes: Mapping[str, Any],
    path: str | None,
    subtree_renderer: Any,
) -> Any:
    """Returns what Treescope's method `__treescope_repr__` returns, for an object's attributes."""
    from treescope.repr_lib import render_object_constructor

    return render_object_constructor(
        type(x), attributes, path, subtree_renderer
    )


def to_shapes(tree: PyTree) -> PyTree:
    """Replaces arrays and tracers in a tree by `jax.ShapeDtypeStruct`s.

    >>> to_shapes({"x": jnp.ones(2), "n": 3})
    {'n': 3, 'x': ShapeDtypeStruct(shape=(2,), dtype=float32)}
    """

    def to_shape(leaf: PyTree) -> PyTree:
        return (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if is_array(leaf)
            else leaf
        )

    return jax.tree.map(to_shape, tree)


def is_array(x: PyTree) -> bool:
    """Returns whether a value has a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def split_arrays(
    tree: PyTree,
) -> tuple[list[Tensor], Callable[[Sequence[PyTree]], PyTree]]:
    """Returns the arrays of a tree, and a function that replaces them in the tree."""
    leaves = SelectedLeaves.of(tree, is_array, None)
    return leaves.selected, leaves.replace


def format_tree(tree: PyTree) -> str:
    """Formats a tree of shapes in lines: `name: value` in dicts, `- value` in lists.

    >>> print(format_tree({"a": jnp.ones(2), "b": [1, None]}))
    a: float32[2]
    b:
    - 1
    - None
    """
    if isinstance(tree, Mapping):
        lines = [
            _format_named_entry(name, entry) for name, entry in tree.items()
        ]
        return "\n".join(lines) or "{}"
    if isinstance(tree, list | tuple):
        lines = [
            "- " + format_tree(entry).replace("\n", "\n  ") for entry in tree
        ]
        return "\n".join(lines) or "[]"
    if isinstance(tree, meta.AxisMetadata):
        names = getattr(tree, "names", None)
        metadata = (
            f"P({', '.join(map(str, names))})" if names else type(tree).__name__
        )
        return f"{format_tree(tree.unbox())} {metadata}"
    if is_array(tree):
        return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
    return getattr(tree, "__name__", None) or str(tree)


def _format_named_entry(name: str, entry: PyTree) -> str:
    text = format_tree(entry)
    if not isinstance(entry, Mapping | list | tuple) or not entry:
        return f"{name}: {text}"
    indent = "  " if isinstance(entry, Mapping) else ""
    lines = text.replace("\n", f"\n{indent}")
    return f"{name}:\n{indent}{lines}"


def format_inputs(
    args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> str:
    """Formats the arguments of a call, without a list around a single one."""
    inputs = list(args)
    if kwargs:
        inputs.append(dict(kwargs))
    return format_tree(inputs[0] if len(inputs) == 1 else inputs)


def format_size(tree: PyTree) -> str:
    """Returns the number of elements in a tree and their bytes, as `"8 (32 B)"`."""
    n_elements = 0
    n_bytes = 0
    for leaf in jax.tree.leaves(tree):
        if is_array(leaf):
            size = math.prod(leaf.shape)
            n_elements += size
            n_bytes += size * leaf.dtype.itemsize
    if n_bytes < 1000:
        return f"{n_elements:,} ({n_bytes} B)"
    units = ["KB", "MB", "GB", "TB"]
    size_in_unit = n_bytes / 1000
    while size_in_unit >= 1000 and len(units) > 1:
        size_in_unit /= 1000
        del units[0]
    return f"{n_elements:,} ({size_in_unit:.1f} {units[0]})"


def flops(
    fn: Callable[..., PyTree], *args: PyTree, with_vjp: bool = False
) -> int:
    """Returns the FLOPs that XLA counts in a function of trees of arrays or their shapes.

    With `with_vjp`, includes the gradient of all inputs.
    """

    def forward(args: tuple[PyTree, ...]) -> list[Tensor]:
        return [leaf for leaf in jax.tree.leaves(fn(*args)) if is_array(leaf)]

    def backward(args: tuple[PyTree, ...]) -> list[Tensor]:
        results, pullback = jax.vjp(forward, args)
        gradients = pullback(list(map(_cotangent, results)))
        return [
            x
            for x in jax.tree.leaves(gradients)
            if x.dtype != jax.dtypes.float0
        ]

    lowered = jax.jit(backward if with_vjp else forward).lower(args)
    costs: Mapping[str, Any] = lowered.cost_analysis() or {}  # pyright: ignore[reportAssignmentType]
    return int(costs.get("flops", 0))


def _cotangent(x: Tensor) -> Tensor | np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return np.zeros(x.shape, jax.dtypes.float0)


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

    options: dict[str, Any] = {
        "title": f"{type(model).__name__} Summary",
        "caption": f"\nTotal Parameters: {format_size(variables)}",
        "show_header": True,
        "show_lines": True,
        "show_footer": True,
    }
    table = Table(**(options | dict(table_kwargs)))
    *first_names, last_name = names
    for name in first_names:
        table.add_column(name, footer=Text(""), **column_kwargs)
    table.add_column(
        last_name, footer=Text("Total", justify="right"), **column_kwargs
    )
    for name, tree in variables.items():
        table.add_column(name, footer=Text(format_size(tree)), **column_kwargs)
    for row in rows:
        table.add_row(*map(Text, row))
    output = io.StringIO()
    console_options: dict[str, Any] = {
        "force_terminal": True,
        "force_jupyter": False,
    } | dict(console_kwargs or {})
    Console(file=output, **console_options).print(table)
    return f"\n{output.getvalue()}\n"
