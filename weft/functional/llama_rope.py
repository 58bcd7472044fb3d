"""Rotary positions of Llama 3.1: slow pairs of dimensions are slowed down for long contexts.

Unlike YaRN, it compares full periods with the context, and does not scale logits.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from weft.functional.embedding import rotary_frequencies


def llama3_frequencies(
    dim: int,
    theta: float = 5e5,
    *,
    original_max_seq_length: int,
    scaling_factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Float[Array, " half_dim"]:
    """Returns the rotation of each pair of dimensions per position.

    Args:
        dim: size of the vectors to rotate; even.
        theta: the base of the frequencies.
        original_max_seq_length: the context length before the extension.
        scaling_factor: divides the frequencies of slow pairs.
        low_freq_factor: pairs with fewer turns within the original context are slow.
        high_freq_factor: pairs with more turns keep their frequency; those between are
            interpolated.

    >>> plain = rotary_frequencies(8, 1e4)
    >>> scaled = llama3_frequencies(8, 1e4, original_max_seq_length=100, scaling_factor=4.0)
    >>> [round(x, 2) for x in (plain / scaled).tolist()]
    [1.0, 2.51, 4.0, 4.0]
    """
    plain = rotary_frequencies(dim, theta)
    turns = original_max_seq_length * plain / (2 * math.pi)
    kept = jnp.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return plain * kept + plain / scaling_factor * (1.0 - kept)
