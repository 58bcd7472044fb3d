"""How a layer makes its parameters: an initializer, a key of the stream `params`, metadata."""

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
    """A variable that an initializer makes.

    Args:
        init: called with a key, the shape and the dtype; it can give a value with metadata, as
            those of `nnx.with_metadata`.
        rngs: its stream `params` gives the key.
        shape: of the value.
        dtype: of the value.
        metadata: of the variable; that of the initializer goes before it.
        kind: the variable's class.

    Raises:
        InvalidRngError: if `rngs` is something else.

    Example:
        >>> new_param(default_kernel_init, Rngs(0), (2, 3), "float32", {"tag": "head"}).shape
        (2, 3)
    """
    return kind(init(key_of(rngs), shape, dtype), **metadata)


def key_of(rngs: Rngs) -> jax.Array:
    """The next key of the stream `params`.

    Args:
        rngs: the streams.

    Raises:
        InvalidRngError: if `rngs` is something else.
    """
    if not isinstance(rngs, Rngs):
        raise InvalidRngError(
            f"a layer was given rngs={rngs!r} to make its parameters with; expected streams, such "
            "as rngs=nnx.Rngs(0)."
        )
    return rngs.params()
