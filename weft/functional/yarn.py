"""YaRN: rotary positions for longer contexts than a model was trained on (Peng et al., 2023).

Pairs of dimensions that turn often within the original context keep their frequency; those that
turn less than once have it divided, so that no angle is new to the model; those between are
interpolated. Because attention spreads over more keys, its logits are raised a little.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from weft.functional.embedding import rotary_frequencies


def yarn_frequencies(
    dim: int,
    theta: float = 1e4,
    *,
    original_max_seq_length: int,
    scaling_factor: float = 1.0,
    extrapolation_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Float[Array, " half_dim"]:
    """Returns by how much each pair of dimensions turns per position.

    Args:
        dim: of the vectors to rotate; even.
        theta: the base of the frequencies.
        original_max_seq_length: the longest context in training.
        scaling_factor: how many times as long the context is now.
        extrapolation_factor: how far fast pairs keep their frequency; 0 divides those of all.
        beta_fast: a pair that turns more often than this within the original context is fast.
        beta_slow: a pair that turns less often than this is slow.

    >>> plain = rotary_frequencies(8)
    >>> scaled = yarn_frequencies(8, original_max_seq_length=64, scaling_factor=4.0)
    >>> [round(x, 2) for x in (plain / scaled).tolist()]
    [1.0, 1.6, 4.0, 4.0]
    """
    plain = rotary_frequencies(dim, theta)

    def pair_that_turns(times: float) -> float:
        return (
            dim * math.log(original_max_seq_length / (2 * math.pi * times)) / (2 * math.log(theta))
        )

    first = max(math.floor(pair_that_turns(beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(beta_slow)), dim - 1)
    slow = jnp.clip((jnp.arange(dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    kept = (1.0 - slow) * extrapolation_factor
    return plain * kept + plain / scaling_factor * (1.0 - kept)


def yarn_magnitude(scaling_factor: float, attn_factor: float = 1.0) -> float:
    """Returns the factor of sines and cosines, of queries and of keys: `0.1 ln(scaling) + 1`.

    Args:
        scaling_factor: how many times as long the context is as in training; nothing changes up
            to 1.
        attn_factor: a further factor.

    >>> yarn_magnitude(1.0), round(yarn_magnitude(4.0), 4)
    (1.0, 1.1386)
    """
    magnitude = 1.0 if scaling_factor <= 1 else 0.1 * math.log(scaling_factor) + 1.0
    return magnitude * attn_factor
