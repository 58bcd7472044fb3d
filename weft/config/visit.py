"""Traversals of configs, and conversions to dicts."""

from collections.abc import Callable, Sequence
from typing import Any

from weft.config.values import ConfigNode, join_path, parts, values_equal

Pairs = list[tuple[str, Any]]


def visit(
    root: Any,
    *,
    visit_fn: Callable[[str, Any], None],
    enter_fn: Callable[[str, Any, Pairs | None], Pairs | None] | None = None,
    exit_fn: Callable[[str, Any], None] | None = None,
    path: str = "",
) -> None:
    """Traverses a value depth first. See `ConfigBase.visit`."""
    opened = parts(root)
    children = None if opened is None else [(join_path(path, s), child) for s, child in opened]
    if enter_fn is not None:
        children = enter_fn(path, root, children)
    if children is None:
        visit_fn(path, root)
        return
    for child_path, child in children:
        visit(child, visit_fn=visit_fn, enter_fn=enter_fn, exit_fn=exit_fn, path=child_path)
    if exit_fn is not None:
        exit_fn(path, root)


def to_dict(value: Any) -> Any:
    """Converts nested configs to dicts. See `ConfigBase.to_dict`."""
    if isinstance(value, ConfigNode):
        return {name: to_dict(child) for name, child in value._field_values().items()}
    if isinstance(value, dict):
        return {key: to_dict(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_dict(child) for child in value)
    return value


def to_flat_dict(root: ConfigNode, *, omit_default_values: Sequence[Any]) -> dict[str, Any]:
    """Returns the leaves by path. See `ConfigBase.to_flat_dict`."""
    flat: dict[str, Any] = {}

    def enter(path: str, value: Any, children: Pairs | None) -> Pairs | None:
        if isinstance(value, ConfigNode):
            # Fields are omitted here rather than at leaves, because their defaults matter.
            return [
                (join_path(path, f".{name}"), child)
                for name, child in value._field_values().items()
                if not _omitted(value._fields()[name].default(), child, omit_default_values)
            ]
        return children or None  # an empty container is a leaf

    visit(root, visit_fn=flat.__setitem__, enter_fn=enter)
    return flat


def _omitted(default: Any, value: Any, values: Sequence[Any]) -> bool:
    if isinstance(value, ConfigNode):
        return False
    return any(values_equal(default, other) for other in values) and values_equal(value, default)
