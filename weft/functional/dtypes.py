"""Selection of the dtype in which a layer computes: its own, or the promoted one of its arrays.

It is always a floating-point or complex dtype, even where all inputs are integers.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from weft.errors import ArgumentValueError
from weft.typing import DType


def canonicalize_dtype(*args: Any, dtype: DTypeLike | None = None, inexact: bool = True) -> DType:
    """Returns the dtype of a computation.

    Args:
        *args: arrays or numbers; None is ignored.
        dtype: returned if given; by default the dtype that `args` promote to.
        inexact: whether the dtype must be floating-point or complex; integers alone then promote
            to float32.

    Raises:
        ArgumentValueError: if `dtype` must be inexact but is not, or no dtype can be inferred.

    >>> canonicalize_dtype(jnp.ones(2, jnp.bfloat16), 1)
    dtype(bfloat16)
    >>> canonicalize_dtype(jnp.ones(2, jnp.int32)).name
    'float32'
    """
    if dtype is None:
        common = _promoted([x for x in args if x is not None])
        fits = not inexact or jnp.issubdtype(common, jnp.inexact)
        return common if fits else jnp.promote_types(jnp.float32, common)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ArgumentValueError(
            f"dtype={jnp.dtype(dtype).name} cannot hold fractions: this computes in a floating-"
            "point or complex dtype. Leave dtype out, or give one such as jnp.float32."
        )
    return dtype


def promote_dtype(*args: Any, dtype: DTypeLike | None = None, inexact: bool = True) -> list[Any]:
    """Returns the arguments as arrays of one dtype; None stays None.

    `dtype` and `inexact` are those of `canonicalize_dtype`.

    Raises:
        ArgumentValueError: see `canonicalize_dtype`.

    >>> x, bias, scale = promote_dtype(jnp.ones(2, jnp.bfloat16), None, 2)
    >>> x.dtype.name, bias, scale.dtype.name
    ('bfloat16', None, 'bfloat16')
    """
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    return [x if x is None or _has(x, dtype) else jnp.asarray(x, dtype) for x in args]


def _has(x: Any, dtype: Any) -> bool:
    """Returns whether `x` is a JAX array of that dtype, and not weakly typed."""
    return getattr(x, "weak_type", True) is False and x.dtype == dtype


def _promoted(args: Sequence[Any]) -> Any:
    if not args:
        raise ArgumentValueError(
            "The dtype is unknown: neither a dtype nor an array was given; pass at least one."
        )
    common = getattr(args[0], "dtype", None)
    if all(_has(x, common) for x in args):
        return common  # promotion is slow, and most often there is nothing to promote
    return jnp.result_type(*(x if hasattr(x, "dtype") else jnp.asarray(x) for x in args))
