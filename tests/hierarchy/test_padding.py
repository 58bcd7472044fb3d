"""Models whose padding token is also the end of a text, as in many published checkpoints."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hierarchy.test_causal_lm import build, call, decoder_config, loss_and_aux
from weft.errors import PaddingWarning
from weft.functional.sampling import scale_by
from weft.hierarchy.attention.bias import CausalAttentionLogitBiasLayer
from weft.hierarchy.decoding import StopOnMaxLength
from weft.input.packing import PackedSequences, token_stream

END = 1
LENGTH = 6
DOCUMENTS = [[5, 6, 7], [8], [3, 9]]


def batch(pad_id):
    stream = token_stream([np.array(d) for d in DOCUMENTS], eos_id=END)
    source = PackedSequences(stream, sequence_length=LENGTH, eos_id=END, pad_id=pad_id)
    return jax.tree.map(jnp.asarray, source.take(np.arange(len(source))))


@pytest.fixture(scope="module")
def model():
    return build(decoder_config().set(pad_token_id=END, eos_token_id=END))


def test_loss_of_the_ends_of_texts(model):
    (loss, aux), _ = loss_and_aux(*model, batch(END))
    with_other, _ = loss_and_aux(*model, batch(0))
    assert float(loss) == pytest.approx(float(with_other[0]), rel=1e-6)
    # By hand: every token but the first, ends included, is a target.
    logits = np.asarray(aux["logits"], np.float64).reshape(-1, aux["logits"].shape[-1])[:9]
    targets = [5, 6, 7, END, 8, END, 3, 9, END]
    log_normalizer = np.log(np.exp(logits).sum(-1))
    want = np.mean(log_normalizer - logits[np.arange(9), targets])
    assert float(loss) == pytest.approx(want, rel=1e-5)
    assert float(aux["metrics"]["cross_entropy"].weight) == 9


def test_a_value_is_the_last_resort_and_said_once():
    model = build(decoder_config().set(pad_token_id=4, eos_token_id=4))
    labels = {"input_ids": jnp.array([[5, 6, 4]]), "target_labels": jnp.array([[6, 4, 4]])}
    prompt = {"prefix": jnp.array([[5, 4]])}
    with pytest.warns(PaddingWarning, match=r"_id=4, and the batch does not have 'live_targets'"):
        (_, aux), _ = loss_and_aux(*model, labels)
    assert float(aux["metrics"]["cross_entropy"].weight) == 1
    with pytest.warns(PaddingWarning, match="does not have 'prefix_len', so ends of texts count"):
        call(*model, method="sample_decode", input_batch=prompt)
    with warnings.catch_warnings():
        loss_and_aux(*model, jax.tree.map(lambda x: x[:, :2], labels))
        call(*model, method="sample_decode", input_batch={"prefix": jnp.array([[5, 4, 4]])})


def greedy(model, state, prompt, length):
    """Continues a prompt by the likeliest tokens, each from a whole forward pass."""
    ids = list(prompt)
    while len(ids) < length:
        padded = jnp.array([ids + [END] * (length - len(ids))])
        inputs = {"input_ids": padded, "input_segment_ids": (jnp.arange(length) < len(ids))[None]}
        logits, _ = call(model, state, method="extract_logits", input_batch=inputs)
        ids.append(int(np.argmax(logits[0, len(ids) - 1])))
    return ids


@pytest.mark.parametrize("has_mask", [False, True], ids=["layers mask", "decoder masks"])
def test_prompts_keep_their_ends(has_mask):
    decoder = decoder_config().set(pad_token_id=END, eos_token_id=END)
    if has_mask:
        decoder.attention_mask = CausalAttentionLogitBiasLayer.default_config()
        decoder.transformer.layer.self_attention.attention.mask = None
    model = build(decoder)
    prompts = [[5, END, 6, END], [7, END], [END, END, 8], [END]]
    prefix = jnp.array([p + [END] * (4 - len(p)) for p in prompts])
    found, _ = call(
        *model,
        method="sample_decode",
        input_batch={"prefix": prefix, "prefix_len": jnp.array([len(p) for p in prompts])},
        static={
            "logits_modifier": scale_by(0.0),
            "stop_decoding_condition": StopOnMaxLength(10**6),
            "max_sequence_length": LENGTH - 1,
        },
    )
    for prompt, sequence in zip(prompts, found.sequences[:, 0], strict=True):
        assert [prompt[0], *sequence.tolist()] == greedy(*model, prompt, LENGTH)


def test_beams_continue_after_the_prompt(model):
    prefix = jnp.array([[5, END, 9, 9], [7, END, END, END]])
    kwargs = {"method": "beam_search_decode", "static": {"max_sequence_length": LENGTH - 1}}
    lengths = jnp.array([2, 2])
    found, _ = call(*model, input_batch={"prefix": prefix, "prefix_len": lengths}, **kwargs)
    short = {"prefix": prefix[:, :2], "prefix_len": lengths}
    want, _ = call(*model, input_batch=short, **kwargs)
    np.testing.assert_array_equal(found.sequences, want.sequences)
    assert (found.live_sequences[:, 0, 0] == END).all()


def test_bytes_that_are_not_known_give_no_figure(model):
    unknown = {**batch(END), "target_num_bytes": jnp.array([6, -1])}
    _, summaries = loss_and_aux(*model, unknown)
    assert np.isnan(summaries["bits_per_byte"].mean)
    known = loss_and_aux(*model, batch(END))[1]
    total = summaries["bits_per_byte"] + known["bits_per_byte"]
    assert np.isnan(total.mean)
    summaries = known
    assert float(summaries["bits_per_byte"].weight) == sum(map(len, DOCUMENTS))
