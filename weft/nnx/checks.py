"""Checks of the attributes of objects."""

from __future__ import annotations

from typing import Any

from weft.errors import AttributeMarkError, ObjectArgumentError
from weft.nnx.graph import iter_graph
from weft.nnx.pytree import Pytree, is_data
from weft.nnx.state import shown_path


def check_pytree(pytree: Any) -> None:
    """Checks that static attributes hold no data, in an object and those in it.

    Assignment checks this already; use it after changes in place or through `vars(module)`.

    Raises:
        ObjectArgumentError: if `pytree` is not an object.
        AttributeMarkError: if a static attribute holds an array, a variable or an object.

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
                    f"{shown_path((*path, name))!r}, which is marked static; use nnx.data(value), "
                    "or remove arrays, variables and objects from it."
                )


def _has_data(value: Any) -> bool:
    if isinstance(value, Pytree) and isinstance(value, list | dict):
        return any(_has_data(below) for _, below in value._items())
    return is_data(value)
