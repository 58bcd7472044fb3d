"""Decoder of a language model, from token ids to the logits of the next tokens.

    ids ── emb ── transformer ── output_norm ── output_dropout ─┬─ lm_head ─── logits
                                                                └─ emb.attend ─┘

Without an `lm_head`, the logits are the inner products with the embeddings of the tokens. For
decoding, the prompts fill a cache, and the loops of `weft.hierarchy.decoding` extend it:

    prompts ── prefill ── cache ─┐
                                 ├── loop: extend_step, scores, choice ── sequences
                 last tokens ────┘
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from weft import config, errors
from weft.config import REQUIRED, InstantiableConfig, Required, maybe_set_config
from weft.core.logical import names_to_mesh_axes
from weft.core.spmd import axes_of, get_global_mesh
from weft.functional import (
    Int8Weight,
    LogitsToLogitsFn,
    arrays,
    attend,
    int8_product,
    loss,
)
from weft.functional.linear_cross_entropy import (
    linear_logit_statistics,
    num_chunks,
)
from weft.hierarchy import base_layer, config_setters, context, decoding
from weft.hierarchy.attention.bias import AttentionLogitBiasLayer
from weft.hierarchy.attention.stack import (
    BaseStackedTransformerLayer,
    StackedTransformerLayer,
)
from weft.hierarchy.layers import embedding, linear, normalization
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.param_init import FanAxes
from weft.hierarchy.parameter_spec import maybe_shard, shard_weight
from weft.typing import DType, MeshAxes, NestedTensor, PartitionSpec, Tensor


class BaseDecoder(Protocol):
    """Interface of a decoder for decoding."""

    @property
    def prng_key(self) -> Any:
        """The key of the current invocation, or None."""
        ...

    def init_states(
        self, *, batch_size: int, max_sequence_length: int, dtype: DType
    ) -> NestedTensor:
        """Returns the state before the first step; `dtype` is that of the cache."""
        ...

    def prefill_states(
        self,
        *,
        time_step: Tensor,
        input_batch: Mapping[str, Any],
        max_sequence_length: int | None = None,
        **kwargs: object,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the state after the tokens before `time_step`.

        Args:
          time_step: `Int[Array, "batch"]`.
          input_batch: a dict with `input_ids`, `Int[Array, "batch length"]`.
          max_sequence_length: the maximum length of the sequences; `length` if None.
          **kwargs: as for `extend_step`.

        Returns the state, and the outputs at all positions, undefined from `time_step` on.
        """
        ...

    def extend_step(
        self,
        *,
        cached_states: Mapping[str, Any],
        input_batch: Mapping[str, Any],
        is_prefill: bool = False,
        segment_ids: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the state and the outputs after the next tokens.

        Args:
          cached_states: from `init_states`, `prefill_states`, or the step before.
          input_batch: a dict with `input_ids`, `Int[Array, "batch step"]`.
          segment_ids: `Int[Array, "batch step"]`: 0 for padding after a prompt; or None.
          **kwargs: data and biases of cross attention.

        Returns:
          The state for the next step, and a dict with `logits`, `Float[Array, "batch step vocab"]`.
        """
        ...


def log_probs_from_logits(
    logits: Tensor,
    logits_modifier: config.ConfigOr[LogitsToLogitsFn] | None = None,
) -> Tensor:
    """Returns the log probabilities of modified logits, `Float[Array, "*batch vocab"]`, in float32.

    >>> without_first = lambda logits: logits.at[..., 0].set(-1e9)
    >>> jnp.exp(log_probs_from_logits(jnp.zeros((1, 3)), without_first)).tolist()
    [[0.0, 0.5, 0.5]]
    """
    logits = logits.astype(jnp.float32)
    if logits_modifier is not None:
        logits = config.maybe_instantiate(logits_modifier)(logits)
    return jax.nn.log_softmax(logits, axis=-1)


class _SpecialTokens(Protocol):
    pad_token_id: int
    eos_token_id: int | Sequence[int]


def warn_if_padding_is_end(cfg: _SpecialTokens, name: str) -> None:
    """Warns once if padding has the id of the end of a text, as a batch does not have `name`."""
    if cfg.pad_token_id in decoding.end_ids(cfg.eos_token_id):
        errors.warn_of_padding_by_value(
            f"pad_token_id={cfg.pad_token_id} is also the end, eos_token_id={cfg.eos_token_id}",
            "the batch",
            name,
        )


class DecodingLayer(config.Configurable):
    """Decoding methods of a decoder, without state of their own."""

    class Config(config.Configurable.Config):
        pad_token_id: Required[int] = REQUIRED
        eos_token_id: Required[int | Sequence[int]] = REQUIRED

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
        logits_modifier: config.ConfigOr[LogitsToLogitsFn] | None = None,
        stop_decoding_condition: decoding.StopDecodingCondition | None = None,
    ) -> decoding.SampleOutputs:
        """Samples continuations of prompts; see `decoding.sample_decode`.

        Args:
          input_batch: a dict with `prefix`, `Int[Array, "batch length"]`: prompts, padded on the
            right; and optionally `prefix_len`, `Int[Array, "batch"]`, their lengths, at least 1, by
            default those without `pad_token_id` at the end. Results omit the first token of each,
            such as a beginning-of-sequence token.
          max_sequence_length: the length of a result.
          num_decodes: number of continuations per prompt.
          cross_attention_data: `Float[Array, "batch source dim"]`, if the decoder attends to it.
          cross_attention_logit_biases: `Float[Array, "batch #heads #target source"]`.
          logits_modifier: temperature and cut-offs, such as
            `chain(scale_by(0.7), top_k_logits(40))`; None samples from the model's distribution.
          stop_decoding_condition: when a sequence is complete; by default at `eos_token_id`, or
            at each of several.

        Raises MissingPrngKeyError if the invocation has no PRNG key.
        """
        cfg = self.config
        prng_key = self._decoder.prng_key
        if prng_key is None:
            raise errors.MissingPrngKeyError(
                "sample_decode draws random tokens and the invocation has no PRNG key; pass "
                "prng_key= to `functional`, or decode the likeliest tokens by beam_search_decode "
                "with num_decodes=1."
            )
        cross = _cross_attention_kwargs(
            cross_attention_data, cross_attention_logit_biases
        )
        modifier = config.maybe_instantiate(logits_modifier)
        return decoding.sample_decode(
            **self._prefill(input_batch, max_sequence_length, cross),
            tokens_to_scores=self._tokens_to_scores(
                num_decodes, cross, modifier
            ),
            num_decodes=num_decodes,
            max_decode_len=max_sequence_length,
            stop_decoding_condition=stop_decoding_condition
            or decoding.StopOnSubsequence(
                [[i] for i in decoding.end_ids(cfg.eos_token_id)]
            ),
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

        Arguments not listed are as for `sample_decode`.

        Args:
          num_decodes: number of hypotheses to keep, and to return, per prompt.
          brevity_penalty: corrects scores for lengths; see `brevity_penalty_fn`.
        """
        cfg = self.config
        cross = _cross_attention_kwargs(
            cross_attention_data, cross_attention_logit_biases
        )
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
        self,
        input_batch: Mapping[str, Any],
        max_sequence_length: int,
        cross: dict[str, Tensor],
    ) -> dict[str, Any]:
        prefix: Tensor = input_batch["prefix"]
        pad_id, lengths = (
            self.config.pad_token_id,
            input_batch.get("prefix_len"),
        )
        if lengths is None:
            warn_if_padding_is_end(self.config, "prefix_len")
            time_step = decoding.infer_initial_time_step(prefix, pad_id=pad_id)
        else:
            time_step = jnp.clip(
                jnp.asarray(lengths, jnp.int32) - 1, 0, prefix.shape[1] - 1
            )
        # What follows a prompt is not part of it; beam search would continue with other tokens.
        prefix = jnp.where(
            jnp.arange(prefix.shape[1])[None] <= time_step[:, None],
            prefix,
            pad_id,
        )
        batch = {"input_ids": prefix}
        cache, _ = self._decoder.prefill_states(
            time_step=time_step,
            input_batch=batch,
            max_sequence_length=max_sequence_length,
            **cross,
        )
        return {"inputs": prefix, "time_step": time_step, "cache": cache}

    def _tokens_to_scores(
        self,
        num_decodes: int,
        cross: dict[str, Any],
        logits_modifier: LogitsToLogitsFn | None,
    ) -> Callable[[Tensor, NestedTensor], tuple[Tensor, NestedTensor]]:
        """Returns a pure function of tokens and cache, usable in a loop's body."""
        cross = {
            name: decoding.flatten_decoding_dim(
                decoding.add_decoding_dim(x, num_decodes)
            )
            for name, x in cross.items()
        }

        def extend(ids: Tensor, cache: Any) -> tuple[Tensor, NestedTensor]:
            cache, outputs = self._decoder.extend_step(
                cached_states=cache, input_batch={"input_ids": ids}, **cross
            )
            return log_probs_from_logits(
                outputs["logits"][:, -1], logits_modifier
            ), cache

        # A step's side outputs cannot leave the loop, and no caller needs them.
        pure = context.require_context("decoding").functional(extend)
        return lambda ids, cache: pure(ids, cache)[0]


def _cross_attention_kwargs(
    data: Tensor | None, biases: Tensor | None
) -> dict[str, Tensor]:
    return arrays.without_none(
        cross_attention_data=data, cross_attention_logit_biases=biases
    )


class LmHead(base_layer.BaseLayer):
    """Output layer with its own vector for each token, not tied to the embedding."""

    class Config(base_layer.BaseLayer.Config):
        vocab_size: Required[int] = REQUIRED
        embedding_dim: Required[int] = REQUIRED
        param_partition_spec: Any = (None, "model")

    def _create_layer_parameter_specs(
        self,
    ) -> dict[str, base_layer.ParameterSpec]:
        shape = (self.config.vocab_size, self.config.embedding_dim)
        mesh_axes, fan_axes = (
            self.config.param_partition_spec,
            FanAxes(in_axis=-1, out_axis=-2),
        )
        return {
            "weight": base_layer.ParameterSpec(
                shape, mesh_axes=mesh_axes, fan_axes=fan_axes
            )
        }

    def forward(self, x: Tensor) -> Tensor:
        """Maps `Float[Array, "*batch embedding_dim"]` to `Float[Array, "*batch vocab_size"]`."""
        weight: Any = self.parameters["weight"]
        if isinstance(weight, Int8Weight):
            return int8_product(x, weight)
        return attend(weight, x)

    def linear_head(self) -> embedding.LinearHead | None:
        """Returns the parameters of `forward`; None if a subclass computes something else."""
        if type(self).forward is not LmHead.forward:
            return None
        return embedding.LinearHead(self.parameters["weight"])


class Decoder(base_layer.BaseLayer):
    """Transformer over tokens, for whole sequences and for step-by-step decoding."""

    class Config(base_layer.BaseLayer.Config):
        """Configures a Decoder."""

        vocab_size: Required[int] = REQUIRED
        dim: Required[int] = REQUIRED
        attention_mask: AttentionLogitBiasLayer.Config | None = None
        """Computes one bias for the attention of all layers; None if layers mask by themselves, by
        `attention.mask`."""
        emb: InstantiableConfig[embedding.BaseEmbedding] = (
            embedding.TransformerTextEmbeddings.default_config()
        )
        transformer: BaseStackedTransformerLayer.Config = (
            StackedTransformerLayer.default_config()
        )
        output_norm: InstantiableConfig | None = (
            normalization.LayerNorm.default_config()
        )
        """Norm after the last layer; None for none."""
        output_dropout: linear.Dropout.Config = linear.Dropout.default_config()
        lm_head: InstantiableConfig | None = None
        """From vectors to logits; None for `emb.attend`."""
        dropout_rate: float = 0.0
        """Rate of every Dropout below without a rate of its own."""
        pad_token_id: int = 0
        """Id of padding."""
        eos_token_id: int | Sequence[int] = 1
        """Id of the end of a text; several ids all end decoding."""
        decoding: DecodingLayer.Config = DecodingLayer.default_config()
        output_logits_modifier: config.ConfigOr[LogitsToLogitsFn] | None = None
        logits_forward_dtype: DType | None = None
        """The dtype in which to compute logits; that of the vectors if None."""
        logits_partition_spec: MeshAxes = ("data", None, "model")
        hidden_state_partition_spec: MeshAxes | None = None
        """Sharding of the layers' inputs and outputs by batch and time."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        cfg = cfg.clone()
        config_setters.set_dropout_rate_recursively(
            cfg, cfg.dropout_rate, set_only_if_none=True
        )
        self._maybe_add_child("attention_mask", cfg.attention_mask)
        self._add_child(
            "emb",
            maybe_set_config(cfg.emb, dim=cfg.dim, vocab_size=cfg.vocab_size),
        )
        self._add_child("transformer", cfg.transformer.set(input_dim=cfg.dim))
        if cfg.output_norm is not None:
            self._add_child(
                "output_norm",
                maybe_set_config(cfg.output_norm, input_dim=cfg.dim),
            )
        self._add_child("output_dropout", cfg.output_dropout)
        head_dims = {"vocab_size": cfg.vocab_size, "embedding_dim": cfg.dim}
        self._maybe_add_child("lm_head", cfg.lm_head, **head_dims)
        self._decoding = cfg.decoding.set(
            pad_token_id=cfg.pad_token_id, eos_token_id=cfg.eos_token_id
        ).instantiate(decoder=self)
        self._output_logits_modifier = config.maybe_instantiate(
            cfg.output_logits_modifier
        )

    # Whole sequences.

    def forward(
        self,
        input_batch: Mapping[str, Any],
        *,
        cross_attention_data: Tensor | None = None,
        cross_attention_logit_biases: Tensor | None = None,
        **kwargs: object,
    ) -> dict[str, Tensor]:
        """Computes the logits after each token.

        Args:
          input_batch: a dict with `input_ids`, `Int[Array, "batch time"]`, and optionally, of the
            same shape, `input_segment_ids` (tokens attend to their own segment; 0 is padding),
            `positions` (within the segments; by default counted from 0) and `token_type_ids`.
          cross_attention_data: `Float[Array, "batch source dim"]`, for layers that attend to it.
          cross_attention_logit_biases: `Float[Array, "batch #heads #time source"]`.

        Returns a dict of `logits`, `Float[Array, "batch time vocab"]`, and the `hidden_states` they
        are computed from, `Float[Array, "batch time dim"]`.
        """
        segment_ids, positions = (
            input_batch.get("input_segment_ids"),
            input_batch.get("positions"),
        )
        if cross_attention_data is not None:  # not every layer takes it
            kwargs["cross_attention_data"] = cross_attention_data
            kwargs["cross_attention_logit_biases"] = (
                cross_attention_logit_biases
            )
        x = self.emb(_embedding_inputs(input_batch, positions))
        outputs = self.transformer(
            maybe_shard(x, self.config.hidden_state_partition_spec),
            self_attention_logit_biases=self.compute_attention_logit_biases(
                input_batch["input_ids"],
                segment_ids=segment_ids,
                positions=positions,
            ),
            target_segment_ids=segment_ids,
            target_positions=positions,
            **kwargs,
        )
        return self._outputs(outputs.data)

    def _outputs(self, x: Tensor) -> dict[str, Tensor]:
        self._add_tensor_stats("outputs", x)
        if "output_norm" in self.children:
            x = self._add_tensor_stats("norm_outputs", self.output_norm(x))
        x = maybe_shard(
            self.output_dropout(x), self.config.hidden_state_partition_spec
        )
        outputs = {"hidden_states": x}
        return {**outputs, "logits": self.compute_logits(outputs)}

    def compute_logits(self, forward_outputs: Mapping[str, Any]) -> Tensor:
        """Returns the logits of the next tokens, `Float[Array, "batch time vocab"]`.

        `forward_outputs` is a dict with `hidden_states`, as returned by `forward`.
        """
        cfg = self.config
        x: Tensor = forward_outputs["hidden_states"]
        if cfg.logits_forward_dtype is not None:
            x = x.astype(cfg.logits_forward_dtype)
        if "lm_head" in self.children:
            logits = self.lm_head(x)
        else:
            with context.child_context("emb_attend", module=self.emb):
                logits = self.emb.attend(x)
        logits = maybe_shard(logits, cfg.logits_partition_spec)
        if self._output_logits_modifier is not None:
            logits = self._output_logits_modifier(logits)
        return logits

    def linear_head(self) -> embedding.LinearHead | None:
        """Returns the parameters from which `compute_logits` computes; None if it does more.

        That is the case with an `output_logits_modifier`, and where a subclass, or an `lm_head` of
        another class or with a `compute_dtype` of its own, computes the logits. The weight
        is sharded by tokens, as the logits are.
        """
        if type(self).compute_logits is not Decoder.compute_logits:
            return None
        if self._output_logits_modifier is not None:
            return None
        layer = self.lm_head if "lm_head" in self.children else self.emb
        if not hasattr(layer, "linear_head"):
            return None
        if layer.compute_dtype() != self.compute_dtype():
            return None
        with context.child_context("linear_head", module=layer):
            head = layer.linear_head()
        if head is None:
            return None
        vocab_axes = self._logits_mesh_axes()[-1]
        weight = shard_weight(head.weight, (vocab_axes, None))
        return head._replace(weight=weight)

    def _logits_mesh_axes(self) -> PartitionSpec:
        """Returns the mesh axes of the logits' three axes."""
        spec = (*(self.config.logits_partition_spec or ()), None, None, None)
        return names_to_mesh_axes(spec[:3])

    def _logits_shards(self) -> list[int]:
        """Returns the number of devices over which each of the logits' axes is split."""
        mesh = get_global_mesh()
        if not mesh:
            return [1, 1, 1]
        shards: list[int] = []
        for entry in self._logits_mesh_axes():
            sizes = [mesh.shape.get(axis, 1) for axis in axes_of(entry)]
            shards.append(math.prod(sizes))
        return shards

    def target_statistics(
        self,
        hidden_states: Tensor,
        target_labels: Tensor,
        *,
        chunk_size: int | None = None,
    ) -> loss.LogitStatistics | None:
        """Computes statistics of the logits of `hidden_states` in chunks of the vocabulary.

        Args:
          hidden_states: `Float[Array, "batch time dim"]`, as returned by `forward`.
          target_labels: `Int[Array, "batch time"]`.
          chunk_size: number of tokens, per device, whose logits are in memory at once; by default
            chosen by size.

        Returns:
          None if all logits are to be computed at once: there are few, `chunk_size` is as large as
          the vocabulary, or `linear_head` is None.
        """
        cfg = self.config
        batch_shards, time_shards, vocab_shards = self._logits_shards()
        if cfg.vocab_size % vocab_shards:
            vocab_shards = 1  # as `maybe_shard` does
        chunks = num_chunks(
            target_labels.size // (batch_shards * time_shards),
            cfg.vocab_size,
            chunk_size=chunk_size,
            num_shards=vocab_shards,
        )
        if chunks <= 1:
            return None
        head = self.linear_head()
        if head is None:
            return None
        x = hidden_states
        if cfg.logits_forward_dtype is not None:
            x = x.astype(cfg.logits_forward_dtype)
        return linear_logit_statistics(
            x,
            head.weight,
            target_labels,
            logit_cap=head.logit_cap,
            chunk_size=-(-cfg.vocab_size // (vocab_shards * chunks)),
            num_shards=vocab_shards,
        )

    def compute_attention_logit_biases(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """Returns the bias of `attention_mask` for all layers; None if they mask by themselves.

        The bias is `Float[Array, "batch #heads time time"]`. Arguments are `Int[Array, "batch
        time"]`; by default all but padding is one segment, with positions from 0. If
        `pad_token_id` is `eos_token_id`, padding is what follows the first end after the last
        other token.
        """
        if "attention_mask" not in self.children:
            return None
        if segment_ids is None:
            segment_ids = self._is_token(input_ids).astype(jnp.int32)
        if positions is None:
            positions = jnp.arange(input_ids.shape[1])[None]
        positions = jnp.broadcast_to(positions, input_ids.shape)
        return self.attention_mask(segment_ids=segment_ids, positions=positions)

    def _is_token(self, input_ids: Tensor) -> Tensor:
        other = input_ids != self.config.pad_token_id
        if not self._pads_with_end():
            return other
        index = jnp.arange(input_ids.shape[1])[None]
        last = jnp.max(jnp.where(other, index, -1), axis=1, keepdims=True)
        return index <= last + 1

    @nowrap
    def _pads_with_end(self) -> bool:
        return self.config.pad_token_id in decoding.end_ids(
            self.config.eos_token_id
        )

    # Step by step.

    def init_states(
        self, *, batch_size: int, max_sequence_length: int, dtype: DType
    ) -> dict[str, Any]:
        """Returns the state before the first decoding step; see `BaseDecoder.init_states`."""
        states = {
            "time_step": jnp.zeros([batch_size], jnp.int32),
            "emb": self.emb.init_states(batch_size=batch_size, dtype=dtype),
            "transformer_state": self.transformer.init_states(
                batch_size=batch_size, max_len=max_sequence_length, dtype=dtype
            ),
        }
        if "attention_mask" in self.children:
            shape = (batch_size, max_sequence_length)
            states["input_ids"] = jnp.full(
                shape, self.config.pad_token_id, jnp.int32
            )
        return states

    def extend_step(
        self,
        *,
        cached_states: Mapping[str, Any],
        input_batch: Mapping[str, Any],
        is_prefill: bool = False,
        segment_ids: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Computes the logits after the next tokens; see `BaseDecoder.extend_step`.

        `input_batch` optionally has `token_type_ids`. Padding after a sequence's last token is not
        cached. The outputs are those of `forward`.
        """
        states: dict[str, Any] = dict(cached_states)
        ids, time_step = input_batch["input_ids"], states["time_step"]
        positions = time_step[:, None] + jnp.arange(ids.shape[1])[None]
        states["emb"], x = self.emb.extend_step(
            cached_states=states["emb"],
            input_batch=_embedding_inputs(input_batch, positions),
            is_prefill=is_prefill,
        )
        biases = None
        if "attention_mask" in self.children:
            rows = jnp.arange(ids.shape[0])[:, None]
            states["input_ids"] = (
                states["input_ids"].at[rows, positions].set(ids, mode="drop")
            )
            biases = self._biases_of_step(
                states["input_ids"], positions, is_prefill, segment_ids
            )
        states["transformer_state"], outputs = self.transformer.extend_step(
            states["transformer_state"],
            maybe_shard(x, self.config.hidden_state_partition_spec),
            is_prefill=is_prefill,
            self_attention_logit_biases=biases,
            target_segment_ids=segment_ids,
            **kwargs,
        )
        new = ids.shape[1]
        if segment_ids is not None:
            new = jnp.sum(segment_ids != 0, axis=1, dtype=jnp.int32)
        states["time_step"] = time_step + new
        return states, self._outputs(outputs.data)

    def _biases_of_step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        is_prefill: bool,
        segment_ids: Tensor | None,
    ) -> Tensor:
        """Returns the rows of the bias for a step's positions, `Int[Array, "batch step"]`.

        `is_prefill` omits positions after the step.
        """
        if is_prefill:
            input_ids = input_ids[:, : positions.shape[1]]
        last = positions[:, -1:]
        if segment_ids is not None:
            last = positions[:, :1] + jnp.sum(
                segment_ids != 0, axis=1, keepdims=True
            )
        is_token = jnp.arange(input_ids.shape[1])[None] <= last
        if not self._pads_with_end():
            is_token &= self._is_token(input_ids)
        biases: Any = self.compute_attention_logit_biases(
            input_ids, segment_ids=is_token.astype(jnp.int32)
        )
        return jnp.take_along_axis(
            biases, positions[:, None, :, None], axis=2, mode="clip"
        )

    def prefill_states(
        self,
        *,
        time_step: Tensor,
        input_batch: Mapping[str, Any],
        max_sequence_length: int | None = None,
        **kwargs: object,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the state after right-padded prompts; see `BaseDecoder.prefill_states`."""
        batch_size, length = input_batch["input_ids"].shape
        dtypes = {x.dtype for x in jax.tree.leaves(self.state)}
        floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
        with context.child_context("init_states", module=self):
            states = self.init_states(
                batch_size=batch_size,
                max_sequence_length=max_sequence_length or length,
                dtype=jnp.result_type(*floats) if floats else self.dtype(),
            )
        in_prompt = jnp.arange(length)[None] < time_step[:, None]
        return self.extend_step(
            cached_states=states,
            input_batch=input_batch,
            is_prefill=True,
            segment_ids=in_prompt.astype(jnp.int32),
            **kwargs,
        )

    # Sequences from prompts.

    def sample_decode(self, **kwargs: Any) -> decoding.SampleOutputs:
        """Samples continuations of prompts; see `DecodingLayer.sample_decode`."""
        return self._decoding.sample_decode(**kwargs)

    def beam_search_decode(self, **kwargs: Any) -> decoding.BeamSearchOutputs:
        """Searches for continuations of prompts; see `DecodingLayer.beam_search_decode`."""
        return self._decoding.beam_search_decode(**kwargs)


def _embedding_inputs(
    batch: Mapping[str, Any], positions: Tensor | None
) -> dict[str, Any]:
    types = batch.get("token_type_ids")
    return arrays.without_none(
        inputs=batch["input_ids"], positions=positions, token_type_ids=types
    )
