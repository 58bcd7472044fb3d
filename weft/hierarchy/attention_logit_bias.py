"""Layers that make biases of attention logits from segments and positions.

They give values, `Float[Array, "batch #heads time time"]`, for a model that makes one bias for all
of its layers. An attention layer can mask by itself as well: see its field `mask`.
"""

import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.functional import alibi_bias, alibi_slopes
from weft.functional.attention_mask import NEG_INF, bool_to_bias, causal_mask, evaluate_mask
from weft.functional.ranks import to_ndim
from weft.hierarchy.attention_bias import make_segment_mask
from weft.hierarchy.base_layer import BaseLayer
from weft.typing import Tensor


def compute_padding_biases(input_ids: Tensor, *, pad_token_id: int | None) -> Tensor:
    """The bias of attention from and to what is not padding.

    Args:
      input_ids: `Int[Array, "batch time"]`.
      pad_token_id: of padding; None if there is none.

    Returns:
      `Float[Array, "batch 1 time time"]`.

    Example:
      >>> (compute_padding_biases(jnp.array([[5, 0]]), pad_token_id=0) == 0).tolist()
      [[[[True, False], [False, False]]]]
    """
    padding = jnp.zeros(input_ids.shape) if pad_token_id is None else input_ids == pad_token_id
    bias = padding * NEG_INF
    return bias[:, None, :, None] + bias[:, None, None, :]


def apply_attention_logit_biases(
    logits: Tensor, attention_logit_biases: Tensor | None = None
) -> Tensor:
    """Adds a bias to logits.

    Args:
      logits: `Float[Array, "batch heads target source"]`.
      attention_logit_biases: `Float[Array, "#batch #heads #target #source"]`, or None.

    Returns:
      The sum, in the dtype of the logits.
    """
    if attention_logit_biases is None:
        return logits
    biases = to_ndim(attention_logit_biases, logits.ndim)
    return logits + biases.astype(logits.dtype)


def alibi_get_slopes(num_heads: int) -> list[float]:
    """The slope by which each head's logits fall with distance (Press et al., 2022).

    Args:
      num_heads: the number of heads.

    Example:
      >>> alibi_get_slopes(4)
      [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return alibi_slopes(num_heads).tolist()


class AttentionLogitBiasLayer(BaseLayer):
    """Positions attend to those of their own segment."""

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        """Makes a bias.

        Args:
          segment_ids: `Int[Array, "batch time"]`.
          positions: `Int[Array, "batch time"]` within the segments.

        Returns:
          `Float[Array, "batch #heads time time"]`.
        """
        del positions
        return make_segment_mask(source_segments=segment_ids, target_segments=segment_ids)


class FullAttentionLogitBiasLayer(AttentionLogitBiasLayer):
    """Positions attend to all of their segment."""


class CausalAttentionLogitBiasLayer(AttentionLogitBiasLayer):
    """Positions attend to themselves and to what came before in their segment."""

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        causal = bool_to_bias(evaluate_mask(causal_mask, positions, positions))
        return causal + super().forward(segment_ids=segment_ids, positions=positions)


class ALiBiAttentionLogitBiasLayer(CausalAttentionLogitBiasLayer):
    """Causal attention whose logits fall with distance, in each head with its own slope."""

    @config_class
    class Config(CausalAttentionLogitBiasLayer.Config):
        """Configures an ALiBiAttentionLogitBiasLayer.

        Attributes:
          num_heads: the number of heads.
        """

        num_heads: Required[int] = REQUIRED

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        falling = alibi_bias(alibi_slopes(self.config.num_heads), positions, positions)
        return falling + super().forward(segment_ids=segment_ids, positions=positions)


class SymmetricALiBiAttentionLogitBiasLayer(FullAttentionLogitBiasLayer):
    """Attention in both directions whose logits fall with distance, in each head with its slope."""

    @config_class
    class Config(FullAttentionLogitBiasLayer.Config):
        """Configures a SymmetricALiBiAttentionLogitBiasLayer.

        Attributes:
          num_heads: the number of heads.
        """

        num_heads: Required[int] = REQUIRED

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        falling = alibi_bias(alibi_slopes(self.config.num_heads), positions, positions)
        return falling + super().forward(segment_ids=segment_ids, positions=positions)
