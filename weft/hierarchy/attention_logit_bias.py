"""Layers that compute biases of attention logits from segments and positions.

They return values, `Float[Array, "batch #heads time time"]`, for a model that shares one bias among
all layers. An attention layer can also mask by itself: see its field `mask`.
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
    """Returns the bias that masks padding, `Float[Array, "batch 1 time time"]`.

    Args:
      input_ids: `Int[Array, "batch time"]`.
      pad_token_id: None if the inputs have no padding.

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
    """Returns the sum of logits and a bias, in the dtype of the logits.

    Args:
      logits: `Float[Array, "batch heads target source"]`.
      attention_logit_biases: `Float[Array, "#batch #heads #target #source"]`, or None.
    """
    if attention_logit_biases is None:
        return logits
    biases = to_ndim(attention_logit_biases, logits.ndim)
    return logits + biases.astype(logits.dtype)


def alibi_get_slopes(num_heads: int) -> list[float]:
    """Returns the slope by which each head's logits fall with distance (Press et al., 2022).

    Example:
      >>> alibi_get_slopes(4)
      [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return alibi_slopes(num_heads).tolist()


class AttentionLogitBiasLayer(BaseLayer):
    """Layer whose bias lets positions attend to their own segment."""

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns a bias, `Float[Array, "batch #heads time time"]`.

        Args:
          segment_ids: `Int[Array, "batch time"]`.
          positions: `Int[Array, "batch time"]` within the segments.
        """
        del positions
        return make_segment_mask(source_segments=segment_ids, target_segments=segment_ids)


class FullAttentionLogitBiasLayer(AttentionLogitBiasLayer):
    """Layer whose bias lets positions attend to their whole segment."""


class CausalAttentionLogitBiasLayer(AttentionLogitBiasLayer):
    """Layer whose bias lets positions attend to themselves and earlier ones of their segment."""

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        causal = bool_to_bias(evaluate_mask(causal_mask, positions, positions))
        return causal + super().forward(segment_ids=segment_ids, positions=positions)


class ALiBiAttentionLogitBiasLayer(CausalAttentionLogitBiasLayer):
    """Layer for causal attention whose logits fall with distance, with one slope per head."""

    @config_class
    class Config(CausalAttentionLogitBiasLayer.Config):
        """Configures an ALiBiAttentionLogitBiasLayer."""

        num_heads: Required[int] = REQUIRED

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        falling = alibi_bias(alibi_slopes(self.config.num_heads), positions, positions)
        return falling + super().forward(segment_ids=segment_ids, positions=positions)


class SymmetricALiBiAttentionLogitBiasLayer(FullAttentionLogitBiasLayer):
    """Layer for bidirectional attention whose logits fall with distance, one slope per head."""

    @config_class
    class Config(FullAttentionLogitBiasLayer.Config):
        """Configures a SymmetricALiBiAttentionLogitBiasLayer."""

        num_heads: Required[int] = REQUIRED

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        falling = alibi_bias(alibi_slopes(self.config.num_heads), positions, positions)
        return falling + super().forward(segment_ids=segment_ids, positions=positions)
