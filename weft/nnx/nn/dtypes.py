"""Computation dtype of a layer: `promote_dtype` and the protocol of replacements for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jax.typing import DTypeLike

from weft import functional
from weft.functional.dtypes import canonicalize_dtype

__all__ = ["PromoteDtype", "canonicalize_dtype", "promote_dtype"]


class PromoteDtype(Protocol):
    """Callable that casts arrays to one dtype, as `promote_dtype` does."""

    def __call__(self, args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any: ...


def promote_dtype(
    args: Sequence[Any], /, *, dtype: DTypeLike | None = None, inexact: bool = True
) -> tuple[Any, ...]:
    """Returns the arguments as arrays of one dtype.

    Args:
        args: arrays or numbers; None stays None.
        dtype: the dtype; by default the one to which the arguments promote.
        inexact: whether the dtype must be floating-point or complex; integers then promote to
            float32.

    Raises:
        ArgumentValueError: if `dtype` must be inexact and is not, or there are no arrays to
            promote.

    Example:
        >>> import jax.numpy as jnp
        >>> x, bias = promote_dtype((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)))
        >>> x.dtype.name, bias.dtype.name
        ('float32', 'float32')
    """
    return tuple(functional.promote_dtype(*args, dtype=dtype, inexact=inexact))
