"""

Decoding with a decoder that is written by hand, without a transformer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function, maybe_set_config
from weft.errors import MissingPrngKeyError
from weft.functional.sampling import chain, scale_by, top_k_logits, top_p_logits
from weft.hierarchy.attention.bias import (
    ALiBiAttentionLogitBiasLayer,
    CausalAttentionBias,
    CausalAttentionLogitBiasLayer,
)
from weft.hierarchy.attention.kv_cache import KVCache, PagedKVCache, SlidingWindowKVCache
from weft.hierarchy.attention.rope import RoFormerQKVLinear
from weft.hierarchy.attention.stack import RepeatedTransformerLayer, StackedTransformerLayer
from weft.hierarchy.attention.transformer import TransformerAttentionLayer, TransformerLayer
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.decoder import Decoder, DecodingLayer, LmHead, log_probs_from_logits
from weft.hierarchy.decoding import StopOnMaxLength
from weft.hierarchy.layers import Dropout
from weft.hierarchy.layers.embedding import LearnedPositionalEmbedding
from weft.hierarchy.module import functional

DIM, HEADS, VOCAB, LENGTH = 8, 2, 11, 6
IDS = jnp.array([[2, 3, 4, 5, 6, 7], [8, 9, 10, 2, 5, 3]])


def decoder_config(stack=StackedTransformerLayer, variant="learned", num_layers=1):
    layer = TransformerLayer.default_config()
    attention = layer.self_attention.attention.set(num_heads=HEADS)
    layer.feed_forward.hidden_dim = 16
    cfg = Decoder.default_config().set(name="decoder", dim=DIM, vocab_size=VOCAB)
    if variant in ("learned", "rope"):
        attention.mask = CausalAttentionBias.default_config()
    if variant == "rope":
        attention.input_linear = RoFormerQKVLinear.default_config().set(rotary_value=False)
    elif variant in ("learned", "mask_layer"):
        cfg.emb.pos_emb = LearnedPositionalEmbedding.default_config().set(shape=(LENGTH,))
    if variant == "mask_layer":
        cfg.attention_mask = CausalAttentionLogitBiasLayer.default_config()
    elif variant == "alibi":
        cfg.attention_mask = ALiBiAttentionLogitBiasLayer.default_config().set(num_heads=HEADS)
    cfg.transformer = stack.default_config().set(num_layers=num_layers, layer=layer)
    return cfg


def make(cfg, seed=0):
    """Returns a decoder and a state, which takes less time to draw by NumPy."""
    decoder, rng = cfg.instantiate(parent=None), np.random.default_rng(seed)

    def drawn(path, spec):
        value = 0.3 * rng.normal(size=spec.shape) + (path[-1].key == "scale")
        return jnp.asarray(value, jnp.float32)

    specs = decoder.create_parameter_specs_recursively()
    return decoder, jax.tree_util.tree_map_with_path(drawn, specs)


def call(decoder, state, *, method="forward", prng_key=None, static=None, **inputs):
    """Returns a method's result; `inputs` are its arrays, `static` its other arguments."""

    @jax.jit
    def run(state, inputs):
        inputs = {**inputs, **(static or {})}
        return functional(
            decoder, prng_key, state=state, inputs=inputs, method=method, is_training=False
        )[0]

    return run(state, inputs)


def compiled(decoder, state, method="forward"):
    """Returns a method of a decoder that is compiled once, of its array arguments by name."""

    def run(state, inputs):
        return functional(decoder, None, state, inputs, method=method, is_training=False)[0]

    run = jax.jit(run)
    return lambda **inputs: run(state, inputs)


STACKS = [StackedTransformerLayer, RepeatedTransformerLayer]


def test_logits_are_inner_products_with_the_embeddings():
    decoder, state = make(decoder_config())
    outputs = call(decoder, state, input_batch={"input_ids": IDS})
    table = np.asarray(state["emb"]["token_emb"]["weight"])
    assert outputs["logits"].shape == (2, LENGTH, VOCAB)
    np.testing.assert_allclose(
        outputs["logits"], np.asarray(outputs["hidden_states"]) @ table.T, rtol=1e-4, atol=1e-5
    )
    again = call(decoder, state, method="compute_logits", forward_outputs=outputs)
    np.testing.assert_allclose(again, outputs["logits"], rtol=1e-6)


def test_lm_head_has_its_own_weight():
    decoder, state = make(decoder_config().set(lm_head=LmHead.default_config()))
    assert state["lm_head"]["weight"].shape == (VOCAB, DIM)
    outputs = call(decoder, state, input_batch={"input_ids": IDS})
    np.testing.assert_allclose(
        outputs["logits"],
        np.asarray(outputs["hidden_states"]) @ np.asarray(state["lm_head"]["weight"]).T,
        rtol=1e-4,
        atol=1e-5,
    )


def test_logits_modifier_and_forward_dtype():
    decoder, state = make(decoder_config())
    plain = call(decoder, state, input_batch={"input_ids": IDS})["logits"]
    cfg = decoder_config().set(
        output_logits_modifier=lambda logits: logits + 1, logits_forward_dtype=jnp.bfloat16
    )
    decoder, _ = make(cfg)
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    changed = call(decoder, state, input_batch={"input_ids": IDS})["logits"]
    assert changed.dtype == jnp.bfloat16
    np.testing.assert_allclose(changed.astype(jnp.float32), plain + 1, atol=0.1)


@pytest.mark.parametrize("variant", ["learned", "mask_layer"])
def test_packed_sequences_are_independent(variant):
    decoder, state = make(decoder_config(variant=variant))
    packed = {
        "input_ids": IDS[:1],
        "input_segment_ids": jnp.array([[1, 1, 2, 2, 2, 0]]),
        "positions": jnp.array([[0, 1, 0, 1, 2, 0]]),
    }
    logits = call(decoder, state, input_batch=packed)["logits"][0]
    for span in (slice(0, 2), slice(2, 5)):
        alone = call(decoder, state, input_batch={"input_ids": IDS[:1, span]})["logits"][0]
        np.testing.assert_allclose(logits[span], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "stack, variant, kv_cache",
    [
        (StackedTransformerLayer, "learned", KVCache),
        (RepeatedTransformerLayer, "mask_layer", KVCache),
        (StackedTransformerLayer, "alibi", SlidingWindowKVCache),
    ],
)
def test_cached_decoding_equals_the_full_forward(stack, variant, kv_cache):
    cfg = decoder_config(stack, variant, num_layers=1 if stack is STACKS[0] else 2)
    kv_cache = maybe_set_config(kv_cache.default_config(), cached_kv_length=LENGTH)
    cfg.transformer.layer.self_attention.attention.kv_cache = kv_cache
    decoder, state = make(cfg)
    expected = compiled(decoder, state)(input_batch={"input_ids": IDS})
    time_step = jnp.array([3, 1])
    states, outputs = compiled(decoder, state, "prefill_states")(
        time_step=time_step, input_batch={"input_ids": IDS}
    )
    for row, end in enumerate(time_step):
        np.testing.assert_allclose(
            outputs["logits"][row, :end], expected["logits"][row, :end], rtol=1e-4, atol=1e-5
        )
    extend = compiled(decoder, state, "extend_step")
    for i in range(3):
        at = time_step + i
        ids = jnp.take_along_axis(IDS, at[:, None], axis=1)
        states, outputs = extend(cached_states=states, input_batch={"input_ids": ids})
        assert outputs["logits"].shape == (2, 1, VOCAB)
        np.testing.assert_allclose(
            outputs["logits"][:, 0], expected["logits"][jnp.arange(2), at], rtol=1e-4, atol=1e-5
        )
    np.testing.assert_array_equal(states["time_step"], time_step + 3)


def test_hypotheses_have_pages_of_their_own():
    cfg, found = decoder_config(RepeatedTransformerLayer, "rope", num_layers=2), []
    for kv_cache in (KVCache.default_config(), PagedKVCache.default_config().set(page_size=4)):
        cfg.transformer.layer.self_attention.attention.kv_cache = kv_cache
        decoder, state = make(cfg)
        found.append(
            call(
                decoder,
                state,
                method="beam_search_decode",
                input_batch={"prefix": jnp.array([[2, 3, 0], [4, 5, 6]])},
                static={"max_sequence_length": LENGTH, "num_decodes": 3},
            )
        )
    np.testing.assert_array_equal(found[0].live_sequences, found[1].live_sequences)
    np.testing.assert_allclose(found[0].live_scores, found[1].live_scores, rtol=1e-4)
    assert len({tuple(np.asarray(x)) for x in found[0].live_sequences[0]}) == 3


def test_cache_has_the_dtype_of_the_parameters():
    decoder, state = make(decoder_config())
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    states, _ = jax.eval_shape(
        lambda: call(
            decoder,
            state,
            method="prefill_states",
            time_step=jnp.array([2, 2]),
            input_batch={"input_ids": IDS},
        )
    )
    dtypes = {x.dtype for x in jax.tree.leaves(states)}
    assert dtypes == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)}


def test_dropout_rate_is_the_default():
    cfg = decoder_config().set(dropout_rate=0.3)
    cfg.output_dropout = Dropout.default_config().set(rate=0.1)
    decoder = cfg.instantiate(parent=None)
    layer = decoder.transformer.layer0
    assert decoder.output_dropout.config.rate == 0.1
    assert decoder.emb.dropout.config.rate == 0.3
    assert layer.self_attention.attention.dropout.config.rate == 0.3
    assert layer.feed_forward.dropout1.config.rate == 0.3


def cross_attending(stack=StackedTransformerLayer):
    cfg = decoder_config(stack)
    cross = TransformerAttentionLayer.default_config().set(source_dim=3)
    cross.attention.num_heads = HEADS
    cfg.transformer.layer.cross_attention = cross
    return make(cfg)


@pytest.mark.parametrize("stack", STACKS)
def test_every_hypothesis_attends_to_the_source_of_its_prompt(stack):
    decoder, state = cross_attending(stack)
    source = jax.random.normal(jax.random.key(1), (2, 4, 3))
    biases = jnp.zeros((2, 1, 1, 4)).at[1, :, :, 2:].set(-1e9)
    cross = {"cross_attention_data": source, "cross_attention_logit_biases": biases}

    found = call(
        decoder,
        state,
        method="beam_search_decode",
        input_batch={"prefix": IDS[:, :2]},
        static={"max_sequence_length": 4, "num_decodes": 2},
        **cross,
    )
    sequences = jnp.concatenate(
        [jnp.broadcast_to(IDS[:, None, :1], (2, 2, 1)), found.live_sequences], axis=2
    )
    forward = compiled(decoder, state)
    for beam in range(2):
        logits = forward(input_batch={"input_ids": sequences[:, beam]}, **cross)["logits"]
        log_probs = np.asarray(logits) - np.log(np.exp(logits).sum(-1, keepdims=True))
        decoded = np.asarray(sequences)[:, beam, 2:, None]
        scores = np.take_along_axis(log_probs[:, 1:-1], decoded, axis=2).sum((1, 2))
        np.testing.assert_allclose(found.live_scores[:, beam], scores, rtol=1e-3, atol=1e-4)


def test_decoding_class_is_configurable():
    class Loud(DecodingLayer):
        def sample_decode(self, **kwargs):
            return kwargs["input_batch"]["prefix"]

    decoder, state = make(decoder_config().set(decoding=Loud.default_config()))
    static = {"max_sequence_length": 4, "num_decodes": 1}
    batch = {"prefix": jnp.array(3)}
    assert call(decoder, state, method="sample_decode", static=static, input_batch=batch) == 3


ADDER_VOCAB = 6


class Adder(BaseLayer):
    """Model whose likeliest next token is the sum of the previous ones and the source, modulo the
    vocabulary.

    Each step reports a summary, which nobody can collect out of a loop.
    """

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        cfg = DecodingLayer.default_config().set(pad_token_id=0, eos_token_id=5)
        self._decoding = cfg.instantiate(decoder=self)

    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((ADDER_VOCAB, ADDER_VOCAB))}

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
        logits = (
            10 * jax.nn.one_hot(target % ADDER_VOCAB, ADDER_VOCAB) + self.parameters["weight"][:1]
        )
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
    state = {"weight": jnp.zeros((ADDER_VOCAB, ADDER_VOCAB))}
    arrays = {k: inputs.pop(k) for k in ("input_batch", "cross_attention_data") if k in inputs}

    @jax.jit
    def decoded(prng_key, state, arrays):
        of_method = {"inputs": {**inputs, **arrays}, "method": method}
        return functional(decoder, prng_key, state, **of_method, is_training=False)[0]

    return decoded(prng_key, state, arrays)


PREFIXES = [[1, 0, 0, 0], [1, 2, 0, 0]]


def test_end_token_ends_a_sequence():
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


def test_scores_use_modified_distribution():
    found = decode(
        "sample_decode",
        PREFIXES,
        prng_key=jax.random.key(0),
        logits_modifier=lambda logits: jnp.zeros_like(logits),
        stop_decoding_condition=StopOnMaxLength(9),
    )
    np.testing.assert_allclose(found.token_scores[0], -np.log(ADDER_VOCAB), rtol=1e-5)
    np.testing.assert_allclose(found.token_scores[1, :, 0], 0)


def test_sampling_needs_a_key():
    with pytest.raises(MissingPrngKeyError, match=r"sample_decode draws.*pass prng_key="):
        decode("sample_decode", PREFIXES)


LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]]))


@pytest.mark.parametrize(
    "modifier, expected",
    [
        (None, [0.1, 0.4, 0.3, 0.2]),
        (scale_by(0.5), [0.01 / 0.3, 0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3]),
        (top_k_logits(2), [0, 4 / 7, 3 / 7, 0]),
        (top_p_logits(0.6), [0, 4 / 7, 3 / 7, 0]),
        (chain(scale_by(0.5), top_k_logits(2)), [0, 16 / 25, 9 / 25, 0]),
        (config_for_function(top_k_logits).set(k=1), [0, 1, 0, 0]),
    ],
)
def test_modifiers_and_their_configs_change_the_distribution(modifier, expected):
    probs = jnp.exp(jax.jit(lambda x: log_probs_from_logits(x, modifier))(LOGITS))
    assert probs[0].tolist() == pytest.approx(expected, abs=1e-6)
