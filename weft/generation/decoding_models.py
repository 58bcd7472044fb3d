"""Models that compute the logits of one next token per sequence, with or without a cache.

The generator knows a model by four functions of its parameters:

    prompt ── prefill ── state of one sequence ── insert ─┐
                                                          ├── step ── state, logits
    last tokens, state of all sequences ──────────────────┘

A language model of the hierarchy keeps keys and values in a cache. For this, its layers are
unstacked, since a loop over stacked layers copies the weights of a layer in each step. Any other
model computes all logits of the sequences so far again.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from weft import errors, hierarchy, struct
from weft.config import ConfigBase
from weft.hierarchy import (
    Module,
    RepeatedTransformerLayer,
    StackedTransformerLayer,
    functional,
    merge_adapters,
    without_lora,
)
from weft.hierarchy.attention.kv_cache import (
    BaseKVCache,
    KVRing,
    RingKVCache,
)
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.config_setters import for_each_config
from weft.hierarchy.encoder_decoder import EncoderDecoderModel
from weft.hierarchy.int8_weights import with_int8_weights
from weft.hierarchy.layers.embedding import LearnedPositionalEmbedding
from weft.hierarchy.mixture_of_experts.feed_forward import (
    TransformerFeedForwardMoE,
)
from weft.trainer.model import LibraryModel
from weft.typing import NestedTensor, Tensor

DecodingWeights = Literal["int8"]
"""Name of a format of the weights that texts are generated with."""


class DecodingModel(Protocol):
    """Interface of a model to the generator. All methods but `prepare` can be compiled."""

    max_length: int | None
    """The largest number of tokens of a sequence; None where the model has no such bound."""
    vocab_size: int | None
    """Number of tokens; None if only the logits tell."""

    def prepare(self, params: NestedTensor) -> NestedTensor:
        """Returns the parameters as the other methods take them, from those of the model."""
        ...

    def init_states(
        self, params: NestedTensor, *, batch_size: int, max_length: int
    ) -> NestedTensor:
        """Returns the state of sequences without tokens, with room for `max_length` each."""
        ...

    def prefill(
        self, params: NestedTensor, tokens: Tensor, length: Tensor
    ) -> tuple[NestedTensor, Tensor]:
        """Returns the state after a prompt, and the logits `(vocab,)` of the next token.

        Args:
            tokens: `(max_length,)`: the prompt, padded at its end.
            length: number of tokens of the prompt, a scalar.
        """
        ...

    def insert(
        self,
        states: NestedTensor,
        prompt_state: NestedTensor,
        row: Tensor,
        length: Tensor,
    ) -> NestedTensor:
        """Returns the state of all sequences with that of a prompt in the place of one."""
        ...

    def step(
        self, params: NestedTensor, states: NestedTensor, tokens: Tensor
    ) -> tuple[NestedTensor, Tensor]:
        """Adds a token to each sequence; returns the logits `(batch, vocab)` of the next ones."""
        ...


def can_generate(model: object) -> bool:
    """Returns whether `decoding_model` knows how to decode with a model."""
    if isinstance(model, LibraryModel):
        return model.predicts
    if isinstance(model, hierarchy.BaseEncoderModel):
        return False  # its `predict` tells no next token
    if isinstance(model, EncoderDecoderModel):
        return False  # it does not continue its source
    return isinstance(model, Model) or (
        isinstance(model, Module) and hasattr(type(model), "predict")
    )


def decoding_model(
    model: Module, weights: DecodingWeights | None = None
) -> DecodingModel:
    """Returns the interface of a model to the generator.

    Args:
        model: a language model of the hierarchy, or a layer with a method `predict(input_batch)`
            that returns the `logits` for `input_ids`, such as a `LibraryModel` of a module that
            has one.
        weights: the format of the weights; None for that of the model.

    Raises GenerationError for any other model, and for one that has no such weights.
    """
    if weights not in (None, "int8"):
        raise errors.GenerationError(
            f"weights={weights!r}; expected 'int8', or None for those of the model."
        )
    if isinstance(model, EncoderDecoderModel):
        raise errors.GenerationError(
            "an EncoderDecoderModel, such as T5, writes a target for a source and continues no "
            "text. Call its method sample_decode or beam_search_decode, with source_ids, by "
            "weft.hierarchy.module.functional."
        )
    if not can_generate(model):
        raise errors.GenerationError(
            f"{type(model).__name__} generates no text. Use a language model: one of the "
            "hierarchy, or one with a method `predict(input_batch)` that returns the `logits` for "
            "`input_ids`."
        )
    if isinstance(model, Model):
        return _CachedModel(model, weights)
    if weights is not None:
        raise errors.GenerationError(
            f"weights={weights!r} is for language models of the hierarchy, whose layers compute "
            f"with such weights, and not for a {type(model).__name__}; leave it out."
        )
    return _RecomputedModel(model)


# With a cache.


class _CachedModel:
    """Causal language model of the hierarchy, with caches of fixed size."""

    def __init__(self, model: Model, weights: DecodingWeights | None):
        self._model_with_adapters = model
        self._weights = weights
        cfg: Any = without_lora(model.config)
        for_each_config(cfg, _use_ring_cache)
        self._is_stacked = isinstance(
            cfg.decoder.transformer, RepeatedTransformerLayer.Config
        )
        if self._is_stacked:
            cfg.decoder.transformer = _unstacked_config(cfg.decoder.transformer)
        self._decoder = cfg.set(name="model").instantiate(parent=None).decoder
        self.max_length = _max_length(cfg)
        self.vocab_size = cfg.decoder.vocab_size
        if weights == "int8":
            _check_has_no_experts(self._decoder)

    def prepare(self, params: NestedTensor) -> NestedTensor:
        merged: Any = merge_adapters(self._model_with_adapters, dict(params))
        decoder_params = dict(merged["decoder"])
        if self._is_stacked:
            decoder_params["transformer"] = _unstacked_params(
                decoder_params["transformer"]
            )
        if self._weights == "int8":
            return with_int8_weights(self._decoder, decoder_params)
        return decoder_params

    def init_states(
        self, params: NestedTensor, *, batch_size: int, max_length: int
    ) -> NestedTensor:
        dtypes = {x.dtype for x in jax.tree.leaves(params)}
        floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
        inputs = {
            "batch_size": batch_size,
            "max_sequence_length": max_length,
            "dtype": jnp.result_type(*floats),
        }
        return self._call("init_states", params, inputs)

    def prefill(
        self, params: NestedTensor, tokens: Tensor, length: Tensor
    ) -> tuple[NestedTensor, Tensor]:
        is_token = jnp.arange(len(tokens)) < length
        inputs = {
            "cached_states": self.init_states(
                params, batch_size=1, max_length=len(tokens)
            ),
            "input_batch": {"input_ids": tokens[None]},
            "segment_ids": is_token.astype(jnp.int32)[None],
            "is_prefill": True,
        }
        state, outputs = self._call("extend_step", params, inputs)
        # The logits of all positions are not used, so that they are not computed.
        last = jax.lax.dynamic_slice_in_dim(
            outputs["hidden_states"], length - 1, 1, axis=1
        )
        logits = self._call("compute_logits", params, [{"hidden_states": last}])
        return state, logits[0, 0]

    def insert(
        self,
        states: NestedTensor,
        prompt_state: NestedTensor,
        row: Tensor,
        length: Tensor,
    ) -> NestedTensor:
        def insert(x: Any, new: Any) -> Any:
            if isinstance(x, KVRing):
                return x.insert(new, row, length)
            return _insert_row(x, new, row)

        return struct.map_blocks(
            insert,
            states,
            prompt_state,
            is_leaf=lambda x: isinstance(x, KVRing),
        )

    def step(
        self, params: NestedTensor, states: NestedTensor, tokens: Tensor
    ) -> tuple[NestedTensor, Tensor]:
        inputs = {
            "cached_states": states,
            "input_batch": {"input_ids": tokens[:, None]},
        }
        states, outputs = self._call("extend_step", params, inputs)
        return states, outputs["logits"][:, 0]

    def _call(self, method: str, params: NestedTensor, inputs: Any) -> Any:
        outputs, _ = functional(
            self._decoder,
            None,
            params,
            inputs,
            method=method,
            is_training=False,
        )
        return outputs


def _use_ring_cache(cfg: ConfigBase) -> None:
    # Not `getattr` with a default: a config looks for similar names of fields that it lacks.
    if "kv_cache" not in cfg:
        return
    cache: Any = cfg.kv_cache  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(cache, BaseKVCache.Config):
        cfg.kv_cache = RingKVCache.default_config().set(  # pyright: ignore[reportAttributeAccessIssue]
            cache_dtype=cache.cache_dtype,
            kv_partition_spec=cache.kv_partition_spec,
        )


def _check_has_no_experts(layer: Module) -> None:
    if isinstance(layer, TransformerFeedForwardMoE):
        raise errors.GenerationError(
            "weights='int8' is for weights of linear maps and embeddings, and most weights of "
            f"this model are those of experts, such as {layer.path()}; leave it out."
        )
    for child in layer.children.values():
        _check_has_no_experts(child)


def _unstacked_config(
    repeated: RepeatedTransformerLayer.Config,
) -> StackedTransformerLayer.Config:
    """Returns the config of a stack with a child per layer that computes the same."""
    stack = StackedTransformerLayer.default_config()
    shared_fields = hierarchy.BaseStackedTransformerLayer.default_config()
    for name, _ in shared_fields.items():
        if name != "klass":
            setattr(stack, name, getattr(repeated, name))
    return stack


def _unstacked_params(params: Any) -> NestedTensor:
    stacked = params["repeat"]["layer"]
    num_layers = len(jax.tree.leaves(stacked)[0])
    layers: dict[str, NestedTensor] = {}
    for i in range(num_layers):
        layers[f"layer{i}"] = jax.tree.map(
            lambda x, i=i: x[i], _as_dict(stacked)
        )
    return layers


def _as_dict(tree: Any) -> Any:
    """Returns nested dicts of the same values, which are not marked as those of a stack."""
    if not isinstance(tree, dict):
        return tree
    return {name: _as_dict(value) for name, value in tree.items()}


def _max_length(cfg: ConfigBase) -> int | None:
    """Returns the number of positions that a model has learned an embedding of."""
    lengths: list[int] = []

    def add(part: ConfigBase) -> None:
        if isinstance(part, LearnedPositionalEmbedding.Config):
            shape: Any = part.shape
            lengths.append(shape[0])

    for_each_config(cfg, add)
    return min(lengths, default=None)


def _insert_row(x: Tensor, new: Tensor, row: Tensor) -> Tensor:
    """Writes the only row of an array, which may have less room for positions, to a row of `x`."""
    if x.ndim == 0:
        return x
    padding = [(0, 0)]
    for size, new_size in zip(x.shape[1:], new.shape[1:], strict=True):
        padding.append((0, size - new_size))
    padded = jnp.pad(new, padding).astype(x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(x, padded, row, axis=0)


# Without a cache.


class _RecomputedModel:
    """Model with a method `predict`, which computes all logits of the sequences in each step."""

    max_length: int | None = None
    vocab_size: int | None = None

    def __init__(self, model: Module):
        self._model = model

    def prepare(self, params: NestedTensor) -> NestedTensor:
        return params

    def init_states(
        self, params: NestedTensor, *, batch_size: int, max_length: int
    ) -> NestedTensor:
        del params
        return {
            "tokens": jnp.zeros((batch_size, max_length), jnp.int32),
            "lengths": jnp.zeros(batch_size, jnp.int32),
        }

    def prefill(
        self, params: NestedTensor, tokens: Tensor, length: Tensor
    ) -> tuple[NestedTensor, Tensor]:
        state = {"tokens": tokens[None], "lengths": length[None]}
        return state, self._logits(params, state)[0]

    def insert(
        self,
        states: NestedTensor,
        prompt_state: NestedTensor,
        row: Tensor,
        length: Tensor,
    ) -> NestedTensor:
        del length
        return jax.tree.map(
            lambda x, new: _insert_row(x, new, row), states, prompt_state
        )

    def step(
        self, params: NestedTensor, states: Any, tokens: Tensor
    ) -> tuple[NestedTensor, Tensor]:
        rows = jnp.arange(len(tokens))
        index = (rows, states["lengths"])
        states = {
            "tokens": states["tokens"].at[index].set(tokens, mode="drop"),
            "lengths": states["lengths"] + 1,
        }
        return states, self._logits(params, states)

    def _logits(self, params: NestedTensor, states: Any) -> Tensor:
        inputs = {"input_batch": {"input_ids": states["tokens"]}}
        outputs, _ = functional(
            self._model,
            None,
            params,
            inputs,
            method="predict",
            is_training=False,
        )
        rows = jnp.arange(len(states["tokens"]))
        return outputs["logits"][rows, states["lengths"] - 1]
