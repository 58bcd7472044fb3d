"""Decoding of whole sequences with a decoder that extends them step by step.

    prompts ── prefill ── cache ─┐
                                 ├── loop: extend_step, scores, choice ── sequences
                 last tokens ────┘

The loops are in `decoding`; this module runs them with a decoder's cache and scores.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from weft.config import REQUIRED, ConfigOr, Configurable, Required, config_class, maybe_instantiate
from weft.errors import MissingPrngKeyError
from weft.functional import LogitsToLogitsFn
from weft.hierarchy import decoding
from weft.hierarchy.context import require_context
from weft.typing import DType, NestedTensor, Tensor


class BaseDecoder(Protocol):
    """Interface of a decoder for decoding."""

    @property
    def prng_key(self) -> Any:
        """The key of the current invocation, or None."""
        ...

    def init_states(
        self, *, batch_size: int, max_sequence_length: int, dtype: DType
    ) -> NestedTensor:
        """Returns the state before the first step.

        Args:
          max_sequence_length: the maximum length of the sequences.
          dtype: of the cache.
        """
        ...

    def prefill_states(
        self,
        *,
        time_step: Tensor,
        input_batch: Mapping[str, Any],
        max_sequence_length: int | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the state after the tokens before `time_step`.

        Args:
          time_step: `Int[Array, "batch"]`.
          input_batch: a dict with `input_ids`, `Int[Array, "batch length"]`.
          max_sequence_length: the maximum length of the sequences; `length` if None.
          **kwargs: as for `extend_step`.

        Returns:
          The state, and the outputs at all positions of `input_ids`; those from `time_step` on are
          undefined.
        """
        ...

    def extend_step(
        self,
        *,
        cached_states: Mapping[str, Any],
        input_batch: Mapping[str, Any],
        is_prefill: bool = False,
        segment_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the state and the outputs after the next tokens.

        Args:
          cached_states: from `init_states`, `prefill_states`, or the step before.
          input_batch: a dict with `input_ids`, `Int[Array, "batch step"]`.
          is_prefill: whether these are the first tokens.
          segment_ids: `Int[Array, "batch step"]`: 0 for padding after a prompt; None for no
            padding.
          **kwargs: data and biases of cross attention.

        Returns:
          The state for the next step, and a dict with `logits`, `Float[Array, "batch step vocab"]`.
        """
        ...


def log_probs_from_logits(
    logits: Tensor, logits_modifier: ConfigOr[LogitsToLogitsFn] | None = None
) -> Tensor:
    """Returns the log probabilities of the next token, in float32.

    Args:
      logits: `Float[Array, "*batch vocab"]`.
      logits_modifier: a function of logits, or a config of one, such as `top_k_logits`.

    Example:
      >>> without_first = lambda logits: logits.at[..., 0].set(-1e9)
      >>> jnp.exp(log_probs_from_logits(jnp.zeros((1, 3)), without_first)).tolist()
      [[0.0, 0.5, 0.5]]
    """
    logits = logits.astype(jnp.float32)
    if logits_modifier is not None:
        logits = maybe_instantiate(logits_modifier)(logits)
    return jax.nn.log_softmax(logits, axis=-1)


class DecodingLayer(Configurable):
    """Decoding methods of a decoder, without state of their own."""

    @config_class
    class Config(Configurable.Config):
        """Configures a DecodingLayer."""

        pad_token_id: Required[int] = REQUIRED
        eos_token_id: Required[int] = REQUIRED

    def __init__(self, cfg: Config, *, decoder: BaseDecoder):
        super().__init__(cfg)
        self._decoder = decoder

    def sample_decode(
        self,
        *,
        input_batch: Mapping[str, Any],
        max_sequence_length: int,
        num_decodes: int,
        cross_attention_data: Tensor | None = None,
        cross_attention_logit_biases: Tensor | None = None,
        logits_modifier: ConfigOr[LogitsToLogitsFn] | None = None,
        stop_decoding_condition: decoding.StopDecodingCondition | None = None,
    ) -> decoding.SampleOutputs:
        """Samples continuations of prompts; see `decoding.sample_decode`.

        Args:
          input_batch: a dict with `prefix`, `Int[Array, "batch length"]`: prompts, padded on the
            right. Results omit the first token of each, such as a beginning-of-sequence token.
          max_sequence_length: the length of a result.
          num_decodes: number of continuations per prompt.
          cross_attention_data: `Float[Array, "batch source dim"]`, if the decoder attends to it.
          cross_attention_logit_biases: `Float[Array, "batch #heads #target source"]`.
          logits_modifier: temperature and cut-offs, such as
            `chain(scale_by(0.7), top_k_logits(40))`; None samples from the model's distribution.
          stop_decoding_condition: when a sequence is complete; by default at `eos_token_id`.

        Raises:
          MissingPrngKeyError: if the invocation has no PRNG key.
        """
        cfg = self.config
        prng_key = self._decoder.prng_key
        if prng_key is None:
            raise MissingPrngKeyError(
                "sample_decode draws random tokens and the invocation has no PRNG key; pass "
                "prng_key= to `functional`, or decode the likeliest tokens by beam_search_decode "
                "with num_decodes=1."
            )
        cross = _given(cross_attention_data, cross_attention_logit_biases)
        return decoding.sample_decode(
            **self._prefill(input_batch, max_sequence_length, cross),
            tokens_to_scores=self._tokens_to_scores(num_decodes, cross, logits_modifier),
            num_decodes=num_decodes,
            max_decode_len=max_sequence_length,
            stop_decoding_condition=stop_decoding_condition
            or decoding.StopOnSubsequence(cfg.eos_token_id),
            prng_key=prng_key,
            pad_id=cfg.pad_token_id,
        )

    def beam_search_decode(
        self,
        *,
        input_batch: Mapping[str, Any],
        max_sequence_length: int,
        num_decodes: int,
        cross_attention_data: Tensor | None = None,
        cross_attention_logit_biases: Tensor | None = None,
        brevity_penalty: decoding.BrevityPenaltyFn | None = None,
    ) -> decoding.BeamSearchOutputs:
        """Searches for the likeliest continuations of prompts; see `decoding.beam_search_decode`.

        Args:
          input_batch: as for `sample_decode`.
          max_sequence_length: the length of a result.
          num_decodes: number of hypotheses to keep, and to return, per prompt.
          cross_attention_data: as for `sample_decode`.
          cross_attention_logit_biases: as for `sample_decode`.
          brevity_penalty: corrects scores for lengths; see `brevity_penalty_fn`.
        """
        cfg = self.config
        cross = _given(cross_attention_data, cross_attention_logit_biases)
        return decoding.beam_search_decode(
            **self._prefill(input_batch, max_sequence_length, cross),
            tokens_to_scores=self._tokens_to_scores(num_decodes, cross, None),
            eos_id=cfg.eos_token_id,
            num_decodes=num_decodes,
            max_decode_len=max_sequence_length,
            brevity_penalty=brevity_penalty,
            pad_id=cfg.pad_token_id,
        )

    def _prefill(
        self, input_batch: Mapping[str, Any], max_sequence_length: int, cross: dict[str, Tensor]
    ) -> dict[str, Any]:
        prefix: Tensor = input_batch["prefix"]
        time_step = decoding.infer_initial_time_step(prefix, pad_id=self.config.pad_token_id)
        cache, _ = self._decoder.prefill_states(
            time_step=time_step,
            input_batch={"input_ids": prefix},
            max_sequence_length=max_sequence_length,
            **cross,
        )
        return {"inputs": prefix, "time_step": time_step, "cache": cache}

    def _tokens_to_scores(
        self,
        num_decodes: int,
        cross: dict[str, Any],
        logits_modifier: ConfigOr[LogitsToLogitsFn] | None,
    ) -> Callable[[Tensor, NestedTensor], tuple[Tensor, NestedTensor]]:
        """Returns a pure function of tokens and cache, usable in a loop's body."""
        modifier = maybe_instantiate(logits_modifier)
        cross = {
            name: decoding.flatten_decoding_dim(decoding.add_decoding_dim(x, num_decodes))
            for name, x in cross.items()
        }

        def extend(ids: Tensor, cache: Any) -> tuple[Tensor, NestedTensor]:
            cache, outputs = self._decoder.extend_step(
                cached_states=cache, input_batch={"input_ids": ids}, **cross
            )
            return log_probs_from_logits(outputs["logits"][:, -1], modifier), cache

        # A step's side outputs cannot leave the loop, and no caller needs them.
        pure = require_context("decoding").functional(extend)
        return lambda ids, cache: pure(ids, cache)[0]


def _given(data: Tensor | None, biases: Tensor | None) -> dict[str, Tensor]:
    named = {"cross_attention_data": data, "cross_attention_logit_biases": biases}
    return {name: x for name, x in named.items() if x is not None}
