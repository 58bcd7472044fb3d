"""YaRN: rotary positions for longer contexts than in training (Peng et al., 2023).

Pairs of dimensions that turn often within the original context keep their frequency; those that
turn less than once have it divided, so that no angle is new to the model; those between are
interpolated. Logits are raised a little, because attention spreads over more keys.
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
    """Returns the rotation of each pair of dimensions per position.

    Args:
        dim: size of the vectors to rotate; even.
        theta: the base of the frequencies.
        original_max_seq_length: the context length in training.
        scaling_factor: the ratio of the new to the original context length.
        extrapolation_factor: how far fast pairs keep their frequency; 0 divides all frequencies.
        beta_fast: pairs with more turns within the original context are fast.
        beta_slow: pairs with fewer turns are slow.

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
    """Returns the factor of sines and cosines, for queries and keys: `0.1 ln(scaling) + 1`.

    It is 1 for `scaling_factor <= 1`, and multiplied by `attn_factor`.

    >>> yarn_magnitude(1.0), round(yarn_magnitude(4.0), 4)
    (1.0, 1.1386)
    """
    magnitude = 1.0 if scaling_factor <= 1 else 0.1 * math.log(scaling_factor) + 1.0
    return magnitude * attn_factor
