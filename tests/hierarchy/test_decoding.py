import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.hierarchy import decoding
from weft.hierarchy.decoding import (
    CompositeDecodingCondition,
    StopOnSubsequence,
    infer_initial_time_step,
    sample_decode,
)

VOCAB = 10
BIGRAM = np.full((VOCAB, VOCAB), -1e9, np.float32)
BIGRAM[:5, :5] = jax.nn.log_softmax(jax.random.normal(jax.random.PRNGKey(1), (5, 5)))
SUCCESSOR = np.log(np.eye(VOCAB, k=1, dtype=np.float32) + 1e-30)
STOP = CompositeDecodingCondition([StopOnSubsequence(4), StopOnSubsequence([[7, 8]])])


def decode(inputs, time_step, cache, log_probs, prng_key, spy=None, **kwargs):
    def tokens_to_scores(ids, cache):
        cache = {"seen": cache["seen"] + ids[:, 0], "steps": cache["steps"] + 1}
        if spy is not None:
            spy(cache)
        return log_probs[ids[:, 0]], cache

    return sample_decode(
        inputs=inputs,
        time_step=time_step,
        cache=cache,
        tokens_to_scores=tokens_to_scores,
        prng_key=prng_key,
        **kwargs,
    )


STATIC = ("stop_decoding_condition", "num_decodes", "max_decode_len")
jitted_decode = jax.jit(decode, static_argnames=STATIC)


def sample(inputs, log_probs, *, seed=0, pad_id=0, **kwargs):
    inputs = jnp.array(inputs)
    run = decode if "loop" in kwargs else jitted_decode
    return run(
        inputs,
        infer_initial_time_step(inputs, pad_id=pad_id),
        {"seen": jnp.array([0] * len(inputs)), "steps": jnp.array(0)},
        jnp.array(log_probs),
        jax.random.PRNGKey(seed),
        **{"stop_decoding_condition": STOP, "num_decodes": 2, "pad_id": pad_id, **kwargs},
    )


def test_every_public_name_is_there():
    assert all(hasattr(decoding, name) for name in decoding.__all__)


def test_continues_prompts_of_different_lengths():
    outputs = sample([[5, 0, 0, 0], [2, 3, 0, 0]], SUCCESSOR)
    assert outputs.sequences.tolist() == [[[6, 7, 8, 0]] * 2, [[3, 4, 0, 0]] * 2]


def test_a_stop_token_in_the_prompt_stops_nothing():
    outputs = sample([[4, 0, 0, 0], [3, 4, 5, 0]], SUCCESSOR)
    assert outputs.sequences.tolist() == [[[5, 6, 7, 8]] * 2, [[4, 5, 6, 7]] * 2]


def test_the_padding_token_is_configured():
    outputs = sample([[6, 9, 9, 9], [4, 5, 9, 9]], SUCCESSOR, pad_id=9)
    assert outputs.sequences.tolist() == [[[7, 8, 9, 9]] * 2, [[5, 6, 7, 8]] * 2]


def test_the_scores_are_those_of_the_sampled_tokens():
    outputs = sample([[1, 0, 0, 0], [1, 2, 3, 0]], BIGRAM)
    for row, length in enumerate([1, 3]):
        for tokens, scores in zip(outputs.sequences[row], outputs.token_scores[row], strict=True):
            known = [1, *tokens.tolist()]
            decoded = known[length:]
            end = length + (decoded.index(4) + 1 if 4 in decoded else len(decoded))
            expected = [
                BIGRAM[known[i], known[i + 1]] if length <= i + 1 < end else 0.0 for i in range(4)
            ]
            np.testing.assert_allclose(scores, expected, rtol=1e-5)
            assert known[end:] == [0] * (5 - end)


def test_scores_of_the_prompt_can_be_given():
    given = jnp.array([[-1.0, -2.0, -3.0, -4.0]] * 2)
    outputs = sample([[1, 0, 0, 0], [1, 2, 3, 0]], SUCCESSOR, input_token_scores=given)
    assert outputs.token_scores[:, 0].tolist() == [[0, 0, 0, 0], [-1, -2, 0, 0]]


def test_the_same_key_gives_the_same_samples():
    inputs = [[1, 0, 0, 0]] * 2
    first, again = sample(inputs, BIGRAM), sample(inputs, BIGRAM)
    np.testing.assert_array_equal(first.sequences, again.sequences)
    assert (sample(inputs, BIGRAM, seed=1).sequences != first.sequences).any()


def test_samples_at_a_key_are_those_of_axlearn():
    # Called with these arguments, AXLearn 0.0.1 gives these tokens (partitionable threefry).
    outputs = sample(
        [[1, 0, 0, 0]] * 2,
        BIGRAM[:5, :5],
        num_decodes=3,
        stop_decoding_condition=StopOnSubsequence(77),
    )
    assert outputs.sequences.tolist() == [
        [[0, 4, 3, 0], [1, 1, 1, 2], [4, 3, 3, 1]],
        [[1, 1, 4, 0], [2, 2, 4, 3], [2, 1, 0, 4]],
    ]


def test_samples_follow_the_distribution():
    outputs = sample([[2, 0]], BIGRAM, num_decodes=4000, max_decode_len=1)
    counts = np.bincount(np.asarray(outputs.sequences).ravel(), minlength=VOCAB) / 4000
    np.testing.assert_allclose(counts, np.exp(BIGRAM[2]), atol=0.03)


def test_both_loops_agree_and_end_once_all_are_complete():
    inputs = [[1, 0, 0, 0], [5, 6, 0, 0]]
    caches = []
    in_python = sample(inputs, SUCCESSOR, loop="python", spy=caches.append)
    in_jit = sample(inputs, SUCCESSOR)
    np.testing.assert_array_equal(in_jit.sequences, in_python.sequences)
    np.testing.assert_allclose(in_jit.token_scores, in_python.token_scores, rtol=1e-6)
    # Of 1 the successors up to 4 are decoded; nothing is left to do afterwards.
    assert len(caches) == 3
    # Each hypothesis has a cache of its own; everything but arrays of prompts is shared.
    assert caches[1]["seen"].tolist() == [1 + 2, 1 + 2, 6 + 7, 6 + 7]
    assert caches[1]["steps"] == 2


def test_results_may_be_longer_than_the_prompts():
    outputs = sample([[5, 6]], SUCCESSOR, max_decode_len=4)
    assert outputs.sequences.tolist() == [[[6, 7, 8, 0]] * 2]
    with pytest.raises(ArgumentShapeError, match="longer than max_decode_len=2"):
        sample([[1, 2, 0, 0, 0]], SUCCESSOR, max_decode_len=2)
