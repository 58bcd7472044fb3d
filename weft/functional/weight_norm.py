"""Weight and spectral normalization."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from weft.errors import ArgumentValueError
from weft.functional.norm import l2_normalize
from weft.functional.statistics import Axes, canonical_axes


def weight_norm(
    weight: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None = None,
    *,
    feature_axes: Axes | None = -1,
    eps: float = 1e-12,
) -> Float[Array, "*shape"]:
    """Returns `scale * weight / |weight|` (Salimans and Kingma, 2016).

    Args:
        weight: the direction.
        scale: the norms, with the axes `feature_axes` in increasing order; 1 by default.
        feature_axes: the axes with a norm per position; None for one norm of the whole weight.
        eps: added to the square of the norm.

    Raises:
        ArgumentValueError: if the weight does not have these axes.

    >>> weight_norm(jnp.array([[2.0, -5.0]]), jnp.array([3.0, 1.0])).tolist()
    [[3.0, -1.0]]
    """
    features = weight_features(weight.shape, feature_axes)
    shared = tuple(a for a in range(weight.ndim) if a not in features)
    y = l2_normalize(weight, eps, shared)
    if scale is None:
        return y
    return y * scale.reshape([1 if a in shared else n for a, n in enumerate(weight.shape)])


def weight_features(shape: Sequence[int], feature_axes: Axes | None) -> tuple[int, ...]:
    """Returns the axes of a weight that have norms, in increasing order; none for None.

    Raises:
        ArgumentValueError: if the weight does not have these axes.

    >>> weight_features((3, 4, 5), (-1, 0))
    (0, 2)
    """
    if feature_axes is None:
        return ()
    axes = (feature_axes,) if isinstance(feature_axes, int) else tuple(feature_axes)
    if any(not -len(shape) <= a < len(shape) for a in axes):
        raise ArgumentValueError(
            f"feature_axes={feature_axes} are not all axes of a weight of shape {tuple(shape)}."
        )
    return tuple(sorted(canonical_axes(axes, len(shape))))


def spectral_norm(
    weight: Float[Array, "*rows columns"],
    u: Float[Array, "1 columns"],
    *,
    n_steps: int = 1,
    eps: float = 1e-12,
) -> tuple[Float[Array, "*rows columns"], Float[Array, "1 columns"], Float[Array, ""]]:
    """Returns a weight divided by its largest singular value, the next `u`, and that value.

    The singular value is estimated by power iteration (Miyato et al., 2018), starting from `u`. No
    gradient flows through the iteration, only through `v weight u`.

    Args:
        weight: a matrix; all axes but the last are its rows.
        u: an estimate of the first right singular vector, such as the one returned before.
        n_steps: number of iterations, at least 1.
        eps: added to the squares of norms.

    Raises:
        ArgumentValueError: if `n_steps` is less than 1.

    >>> weight, u = jnp.diag(jnp.array([4.0, 1.0])), jnp.ones((1, 2))
    >>> weight, u, sigma = spectral_norm(weight, u, n_steps=9)
    >>> weight.round(3).tolist(), sigma.round(3).item()
    ([[1.0, 0.0], [0.0, 0.25]], 4.0)
    """
    if n_steps < 1:
        raise ArgumentValueError(f"n_steps={n_steps}: expected at least one step of the iteration.")
    matrix = weight.reshape(-1, weight.shape[-1])
    fixed = lax.stop_gradient(matrix)
    v = u
    for _ in range(n_steps):
        v = l2_normalize(u @ fixed.T, eps, None)
        u = l2_normalize(v @ fixed, eps, None)
    u, v = lax.stop_gradient((u, v))
    sigma = (v @ matrix @ u.T)[0, 0]
    # A weight of zeros stays zero.
    return weight / jnp.where(sigma != 0, sigma, 1), u, sigma
