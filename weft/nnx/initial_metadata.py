"""Initializers that return a value with metadata for the variable made from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")


@dataclasses.dataclass
class VariableMetadata:
    """Value with metadata, on its way into a variable; see `Variable` for the hooks."""

    raw_value: Any
    on_set_value: Any = ()
    on_get_value: Any = ()
    on_create_value: Any = ()
    on_add_axis: Any = ()
    on_remove_axis: Any = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """Returns the metadata of the variable, including the given hooks."""
        hooks = {name: getattr(self, name) for name in HOOKS if getattr(self, name)}
        return {**hooks, **self.metadata}


def with_metadata(
    initializer: Callable[..., Any],
    on_set_value: Any = (),
    on_get_value: Any = (),
    on_create_value: Any = (),
    on_add_axis: Any = (),
    on_remove_axis: Any = (),
    **metadata: Any,
) -> Callable[..., VariableMetadata]:
    """Returns an initializer whose values become variables with metadata.

    The hooks `on_*` are those of `Variable`, `Variable.add_axis` and `Variable.remove_axis`.

    Example:
        >>> import jax
        >>> from weft import nnx
        >>> init = with_metadata(jax.nn.initializers.ones, tag="head")
        >>> nnx.Param(init(jax.random.key(0), (2,))).tag
        'head'
    """

    @functools.wraps(initializer)
    def initialize(*args: Any, **kwargs: Any) -> VariableMetadata:
        return VariableMetadata(
            initializer(*args, **kwargs),
            on_set_value,
            on_get_value,
            on_create_value,
            on_add_axis,
            on_remove_axis,
            metadata,
        )

    return initialize
