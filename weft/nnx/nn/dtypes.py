"""The dtype in which a layer computes.

A layer gives its arrays to `promote_dtype` as one tuple, and users can give layers another such
function in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jax.typing import DTypeLike

from weft import functional
from weft.functional.dtypes import canonicalize_dtype

__all__ = ["PromoteDtype", "canonicalize_dtype", "promote_dtype"]


class PromoteDtype(Protocol):
    """Gives arrays one dtype, as `promote_dtype` does."""

    def __call__(self, args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any: ...


def promote_dtype(
    args: Sequence[Any], /, *, dtype: DTypeLike | None = None, inexact: bool = True
) -> tuple[Any, ...]:
    """The arguments as arrays of one dtype.

    Args:
        args: arrays or numbers; None stays None.
        dtype: of all of them; by default what they promote to.
        inexact: whether the dtype must be a floating-point or complex one. Integers alone promote
            to float32 then.

    Raises:
        ArgumentValueError: if `dtype` is not inexact but must be, or there is nothing to go by.

    Example:
        >>> import jax.numpy as jnp
        >>> x, bias = promote_dtype((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)))
        >>> x.dtype.name, bias.dtype.name
        ('float32', 'float32')
    """
    return tuple(functional.promote_dtype(*args, dtype=dtype, inexact=inexact))
