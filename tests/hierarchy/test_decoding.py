import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.hierarchy import decoding
from weft.hierarchy.decoding import (
    CompositeDecodingCondition,
    StopOnMaxLength,
    StopOnSubsequence,
    infer_initial_time_step,
    sample_decode,
)

VOCAB = 5
NEVER = StopOnMaxLength(10**6)
LOG_PROBS = jax.nn.log_softmax(jax.random.normal(jax.random.PRNGKey(1), (VOCAB, VOCAB)))


def bigram(ids, cache):
    return LOG_PROBS[ids[:, 0]], cache


def successor(ids, cache):
    return jnp.log(jax.nn.one_hot(ids[:, 0] + 1, 50)), cache


STATIC = ("tokens_to_scores", "stop_decoding_condition", "num_decodes", "max_decode_len", "pad_id")
jitted_sample = jax.jit(sample_decode, static_argnames=STATIC)


def sample(inputs, *, seed=0, **kwargs):
    inputs = jnp.array(inputs)
    run = sample_decode if "loop" in kwargs else jitted_sample
    return run(
        **{
            "inputs": inputs,
            "time_step": infer_initial_time_step(inputs, pad_id=0),
            "cache": {},
            "tokens_to_scores": bigram,
            "stop_decoding_condition": NEVER,
            "num_decodes": 2,
            "prng_key": jax.random.PRNGKey(seed),
            **kwargs,
        }
    )


def test_every_public_name_is_there():
    assert all(hasattr(decoding, name) for name in decoding.__all__)


def test_continues_prompts_of_different_lengths():
    outputs = sample([[1, 0, 0, 0], [5, 6, 7, 0]], tokens_to_scores=successor)
    assert outputs.sequences.tolist() == [[[2, 3, 4, 5]] * 2, [[6, 7, 8, 9]] * 2]


def test_pads_after_the_stop():
    stop = CompositeDecodingCondition([StopOnSubsequence(8), StopOnMaxLength(3)])
    outputs = sample(
        [[1, 0, 0, 0, 0], [5, 6, 0, 0, 0]],
        tokens_to_scores=successor,
        stop_decoding_condition=stop,
        num_decodes=1,
        pad_id=0,
    )
    assert outputs.sequences.tolist() == [[[2, 3, 4, 0, 0]], [[6, 7, 8, 0, 0]]]


def test_the_padding_token_is_configured():
    outputs = sample(
        [[1, 9, 9]],
        time_step=jnp.array([0]),
        tokens_to_scores=successor,
        stop_decoding_condition=StopOnSubsequence(2),
        pad_id=9,
    )
    assert outputs.sequences.tolist() == [[[2, 9, 9]] * 2]


def test_a_stop_token_in_the_prompt_stops_nothing():
    outputs = sample(
        [[1, 3, 5, 0]], tokens_to_scores=successor, stop_decoding_condition=StopOnSubsequence(3)
    )
    assert outputs.sequences.tolist() == [[[3, 5, 6, 7]] * 2]


def test_the_scores_are_those_of_the_sampled_tokens():
    prompts = [[1, 0, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0]]
    outputs = sample(prompts, num_decodes=3, stop_decoding_condition=StopOnSubsequence(4))
    for row, length in enumerate([1, 3]):
        for tokens, scores in zip(outputs.sequences[row], outputs.token_scores[row], strict=True):
            known = [1, *tokens.tolist()]
            decoded = known[length:]
            end = length + (decoded.index(4) + 1 if 4 in decoded else len(decoded))
            expected = [
                LOG_PROBS[known[i], known[i + 1]] if length <= i + 1 < end else 0.0
                for i in range(6)
            ]
            np.testing.assert_allclose(scores, expected, rtol=1e-5)
            assert known[end:] == [0] * (7 - end)


def test_scores_of_the_prompt_can_be_given():
    given = jnp.array([[-1.0, -2.0, -3.0, -4.0]])
    outputs = sample([[1, 2, 3, 0]], input_token_scores=given, num_decodes=1)
    assert outputs.token_scores[0, 0, :2].tolist() == [-1.0, -2.0]
    first = outputs.sequences[0, 0, 2]
    assert outputs.token_scores[0, 0, 2] == LOG_PROBS[3, first]


def test_the_same_key_gives_the_same_samples():
    inputs = [[1] + [0] * 9]
    again = sample(inputs, num_decodes=4)
    np.testing.assert_array_equal(sample(inputs, num_decodes=4).sequences, again.sequences)
    other = sample(inputs, num_decodes=4, seed=1)
    assert (other.sequences != again.sequences).any()


def test_samples_at_a_key_are_those_of_axlearn():
    # Called with these arguments, AXLearn 0.0.1 gives these tokens (partitionable threefry).
    outputs = sample([[1, 0, 0, 0]] * 2, num_decodes=3)
    assert outputs.sequences.tolist() == [
        [[0, 4, 3, 0], [1, 1, 1, 2], [4, 3, 3, 1]],
        [[1, 1, 4, 0], [2, 2, 4, 3], [2, 1, 0, 4]],
    ]


def test_samples_follow_the_distribution():
    outputs = sample([[2, 0]], num_decodes=4000, max_decode_len=1)
    counts = np.bincount(np.asarray(outputs.sequences).ravel(), minlength=VOCAB) / 4000
    np.testing.assert_allclose(counts, np.exp(LOG_PROBS[2]), atol=0.03)


def test_every_hypothesis_has_a_cache_of_its_own():
    def count(ids, cache):
        seen = cache["seen"] + ids[:, 0]
        return bigram(ids, cache)[0], {"seen": seen, "all": cache["all"] + 1}

    caches = []

    def spy(ids, cache):
        scores, cache = count(ids, cache)
        caches.append(cache)
        return scores, cache

    outputs = sample(
        [[1, 0, 0, 0], [2, 3, 0, 0]],
        cache={"seen": jnp.array([0, 2]), "all": jnp.array(0)},
        tokens_to_scores=spy,
        num_decodes=3,
        loop="python",
    )
    # The longer prompt is done a step earlier.
    read = np.asarray(outputs.sequences).reshape(6, 4)[:, :-1].sum(1) + np.repeat([1, 2], 3)
    assert caches[-1]["seen"][:3].tolist() == read[:3].tolist()
    assert caches[-2]["seen"][3:].tolist() == read[3:].tolist()
    assert caches[-1]["all"] == 4


def test_stops_as_soon_as_all_are_complete():
    steps = []

    def spy(ids, cache):
        steps.append(ids)
        return successor(ids, cache)

    sample(
        [[1] + [0] * 30],
        tokens_to_scores=spy,
        stop_decoding_condition=StopOnSubsequence(3),
        loop="python",
    )
    assert len(steps) == 2


def test_both_loops_agree():
    inputs = [[1, 0, 0, 0], [1, 2, 3, 0]]
    in_jit, in_python = sample(inputs), sample(inputs, loop="python")
    np.testing.assert_array_equal(in_jit.sequences, in_python.sequences)
    np.testing.assert_allclose(in_jit.token_scores, in_python.token_scores, rtol=1e-6)


def test_results_may_be_longer_than_the_prompts():
    outputs = sample([[1, 2]], tokens_to_scores=successor, max_decode_len=5, num_decodes=1)
    assert outputs.sequences.tolist() == [[[2, 3, 4, 5, 6]]]
    with pytest.raises(ArgumentShapeError, match="longer than max_decode_len=2"):
        sample([[1, 2, 0, 0, 0]], max_decode_len=2)
