"""What an initializer says of the value that it makes, beside the value.

An initializer gives an array; one of `with_metadata` gives the array together with the metadata
that its variable shall have. The variable that is made of it takes both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")


@dataclasses.dataclass
class VariableMetadata:
    """A value on its way into a variable, with what an initializer says of it.

    Attributes:
        raw_value: the value.
        on_set_value: see `Variable`.
        on_get_value: see `Variable`.
        on_create_value: see `Variable`.
        on_add_axis: see `Variable.add_axis`.
        on_remove_axis: see `Variable.remove_axis`.
        metadata: further metadata.
    """

    raw_value: Any
    on_set_value: Any = ()
    on_get_value: Any = ()
    on_create_value: Any = ()
    on_add_axis: Any = ()
    on_remove_axis: Any = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """The metadata of the variable, with those hooks that there are."""
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
    """An initializer whose values become variables with metadata.

    Args:
        initializer: makes the value.
        on_set_value: see `Variable`.
        on_get_value: see `Variable`.
        on_create_value: see `Variable`.
        on_add_axis: told when the value gains an axis.
        on_remove_axis: told when it loses one.
        **metadata: further metadata.

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
