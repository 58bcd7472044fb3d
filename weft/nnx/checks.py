"""Whether the attributes of objects are what was said of them."""

from __future__ import annotations

from typing import Any

from weft.errors import AttributeMarkError, ObjectArgumentError
from weft.nnx.graph import iter_graph
from weft.nnx.pytree import Pytree, is_data
from weft.nnx.state import shown_path


def check_pytree(pytree: Any) -> None:
    """Checks that no attribute of an object that is static holds data.

    Setting an attribute checks it; this is for objects that were filled in another way, such as by
    `vars(module)[name] = value`, or whose static values have been changed in place.

    Args:
        pytree: the object; those in it are checked as well.

    Raises:
        ObjectArgumentError: if it is no object.
        AttributeMarkError: if an attribute is said to be static, and holds an array, a variable
            or an object.

    Example:
        >>> from weft import nnx
        >>> check_pytree(nnx.List([nnx.Param(1.0)]))
    """
    if not isinstance(pytree, Pytree):
        raise ObjectArgumentError(
            f"check_pytree was given a {type(pytree).__name__}; give an nnx.Module or nnx.Pytree."
        )
    for path, x in iter_graph(pytree):
        for name, value in x._items() if isinstance(x, Pytree) else ():
            if not x._is_data(name, value) and _has_data(value):
                raise AttributeMarkError(
                    f"{type(x).__name__} has a {type(value).__name__} with data in it at "
                    f"{shown_path((*path, name))!r}, where a static value was said to be; say "
                    "nnx.data(value), or take out arrays, variables and objects."
                )


def _has_data(value: Any) -> bool:
    """Whether there is data in a value; a list or dict is none by itself."""
    if isinstance(value, Pytree) and isinstance(value, list | dict):
        return any(_has_data(below) for _, below in value._items())
    return is_data(value)
