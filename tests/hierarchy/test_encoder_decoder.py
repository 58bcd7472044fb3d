"""A source is read in both directions, and its target is written from left to right."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional.sampling import top_k_logits
from weft.hierarchy import (
    CausalAttentionBias,
    EncoderDecoderModel,
    RelativePositionAttentionLogitBiasLayer,
    SourceEncoder,
    StackedTransformerLayer,
    TransformerAttentionLayer,
    TransformerLayer,
)
from weft.hierarchy.module import functional

DIM, VOCAB, END = 8, 12, 1
SOURCE = jnp.array([[5, 6, 7, 8, 9], [10, 11, 3, 0, 0]])
LABELS = jnp.array([[4, 5, 6, 1], [7, 8, 1, 0]])
INPUTS = jnp.array([[0, 4, 5, 6], [0, 7, 8, 1]])


def layer_config(*, has_cross_attention):
    layer = TransformerLayer.default_config()
    layer.self_attention.attention.num_heads = 2
    layer.feed_forward.hidden_dim = 16
    if has_cross_attention:
        cross = TransformerAttentionLayer.default_config().set(source_dim=DIM)
        cross.attention.num_heads = 2
        layer.cross_attention = cross
    return layer


def model_config(*, has_relative_positions=True):
    stack = StackedTransformerLayer.default_config().set(num_layers=1)
    encoder = SourceEncoder.default_config().set(
        transformer=stack.clone(layer=layer_config(has_cross_attention=False))
    )
    cfg: Any = EncoderDecoderModel.default_config().set(name="model", encoder=encoder)
    cfg.decoder.set(dim=DIM, vocab_size=VOCAB, eos_token_id=END)
    cfg.decoder.transformer = stack.clone(layer=layer_config(has_cross_attention=True))
    if has_relative_positions:
        biases = RelativePositionAttentionLogitBiasLayer.default_config().set(num_heads=2)
        biases.set(num_buckets=4, max_distance=5)
        encoder.attention_mask = biases
        cfg.decoder.attention_mask = biases.clone(is_causal=True)
    else:
        mask = CausalAttentionBias.default_config()
        layer: Any = cfg.decoder.transformer.layer
        layer.self_attention.attention.mask = mask
    return cfg


@functools.cache
def model_and_state(has_relative_positions=True):
    cfg = model_config(has_relative_positions=has_relative_positions)
    model = cfg.instantiate(parent=None)
    rng = np.random.default_rng(0)

    def drawn(path, spec):
        value = 0.5 * rng.normal(size=spec.shape) + (path[-1].key == "scale")
        return jnp.asarray(value, jnp.float32)

    # Larger than at the start of a training, so that predictions differ.
    specs = model.create_parameter_specs_recursively()
    return model, jax.tree.map_with_path(drawn, specs)


@functools.cache
def compiled(method, has_relative_positions, static):
    model, state = model_and_state(has_relative_positions)

    @jax.jit
    def call(input_batch):
        inputs = {"input_batch": input_batch, **dict(static)}
        return functional(
            model, jax.random.key(0), state, inputs, method=method, is_training=False
        )[0]

    return call


def run(method, has_relative_positions=True, *, input_batch, **static):
    return compiled(method, has_relative_positions, tuple(static.items()))(input_batch)


def logits(**batch):
    return np.asarray(run("extract_logits", input_batch=batch))


@pytest.mark.parametrize("has_relative_positions", [True, False])
def test_the_decoder_sees_the_whole_source_and_its_own_past(has_relative_positions):
    def logits(source, inputs):
        batch = {"source_ids": source, "input_ids": inputs}
        return np.asarray(run("extract_logits", has_relative_positions, input_batch=batch))

    expected = logits(SOURCE, INPUTS)
    changed = logits(SOURCE.at[0, 4].set(2), INPUTS)
    assert np.abs(changed[0] - expected[0]).max(axis=-1).min() > 1e-3
    np.testing.assert_allclose(changed[1], expected[1], atol=1e-6)
    changed = logits(SOURCE, INPUTS.at[0, 2].set(9))
    np.testing.assert_allclose(changed[0, :2], expected[0, :2], atol=1e-6)
    assert np.abs(changed[0, 2:] - expected[0, 2:]).max() > 1e-3
    # More padding changes nothing.
    padded = jnp.pad(SOURCE, ((0, 0), (0, 2)))
    np.testing.assert_allclose(logits(padded, INPUTS), expected, atol=1e-5)


def test_inputs_are_the_targets_after_the_start():
    expected = logits(source_ids=SOURCE, input_ids=INPUTS)
    batch = {"source_ids": SOURCE, "target_labels": LABELS}
    np.testing.assert_array_equal(logits(**batch), expected)
    # Targets are padded with the padding of the model, or with negative numbers.
    loss, aux = run("forward", input_batch=batch, return_aux=True)
    np.testing.assert_array_equal(aux["metrics"]["live_targets"], LABELS != 0)
    negative = {**batch, "target_labels": jnp.where(LABELS == 0, -100, LABELS)}
    np.testing.assert_allclose(run("forward", input_batch=negative)[0], loss, rtol=1e-6)
    log_probs = jax.nn.log_softmax(expected)
    nll = -np.take_along_axis(np.asarray(log_probs), np.asarray(LABELS)[..., None], axis=-1)
    np.testing.assert_allclose(loss, nll[..., 0][np.asarray(LABELS) != 0].mean(), rtol=1e-5)


def test_packed_pairs_are_the_same_as_separate_ones():
    expected = logits(source_ids=SOURCE, input_ids=INPUTS)
    packed = logits(
        source_ids=jnp.concatenate([SOURCE[0], SOURCE[1, :3]])[None],
        source_segment_ids=jnp.array([[1, 1, 1, 1, 1, 2, 2, 2]]),
        input_ids=INPUTS.reshape(1, -1),
        input_segment_ids=jnp.array([[1, 1, 1, 1, 2, 2, 2, 2]]),
        input_positions=jnp.array([[0, 1, 2, 3, 0, 1, 2, 3]]),
    )
    np.testing.assert_allclose(packed.reshape(2, 4, -1), expected, atol=1e-5)


def greedy(source, length):
    ids = np.zeros((len(source), length + 1), int)
    for i in range(length):
        ids[:, i + 1] = logits(source_ids=source, input_ids=ids)[:, i].argmax(-1)
    return ids[:, 1:]


def test_decoding_gives_the_tokens_of_whole_sequences():
    batch = {"source_ids": SOURCE}
    modifier = top_k_logits(1, break_ties="smallest_index")
    sampled = run(
        "sample_decode", input_batch=batch, max_sequence_length=4, logits_modifier=modifier
    ).sequences[:, 0]
    searched = run("beam_search_decode", input_batch=batch, max_sequence_length=4, num_decodes=1)
    assert searched.sequences.min() >= 0 and searched.live_sequences.min() >= 0
    for sequence, expected in zip(np.asarray(sampled), greedy(SOURCE, 4), strict=True):
        is_before_end = np.cumsum(expected == END) == 0
        np.testing.assert_array_equal(sequence[is_before_end], expected[is_before_end])
        assert not sequence[~is_before_end][1:].any()  # padding after the end
    # A target that begins with given tokens.
    prefix = jnp.concatenate([jnp.zeros((2, 1), jnp.int32), sampled[:, :2]], axis=1)
    again = run(
        "sample_decode",
        input_batch={**batch, "prefix": prefix},
        max_sequence_length=4,
        logits_modifier=modifier,
    )
    np.testing.assert_array_equal(again.sequences[:, 0], sampled)


@pytest.mark.parametrize(
    ("method", "inputs", "message"),
    [
        ("predict", {"input_batch": {"input_ids": INPUTS}}, "the batch has no 'source_ids'. There"),
        ("sample_decode", {"input_batch": {"source_ids": SOURCE}}, "needs max_sequence_length"),
    ],
)
def test_missing_arguments(method, inputs, message):
    with pytest.raises(ArgumentValueError, match=message):
        run(method, **inputs)
