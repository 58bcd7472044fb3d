"""Text of objects over lines, and their trees in notebooks."""

import importlib
from collections.abc import Mapping
from typing import Any


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
