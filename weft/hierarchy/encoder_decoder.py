"""Sequence-to-sequence models: an encoder reads a source, a decoder writes its target.

    source ── emb ── encoder ── hidden states
                                     │ cross attention
    target ── emb ──────────────── decoder ── logits of the next tokens

Both embed tokens with one table, that of the decoder. The decoder's inputs begin with a token of
their own, `decoder_start_token_id`, which in T5 (Raffel et al., 2020) is that of padding.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from weft import config, functional
from weft.config import REQUIRED, InstantiableConfig, Required, maybe_set_config
from weft.errors import ArgumentValueError, did_you_mean
from weft.functional import bool_to_bias
from weft.functional.arrays import without_none
from weft.functional.attention_mask import segment_mask
from weft.hierarchy import (
    base_layer,
    causal_lm,
    config_setters,
    context,
    decoding,
)
from weft.hierarchy.attention.bias import AttentionLogitBiasLayer
from weft.hierarchy.attention.stack import (
    BaseStackedTransformerLayer,
    StackedTransformerLayer,
)
from weft.hierarchy.layers.linear import Dropout
from weft.hierarchy.layers.normalization import LayerNorm
from weft.hierarchy.module import Module
from weft.typing import Tensor

_NO_TOKEN = -1
"""Id of padding that is not one of the vocabulary."""


class SourceEncoder(base_layer.BaseLayer):
    """Layers that read a whole source, with attention in both directions."""

    class Config(base_layer.BaseLayer.Config):
        """Configures a SourceEncoder."""

        dim: Required[int] = REQUIRED
        attention_mask: AttentionLogitBiasLayer.Config | None = None
        """Computes one bias for the attention of all layers; None for a mask of segments."""
        transformer: BaseStackedTransformerLayer.Config = (
            StackedTransformerLayer.default_config()
        )
        output_norm: InstantiableConfig | None = LayerNorm.default_config()
        """Norm after the last layer; None for none."""
        output_dropout: Dropout.Config = Dropout.default_config()
        dropout_rate: float = 0.0
        """Rate of every Dropout below without a rate of its own."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        cfg = cfg.clone()
        config_setters.set_dropout_rate_recursively(
            cfg, cfg.dropout_rate, set_only_if_none=True
        )
        self._maybe_add_child("attention_mask", cfg.attention_mask)
        self._add_child("transformer", cfg.transformer.set(input_dim=cfg.dim))
        if cfg.output_norm is not None:
            self._add_child(
                "output_norm",
                maybe_set_config(cfg.output_norm, input_dim=cfg.dim),
            )
        self._add_child("output_dropout", cfg.output_dropout)

    def forward(
        self,
        x: Tensor,
        *,
        segment_ids: Tensor,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Returns the hidden states of a source, `Float[Array, "batch source dim"]`.

        Args:
          x: embeddings, `Float[Array, "batch source dim"]`.
          segment_ids: `Int[Array, "batch source"]`: positions attend within their segment; 0 is
            padding.
          positions: `Int[Array, "#batch source"]`; None counts from 0.
        """
        masks: dict[str, Any] = {"target_segment_ids": segment_ids}
        if "attention_mask" in self.children:
            source_positions = positions
            if source_positions is None:
                source_positions = jnp.arange(x.shape[1])[None]
            biases = self.attention_mask(
                segment_ids=segment_ids, positions=source_positions
            )
            masks = {"self_attention_logit_biases": biases}
        outputs = self.transformer(x, target_positions=positions, **masks)
        y = outputs.data
        if "output_norm" in self.children:
            y = self.output_norm(y)
        return self.output_dropout(y)


class EncoderDecoderModel(causal_lm.Model):
    """Sequence-to-sequence model. The layers of its decoder have a `cross_attention`.

    A batch is a dict as that of a `causal_lm.Model`, where inputs and targets are those of the
    decoder, with
      source_ids: `Int[Array, "batch source"]`, what the encoder reads.
      source_segment_ids: optional, `Int[Array, "batch source"]`: a segment of the target attends to
        that of the source with its id; 0 is padding. By default one segment, 1, of all but
        `pad_token_id`.
      input_ids: optional; by default `target_labels` after `decoder_start_token_id`, without the
        last.
    """

    class Config(causal_lm.Model.Config):
        """Configures an EncoderDecoderModel.

        The `pad_token_id` of the decoder is not used, as its first token may have this id.
        """

        encoder: SourceEncoder.Config = SourceEncoder.default_config()
        pad_token_id: int = 0
        """Id of padding, in sources and targets."""
        decoder_start_token_id: int = 0
        """Id of the first input of the decoder."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        cfg = cfg.clone(decoder=cfg.decoder.clone(pad_token_id=_NO_TOKEN))
        super().__init__(cfg, parent=parent)
        self._add_child("encoder", cfg.encoder.set(dim=cfg.decoder.dim))

    def encode(self, input_batch: Mapping[str, Any]) -> Tensor:
        """Returns the hidden states of sources, `Float[Array, "batch source dim"]`.

        Raises:
          ArgumentValueError: if the batch has no `source_ids`.
        """
        if "source_ids" not in input_batch:
            raise ArgumentValueError(
                f"{self.path()} reads the source of each example, but the batch has no "
                f"'source_ids'. {did_you_mean('source_ids', input_batch)}"
            )
        with context.child_context("source_emb", module=self.decoder.emb):
            x = self.decoder.emb({"inputs": input_batch["source_ids"]})
        return self.encoder(x, segment_ids=self._source_segments(input_batch))

    def _source_segments(self, input_batch: Mapping[str, Any]) -> Tensor:
        segment_ids = input_batch.get("source_segment_ids")
        if segment_ids is not None:
            return segment_ids
        is_token = input_batch["source_ids"] != self.config.pad_token_id
        return is_token.astype(jnp.int32)

    def _target_mask(self, input_batch: Mapping[str, Any]) -> Tensor:
        mask = super()._target_mask(input_batch)
        if input_batch.get("live_targets") is not None:
            return mask
        return mask & (input_batch["target_labels"] != self.config.pad_token_id)

    def _decoder_inputs(self, input_batch: Mapping[str, Any]) -> Tensor:
        ids = input_batch.get("input_ids")
        if ids is not None:
            return ids
        labels = input_batch["target_labels"]
        # Targets that do not count may be negative.
        labels = jnp.where(labels < 0, self.config.pad_token_id, labels)
        start = jnp.full_like(labels[:, :1], self.config.decoder_start_token_id)
        return jnp.concatenate([start, labels[:, :-1]], axis=1)

    def predict(self, input_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Runs encoder and decoder on a batch, ignoring targets; see `causal_lm.Model.predict`."""
        batch = self._shard_batch(input_batch)
        hidden_states = self.encode(batch)
        ids = self._decoder_inputs(batch)
        segment_ids = batch.get("input_segment_ids")
        target_segments = segment_ids
        if target_segments is None:
            target_segments = jnp.ones((1, 1), jnp.int32)
        outputs = self.decoder(
            without_none(
                input_ids=ids,
                input_segment_ids=segment_ids,
                positions=batch.get("input_positions"),
            ),
            cross_attention_data=hidden_states,
            cross_attention_logit_biases=self._source_biases(
                batch, target_segments
            ),
        )
        if self.config.scan_chunk is not None:
            del outputs["logits"]
        return outputs

    def _source_biases(
        self, batch: Mapping[str, Any], target_segments: Tensor
    ) -> Tensor:
        """Returns the bias of cross attention, `Float[Array, "batch 1 #target source"]`."""
        return bool_to_bias(
            segment_mask(target_segments, self._source_segments(batch))
        )

    def sample_decode(
        self,
        input_batch: Mapping[str, Any],
        *,
        num_decodes: int = 1,
        max_sequence_length: int | None = None,
        logits_modifier: config.ConfigOr[functional.LogitsToLogitsFn]
        | None = None,
        stop_decoding_condition: decoding.StopDecodingCondition | None = None,
    ) -> decoding.SampleOutputs:
        """Samples targets of sources; see `DecodingLayer.sample_decode`.

        Args:
          input_batch: a dict with `source_ids`, and optionally `prefix` and `prefix_len`, what
            targets begin with; by default only `decoder_start_token_id`, which results omit.
          max_sequence_length: the length of a result.
        """
        outputs = self.decoder.sample_decode(
            **self._decoding_inputs(input_batch, max_sequence_length),
            num_decodes=num_decodes,
            logits_modifier=logits_modifier,
            stop_decoding_condition=stop_decoding_condition,
        )
        return outputs.replace(sequences=self._with_padding(outputs.sequences))

    def beam_search_decode(
        self,
        input_batch: Mapping[str, Any],
        num_decodes: int = 1,
        brevity_penalty: decoding.BrevityPenaltyFn | None = None,
        *,
        max_sequence_length: int | None = None,
    ) -> decoding.BeamSearchOutputs:
        """Searches for the likeliest targets of sources; see `sample_decode` for the arguments."""
        outputs = self.decoder.beam_search_decode(
            **self._decoding_inputs(input_batch, max_sequence_length),
            num_decodes=num_decodes,
            brevity_penalty=brevity_penalty,
        )
        return outputs.replace(
            sequences=self._with_padding(outputs.sequences),
            live_sequences=self._with_padding(outputs.live_sequences),
        )

    def _decoding_inputs(
        self, input_batch: Mapping[str, Any], max_sequence_length: int | None
    ) -> dict[str, Any]:
        hidden_states = self.encode(input_batch)
        batch_size = len(hidden_states)
        prefix = input_batch.get("prefix")
        lengths = input_batch.get("prefix_len")
        if prefix is None:
            start = self.config.decoder_start_token_id
            prefix = jnp.full((batch_size, 1), start, jnp.int32)
            lengths = jnp.ones(batch_size, jnp.int32)
        elif lengths is None:
            # Padding in the place of the start is a token.
            is_padding = prefix == self.config.pad_token_id
            positions = jnp.arange(prefix.shape[1])[None]
            last = jnp.max(jnp.where(is_padding, 0, positions), axis=1)
            lengths = last + 1
        if max_sequence_length is None:
            raise ArgumentValueError(
                f"{self.path()} needs max_sequence_length, the length of the results: that of "
                "targets does not follow from that of their sources."
            )
        target_segments = jnp.ones((1, 1), jnp.int32)
        return {
            "input_batch": {"prefix": prefix, "prefix_len": lengths},
            "max_sequence_length": max_sequence_length,
            "cross_attention_data": hidden_states,
            "cross_attention_logit_biases": self._source_biases(
                input_batch, target_segments
            ),
        }

    def _with_padding(self, sequences: Tensor) -> Tensor:
        return jnp.where(
            sequences == _NO_TOKEN, self.config.pad_token_id, sequences
        )
