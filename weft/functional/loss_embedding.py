"""Losses and similarities of embeddings."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from weft.errors import ArgumentValueError


def _unit(x: Float[Array, "*batch dim"], eps: float) -> Float[Array, "*batch dim"]:
    """Returns vectors of length 1; those shorter than `eps` are divided by `eps`."""
    # The maximum is inside the root, which has no gradient at 0.
    return x / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), eps**2))


def nearest_neighbor_entropy_loss(
    embeddings: Float[Array, "batch dim"], *, normalize_embedding: bool = True, eps: float = 1e-8
) -> Float[Array, ""]:
    """Returns the mean of `-log(distance to the nearest other)`: low for evenly spread vectors.

    This is the Kozachenko-Leonenko estimate of differential entropy, up to sign and a constant
    (Sablayrolles et al., 2019).

    Args:
        embeddings: at least two.
        normalize_embedding: whether to normalize the vectors first. In both cases, "nearest" means
            the largest inner product.
        eps: added to distances.

    Raises:
        ArgumentValueError: if there are fewer than two.

    >>> opposite = jnp.array([[1.0, 0.0], [-5.0, 0.0]])
    >>> round(nearest_neighbor_entropy_loss(opposite).item(), 3)  # both are 2 apart
    -0.693
    """
    n = embeddings.shape[0]
    if n < 2:
        raise ArgumentValueError(
            f"embeddings of shape {embeddings.shape} have no neighbors; expected at least two."
        )
    x = embeddings.astype(jnp.float32)
    if normalize_embedding:
        x = _unit(x, eps)
    others = jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, x @ x.T)
    nearest = x[jnp.argmax(others, axis=1)]
    distances = jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x - nearest), axis=1), eps**2))
    return -jnp.mean(jnp.log(distances + eps))


def elementwise_similarity(
    x: Float[Array, "*batch dim"],
    y: Float[Array, "*batch dim"],
    *,
    normalize_embedding: bool = True,
    eps: float = 1e-8,
) -> Float[Array, "*batch dim"]:
    """Returns products of components, which add up to the cosine of two vectors.

    Without `normalize_embedding`, they add up to the inner product. `eps` is the least length to
    divide by.

    >>> elementwise_similarity(jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])).round(3).tolist()
    [0.0, 0.80...]
    """
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return _unit(x, eps) * _unit(y, eps) if normalize_embedding else x * y


def activation_flops(
    embeddings: Float[Array, "batch dim"],
    *,
    paddings: Num[Array, " batch"] | None = None,
    sparsity_threshold: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns a smooth cost of a search with these sparse vectors, and their mean number of zeros.

    The cost is the sum over components of the squared mean magnitude: the expected number of
    products in an inner product if magnitudes were probabilities (Paria et al., 2020).

    Args:
        embeddings: vectors.
        paddings: 1 for vectors that do not count.
        sparsity_threshold: the largest magnitude that counts as zero.

    >>> cost, zeros = activation_flops(jnp.array([[1.0, 0.0], [1.0, 2.0]]))
    >>> cost.item(), zeros.item()
    (2.0, 0.5)
    """
    magnitudes = jnp.abs(embeddings.astype(jnp.float32))
    if paddings is None:
        paddings = jnp.zeros(magnitudes.shape[:1])
    live = 1 - paddings.astype(jnp.float32)
    count = jnp.maximum(1, live.sum())
    mean = jnp.sum(magnitudes * live[:, None], axis=0) / count
    zeros = jnp.sum(magnitudes <= sparsity_threshold, axis=1)
    return jnp.sum(jnp.square(mean)), jnp.sum(zeros * live) / count


def with_cosine_margin(
    cosines: Float[Array, "*batch classes"],
    targets: Float[Array, "*batch classes"],
    *,
    alpha: float = 1.0,
    margin: float = 0.0,
) -> Float[Array, "*batch classes"]:
    """Returns `alpha * (cosines - margin * targets)`: the right class must lead by a margin.

    These are the logits of a softmax cross entropy (Wang et al., 2018, CosFace). `cosines` are
    those of an embedding and each class; `targets` are one-hot, or probabilities.

    >>> right = jnp.array([1.0, 0.0])
    >>> with_cosine_margin(jnp.array([0.5, 0.5]), right, alpha=10, margin=0.5).tolist()
    [0.0, 5.0]
    """
    return alpha * (cosines.astype(jnp.float32) - margin * targets)
