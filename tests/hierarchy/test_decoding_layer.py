"""Decoding with a decoder that is written by hand, without a transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import MissingPrngKeyError
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.decoding import StopOnMaxLength, StopOnSubsequence
from weft.hierarchy.decoding_layer import DecodingLayer
from weft.hierarchy.logit_modifiers import top_k_logits
from weft.hierarchy.module import functional

VOCAB = 6


class Adder(BaseLayer):
    """The likeliest next token is the sum of all so far and of the source, modulo the vocabulary.

    Each step reports a summary, which nobody can collect out of a loop.
    """

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        cfg = DecodingLayer.default_config().set(pad_token_id=0, eos_token_id=5)
        self._decoding = cfg.instantiate(decoder=self)

    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((VOCAB, VOCAB))}

    def init_states(self, *, batch_size, max_sequence_length, dtype):
        return {"total": jnp.zeros([batch_size], jnp.int32)}

    def prefill_states(self, *, time_step, input_batch, max_sequence_length, **kwargs):
        ids = input_batch["input_ids"]
        read = jnp.arange(ids.shape[1])[None] < time_step[:, None]
        return {"total": jnp.sum(jnp.where(read, ids, 0), axis=1)}, {}

    def extend_step(self, *, cached_states, input_batch, cross_attention_data=None):
        total = cached_states["total"] + input_batch["input_ids"][:, 0]
        self.add_summary("total", total)
        target = total if cross_attention_data is None else total + cross_attention_data[:, 0]
        logits = 10 * jax.nn.one_hot(target % VOCAB, VOCAB) + self.parameters["weight"][:1]
        return {"total": total}, {"logits": logits[:, None]}

    def sample_decode(self, **kwargs):
        return self._decoding.sample_decode(**kwargs)

    def beam_search_decode(self, **kwargs):
        return self._decoding.beam_search_decode(**kwargs)


def decode(method, prefix, *, prng_key=None, **kwargs):
    decoder = Adder.default_config().set(name="decoder").instantiate(parent=None)
    inputs = {
        "input_batch": {"prefix": jnp.array(prefix)},
        "max_sequence_length": len(prefix[0]),
        "num_decodes": 2,
        **kwargs,
    }
    state = {"weight": jnp.zeros((VOCAB, VOCAB))}
    return functional(decoder, prng_key, state, inputs, method=method, is_training=False)[0]


PREFIXES = [[1, 0, 0, 0], [1, 2, 0, 0]]
# 1, 1, 2, 4, 8 % 6 and so on; the source of the second prompt is 2: 1, 2, 3 + 2.
EXPECTED = [[1, 2, 4, 2], [2, 3, 0, 0]]


def test_likeliest_tokens_follow_prompts_of_different_lengths():
    found = decode(
        "sample_decode",
        PREFIXES,
        prng_key=jax.random.key(0),
        logits_modifier=top_k_logits(1),
        stop_decoding_condition=StopOnSubsequence(0),
    )
    np.testing.assert_array_equal(found.sequences, np.repeat(np.array(EXPECTED)[:, None], 2, 1))


def test_the_end_token_ends_a_sequence():
    found = decode(
        "sample_decode",
        [[2, 3, 0, 0]],
        prng_key=jax.random.key(0),
        logits_modifier=top_k_logits(1),
    )
    assert found.sequences.tolist() == [[[3, 5, 0, 0]] * 2]
    found = decode("beam_search_decode", [[2, 3, 0, 0]])
    assert found.sequences[0, 0].tolist() == [3, 5, 0, 0]


def test_each_hypothesis_has_the_source_of_its_prompt():
    found = decode(
        "sample_decode",
        PREFIXES,
        prng_key=jax.random.key(0),
        logits_modifier=top_k_logits(1),
        stop_decoding_condition=StopOnMaxLength(2),
        cross_attention_data=jnp.array([[0], [2]]),
    )
    assert found.sequences.tolist() == [[[1, 2, 0, 0]] * 2, [[2, 5, 4, 0]] * 2]


def test_scores_are_of_the_modified_distribution():
    found = decode(
        "sample_decode",
        PREFIXES,
        prng_key=jax.random.key(0),
        logits_modifier=lambda logits: jnp.zeros_like(logits),
        stop_decoding_condition=StopOnMaxLength(9),
    )
    np.testing.assert_allclose(found.token_scores[0], -np.log(VOCAB), rtol=1e-5)
    np.testing.assert_allclose(found.token_scores[1, :, 0], 0)


def test_sampling_wants_a_key():
    with pytest.raises(MissingPrngKeyError, match=r"sample_decode draws.*pass prng_key="):
        decode("sample_decode", PREFIXES)
