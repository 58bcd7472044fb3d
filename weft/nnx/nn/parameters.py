"""Creation of parameters from an initializer, a key of the stream `params` and metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from weft.errors import InvalidRngError
from weft.functional.initializers import lecun_normal
from weft.nnx.kinds import Param
from weft.nnx.rngs import Rngs

Initializer = Callable[..., Any]
Metadata = Mapping[str, Any]

default_kernel_init = lecun_normal()
NO_METADATA: Metadata = MappingProxyType({})


def new_param(
    init: Initializer,
    rngs: Rngs,
    shape: Sequence[int],
    dtype: Any,
    metadata: Metadata = NO_METADATA,
    kind: Any = Param,
) -> Any:
    """Returns a new variable.

    Args:
        init: initializer; may return a value with metadata, like those of `nnx.with_metadata`.
        rngs: its stream `params` draws the value.
        metadata: metadata of the variable; the initializer's takes precedence.
        kind: class of the variable.

    Raises:
        InvalidRngError: if `rngs` is not `Rngs`.

    Example:
        >>> new_param(default_kernel_init, Rngs(0), (2, 3), "float32", {"tag": "head"}).shape
        (2, 3)
    """
    return kind(init(key_of(rngs), shape, dtype), **metadata)


def key_of(rngs: Rngs) -> jax.Array:
    """Returns the next key of the stream `params`.

    Raises:
        InvalidRngError: if `rngs` is not `Rngs`.
    """
    if not isinstance(rngs, Rngs):
        raise InvalidRngError(
            f"a layer was given rngs={rngs!r} to draw its parameters; expected streams, such as "
            "rngs=nnx.Rngs(0)."
        )
    return rngs.params()
