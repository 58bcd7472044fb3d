"""Arithmetic of vector quantization: choices of codebook entries, and how they are distributed.

A codebook has `codes` vectors for each of `groups` parts of an input, which are chosen separately.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from weft.functional.arrays import positions, to_ndim

OneHots = Float[Array, "batch time groups codes"]
Paddings = Bool[Array, "batch time"] | Num[Array, "batch time"]


def nearest_codes(
    x: Float[Array, "*batch groups dim"],
    codebook: Float[Array, "codes groups dim"],
    *,
    metric: Literal["l2_distance", "dot_product"] = "l2_distance",
) -> Int[Array, "*batch groups"]:
    """Returns the index of the most similar entry: of least distance, or largest scalar product.

    Similarities are computed in float32.

    >>> codebook = jnp.array([[[0.0]], [[2.0]]])
    >>> nearest_codes(jnp.array([[[0.9]], [[1.1]]]), codebook).tolist()
    [[0], [1]]
    """
    x, y = x.astype(jnp.float32), codebook.astype(jnp.float32)
    similarity = jnp.einsum("...gd,vgd->...gv", x, y)
    if metric == "l2_distance":
        # The squared distance is |x|^2 - 2xy + |y|^2.
        similarity -= to_ndim(jnp.sum(jnp.square(y), axis=-1).T / 2, similarity.ndim)
    return jnp.argmax(similarity, axis=-1)


def codebook_entries(
    codebook: Float[Array, "codes groups dim"], ids: Int[Array, "*batch groups"]
) -> Float[Array, "*batch groups dim"]:
    """Returns the entries of a codebook with the given indices, one for each group.

    >>> codebook_entries(jnp.array([[[0.0]], [[2.0]]]), jnp.array([[1], [0]])).tolist()
    [[[2.0]], [[0.0]]]
    """
    return codebook[ids, positions(codebook.shape[1], ids.ndim)]


def code_shares(onehots: OneHots, paddings: Paddings) -> Float[Array, "groups codes"]:
    """Returns the share of each entry among the choices that are not padding.

    >>> onehots = jax.nn.one_hot(jnp.array([[[0], [1], [1], [1]]]), 2)
    >>> code_shares(onehots, jnp.zeros((1, 4))).tolist()
    [[0.25, 0.75]]
    """
    is_real = 1.0 - paddings.astype(onehots.dtype)
    counts = jnp.einsum("bt,btgv->gv", is_real, onehots)
    return counts / jnp.maximum(1, jnp.sum(is_real))


def compute_code_coverage(onehots: OneHots, paddings: Paddings) -> Float[Array, ""]:
    """Returns the share of entries that were chosen at least once, the mean over groups.

    >>> onehots = jax.nn.one_hot(jnp.array([[[0], [2]]]), 4)
    >>> compute_code_coverage(onehots, jnp.zeros((1, 2))).item()
    0.5
    """
    return jnp.mean(code_shares(onehots, paddings) > 0)


def compute_code_pplx(
    onehots: OneHots, paddings: Paddings
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns perplexity and entropy, in nats, of the choices, each the mean over groups.

    >>> onehots = jax.nn.one_hot(jnp.array([[[0], [2]]]), 4)
    >>> pplx, entropy = compute_code_pplx(onehots, jnp.zeros((1, 2)))
    >>> round(pplx.item(), 4), round(entropy.item(), 4)
    (2.0, 0.6931)
    """
    entropies = jnp.sum(jax.scipy.special.entr(code_shares(onehots, paddings)), axis=-1)
    return jnp.mean(jnp.exp(entropies)), jnp.mean(entropies)
