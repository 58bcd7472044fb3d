"""Explicit rank promotion.

JAX adds missing axes itself, unless `jax_numpy_rank_promotion` forbids it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num


def to_ndim(x: Num[Array, "*shape"], ndim: int) -> Num[Array, "*ones_and_shape"]:
    """Returns `x` with axes of size 1 prepended, up to at least `ndim`; scalars stay scalars.

    >>> to_ndim(jnp.ones(3), 2).shape, to_ndim(jnp.array(1.0), 2).shape
    ((1, 3), ())
    """
    x = jnp.asarray(x)
    return lax.expand_dims(x, range(ndim - x.ndim)) if 0 < x.ndim < ndim else x


def same_ndim(*xs: Num[Array, "..."]) -> list[Num[Array, "..."]]:
    """Returns arrays with axes of size 1 prepended, up to the largest number of axes.

    >>> [x.shape for x in same_ndim(jnp.ones((2, 3)), jnp.ones(3))]
    [(2, 3), (1, 3)]
    """
    ndim = max(map(jnp.ndim, xs))
    return [to_ndim(x, ndim) for x in xs]


def positions(size: int, ndim: int) -> Num[Array, "*ones size"]:
    """Returns `0, 1, ..., size - 1` along the last of `ndim` axes.

    >>> positions(3, 2).tolist()
    [[0, 1, 2]]
    """
    return to_ndim(jnp.arange(size), ndim)
