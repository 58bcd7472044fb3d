import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.hierarchy import decoding as loops
from weft.hierarchy.decoding import (
    NEG_INF,
    CompositeDecodingCondition,
    StopOnMaxLength,
    StopOnSubsequence,
    beam_search_decode,
    brevity_penalty_fn,
    compute_merge_matrix_by_prefix_ids,
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


def test_stop_token_in_prompt_is_ignored():
    outputs = sample([[4, 0, 0, 0], [3, 4, 5, 0]], SUCCESSOR)
    assert outputs.sequences.tolist() == [[[5, 6, 7, 8]] * 2, [[4, 5, 6, 7]] * 2]


def test_scores_match_sampled_tokens():
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


def test_prompt_scores_are_accepted():
    given = jnp.array([[-1.0, -2.0, -3.0, -4.0]] * 2)
    outputs = sample([[1, 0, 0, 0], [1, 2, 3, 0]], SUCCESSOR, input_token_scores=given)
    assert outputs.token_scores[:, 0].tolist() == [[0, 0, 0, 0], [-1, -2, 0, 0]]


def test_samples_match_axlearn():
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


def test_results_may_be_longer_than_the_prompts():
    outputs = sample([[5, 6]], SUCCESSOR, max_decode_len=4)
    assert outputs.sequences.tolist() == [[[6, 7, 8, 0]] * 2]
    with pytest.raises(ArgumentShapeError, match="longer than max_decode_len=2"):
        sample([[1, 2, 0, 0, 0]], SUCCESSOR, max_decode_len=2)


def test_initial_time_step_is_the_position_of_the_last_token():
    prefix = jnp.array([[0, 0, 0], [4, 0, 0], [4, 5, 0], [4, 0, 6], [4, 5, 6]])
    assert loops.infer_initial_time_step(prefix, pad_id=0).tolist() == [0, 0, 1, 2, 2]
    assert loops.infer_initial_time_step(jnp.array([[0, 7, 9, 9]]), pad_id=9).tolist() == [1]


def test_initial_sequences_pad_after_the_prompt():
    sequences = loops.initial_sequences(
        jnp.array([[1, 5, 6]]), jnp.array([1]), num_decodes=2, max_decode_len=4, pad_id=9
    )
    assert sequences.tolist() == [[[1, 5, 9, 9, 9]] * 2]


def test_prompt_longer_than_the_result_is_rejected():
    with pytest.raises(ArgumentShapeError, match=r"\(1, 6\).*max_decode_len=4.*to 5 or more"):
        loops.initial_sequences(
            jnp.ones((1, 6), int), jnp.array([1]), num_decodes=2, max_decode_len=4, pad_id=0
        )


def test_zero_hypotheses_are_rejected():
    with pytest.raises(ArgumentValueError, match="num_decodes=0; expected at least 1"):
        loops.initial_sequences(
            jnp.ones((1, 6), int), jnp.array([1]), num_decodes=0, max_decode_len=6, pad_id=0
        )


def test_unknown_loop_is_rejected():
    with pytest.raises(ArgumentValueError, match="loop='scan'; expected 'lax' or 'python'"):
        loops.run_loop("scan", lambda x: x < 1, lambda x: x, jnp.array(0))


SEQUENCE = [1, 3, 4, 2, 3, 4, 0]


def stops(condition, prefix_len=0):
    sequences = jnp.array([[SEQUENCE]])
    return [
        i
        for i in range(len(SEQUENCE))
        if condition(index=jnp.array([i]), sequences=sequences, prefix_len=jnp.array([prefix_len]))
    ]


@pytest.mark.parametrize(
    "stopping_seqs, expected",
    [
        (4, [2, 5]),
        ([4], [2, 5]),
        ([3, 4], [2, 5]),
        ([[3, 4], [2]], [2, 3, 5]),
        ([[4, 2, 3]], [4]),
        ([[1]], [0]),
        ([[0, 1]], []),
        (np.array([[3, 4], [-1, 2]]), [2, 3, 5]),
    ],
)
def test_decoding_ends_at_a_stopping_sequence(stopping_seqs, expected):
    assert stops(StopOnSubsequence(stopping_seqs)) == expected


def test_matches_end_after_the_prompt():
    assert stops(StopOnSubsequence([3, 4]), prefix_len=2) == [2, 5]  # 3 is in the prompt
    assert stops(StopOnSubsequence([3, 4]), prefix_len=3) == [5]
    assert stops(StopOnSubsequence([3, 4]), prefix_len=6) == []


def test_prompts_have_separate_positions_and_lengths():
    sequences = jnp.array([[[1, 5, 7], [1, 7, 5]], [[1, 5, 7], [1, 7, 5]]])
    stop = StopOnSubsequence(7)(
        index=jnp.array([1, 2]), sequences=sequences, prefix_len=jnp.array([1, 1])
    )
    assert stop.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("stopping_seqs", [[], [[]], [[3], []]])
def test_empty_stopping_sequences_are_rejected(stopping_seqs):
    with pytest.raises(ArgumentValueError, match=r"has an empty sequence; expected token ids"):
        StopOnSubsequence(stopping_seqs)


def test_padding_of_stopping_sequences_is_left_out():
    assert stops(StopOnSubsequence([[3, 4], [9, 2]], pad_value=9)) == [2, 3, 5]


def test_beam_search_forces_prompts_beyond_the_time_step():
    found = loops.beam_search_decode(
        inputs=jnp.array([[1, 0, 0, 0], [1, 7, 2, 0]]),
        time_step=jnp.array([0, 0]),
        cache={},
        tokens_to_scores=lambda ids, cache: (jnp.asarray(BIGRAM)[ids[:, 0]], cache),
        eos_id=4,
        num_decodes=2,
    )
    forced = loops.beam_search_decode(
        inputs=jnp.array([[1, 7, 2, 0]]),
        time_step=jnp.array([2]),
        cache={},
        tokens_to_scores=lambda ids, cache: (jnp.asarray(BIGRAM)[ids[:, 0]], cache),
        eos_id=4,
        num_decodes=2,
    )
    np.testing.assert_array_equal(found.sequences[1], forced.sequences[0])
    np.testing.assert_allclose(found.scores[1], forced.scores[0], rtol=1e-5)
    assert found.live_sequences[1, :, :2].tolist() == [[7, 2]] * 2
    assert found.live_sequences[0, 0, :2].tolist() != [7, 2]


def test_hypotheses_with_equal_prefixes_are_merged():
    ids = jnp.array([[[5, 1], [6, 1], [5, 1]]])
    assert loops.compute_merge_matrix_by_prefix_ids(ids).tolist() == [
        [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    ]


def test_max_length_counts_decoded_tokens():
    assert stops(StopOnMaxLength(2), prefix_len=3) == [4, 5, 6]
    assert stops(StopOnMaxLength(1), prefix_len=3) == [3, 4, 5, 6]


@pytest.mark.parametrize("max_len", [[2, 3], [[2], [3]]])
def test_max_length_may_differ_between_prompts(max_len):
    sequences = jnp.ones((2, 3, 9), int)
    stop = StopOnMaxLength(jnp.array(max_len))(
        index=jnp.array([4, 4]), sequences=sequences, prefix_len=jnp.array([3, 3])
    )
    assert stop.tolist() == [[True] * 3, [False] * 3]


def test_composite_stops_when_any_part_does():
    both = CompositeDecodingCondition([StopOnSubsequence(2), StopOnMaxLength(5)])
    assert stops(both, prefix_len=1) == [3, 5, 6]


def test_empty_composite_is_rejected():
    with pytest.raises(ArgumentValueError, match="conditions is empty"):
        CompositeDecodingCondition([])


BEAM_VOCAB, EOS, STATES = 4, 3, 11


def table(seed):
    """Returns log p(next token | a hash of all tokens so far, the newest token)."""
    logits = 2 * np.random.default_rng(seed).normal(size=(STATES, BEAM_VOCAB, BEAM_VOCAB))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def advance(history, token):
    return (history * 5 + token + 1) % STATES


def scores_of(log_probs):
    """Returns the tokens_to_scores of a model that caches all tokens so far."""

    def tokens_to_scores(ids, cache):
        history = advance(cache["history"], ids[:, 0])
        return log_probs[history, ids[:, 0]], {"history": history}

    return tokens_to_scores


def prompt_cache(inputs, time_step):
    history = []
    for tokens, end in zip(np.asarray(inputs), np.asarray(time_step), strict=True):
        h = 0
        for token in tokens[:end]:
            h = advance(h, int(token))
        history.append(h)
    return {"history": jnp.array(history)}


def beams(inputs, time_step, cache, log_probs, **kwargs):
    return beam_search_decode(
        inputs=inputs,
        time_step=time_step,
        cache=cache,
        **{"tokens_to_scores": scores_of(log_probs), "eos_id": EOS, **kwargs},
    )


BEAM_STATIC = (
    *("num_decodes", "max_decode_len", "brevity_penalty", "eos_id", "prefix_merger"),
    "tokens_to_scores",
)
jitted_beams = jax.jit(beams, static_argnames=BEAM_STATIC)


def search(inputs, log_probs, **kwargs):
    inputs = jnp.array(inputs)
    time_step = infer_initial_time_step(inputs, pad_id=0)
    cache = prompt_cache(inputs, time_step)
    run = beams if "loop" in kwargs else jitted_beams
    return run(inputs, time_step, cache, jnp.asarray(log_probs, jnp.float32), **kwargs)


def score(log_probs, prompt, continuation):
    h, total, newest = 0, 0.0, prompt[0]
    for token in prompt:
        h, newest = advance(h, token), token
    for token in continuation:
        total += log_probs[h, newest, token]
        h, newest = advance(h, token), token
    return total


def best_endings(log_probs, prompt, length, penalty=lambda n: 1.0):
    """Returns all continuations that end with EOS, the best first; by trying each."""
    found = []
    room = length - len(prompt) + 1
    for n in range(room):
        for body in itertools.product([t for t in range(BEAM_VOCAB) if t != EOS], repeat=n):
            tokens = [*body, EOS]
            total = score(log_probs, prompt, tokens) / penalty(len(prompt) + n)
            found.append((total, [*prompt[1:], *tokens, *[0] * (room - n - 1)]))
    return sorted(found, key=lambda f: -f[0])


def assert_found(outputs, expected, row=0):
    n = min(len(expected), outputs.scores.shape[1])
    np.testing.assert_allclose(outputs.scores[row, :n], [s for s, _ in expected[:n]], rtol=1e-4)
    assert outputs.sequences[row, :n].tolist() == [seq for _, seq in expected[:n]]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_wide_beam_equals_exhaustive_search(seed):
    log_probs = table(seed)
    outputs = search([[1, 0, 0, 0]], log_probs, num_decodes=27)
    assert_found(outputs, best_endings(log_probs, [1], 4)[:5])


@pytest.mark.parametrize("bp_type", ["t5", "hf"])
def test_brevity_penalties_change_the_order(bp_type):
    log_probs = table(2)
    inputs = [[1, 0, 0, 0, 0]]
    penalize = brevity_penalty_fn(alpha=2.0, bp_type=bp_type)
    outputs = search(inputs, log_probs, num_decodes=81, brevity_penalty=penalize)
    divisor = (lambda n: n**2.0) if bp_type == "hf" else (lambda n: ((5 + n) / 6) ** 2.0)
    expected = best_endings(log_probs, [1], 5, divisor)
    assert_found(outputs, expected[:10])
    assert expected[0][1] != best_endings(log_probs, [1], 5)[0][1]


def test_prompts_in_a_batch_are_independent():
    log_probs = table(4)
    inputs = [[1, 0, 0, 0, 0], [2, 1, 1, 0, 0]]
    together = search(inputs, log_probs, num_decodes=2)
    for row in range(2):
        alone = search(inputs[row : row + 1], log_probs, num_decodes=2)
        jax.tree.map(
            lambda a, b, row=row: np.testing.assert_allclose(a[0], b[row], rtol=1e-5),
            alone,
            together,
        )


def test_scores_are_the_sums_of_log_probabilities():
    log_probs = table(5)
    outputs = search([[1, 2, 0, 0, 0, 0]], log_probs, num_decodes=3)
    for sequences, scores, ended in (
        (outputs.sequences, outputs.scores, True),
        (outputs.live_sequences, outputs.live_scores, False),
    ):
        for sequence, found in zip(sequences[0].tolist(), scores[0].tolist(), strict=True):
            decoded = sequence[1:]
            if ended:
                decoded = decoded[: decoded.index(EOS) + 1]
            assert sequence[0] == 2
            assert found == pytest.approx(score(log_probs, [1, 2], decoded), rel=1e-4)


def test_missing_hypotheses_are_padding():
    log_probs = table(7)
    outputs = search([[1, 2, 1, 2]], log_probs, num_decodes=27)
    # One token fits after the prompt, and it must be the end.
    assert_found(outputs, best_endings(log_probs, [1, 2, 1, 2], 4))
    assert outputs.scores[0, 1:].tolist() == [NEG_INF] * 26
    assert outputs.sequences[0, 1:].tolist() == [[0] * 4] * 26
    assert (outputs.live_scores[0] > NEG_INF).tolist() == [True] * 3 + [False] * 24


def test_search_ends_when_no_better_score_is_possible():
    steps = []

    def tokens_to_scores(ids, cache):
        jax.debug.callback(steps.append, ids)
        return jnp.log(jnp.tile(jnp.array([0.001, 0.001, 0.001, 0.997]), (ids.shape[0], 1))), cache

    inputs = [[1, 0, 0, 0, 0, 0, 0, 0]]
    search(inputs, table(0), num_decodes=1, tokens_to_scores=tokens_to_scores)
    jax.effects_barrier()
    assert len(steps) == 1


def test_both_loops_agree():
    inputs = [[1, 0, 0, 0], [2, 1, 0, 0], [2, 1, 1, 0]]
    in_jit = search(inputs, table(8), num_decodes=27)
    in_python = search(inputs, table(8), num_decodes=27, loop="python")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), in_jit, in_python)


def test_beams_may_be_longer_than_the_prompts():
    log_probs = table(9)
    outputs = search([[1, 2]], log_probs, num_decodes=27, max_decode_len=4)
    assert_found(outputs, best_endings(log_probs, [1, 2], 4)[:5])
    with pytest.raises(ArgumentShapeError, match="longer than max_decode_len=4"):
        search([[1, 2, 0, 0, 0, 0]], log_probs, num_decodes=2, max_decode_len=4)


def test_out_of_vocabulary_end_token_is_rejected():
    with pytest.raises(ArgumentValueError, match="eos_id=7 is not in the vocabulary of 4 tokens"):
        search([[1, 0]], table(0), num_decodes=2, eos_id=7)


def test_unknown_brevity_penalty_is_rejected():
    with pytest.raises(ArgumentValueError, match="bp_type='gnmt'; expected 't5' or 'hf'"):
        brevity_penalty_fn(bp_type="gnmt")


class SameSum:
    """Hypotheses with equal sums of tokens count as one."""

    def init_state(self, *, tokens):
        return {"sum": jnp.zeros(tokens.shape[:2], int)}

    def update(self, *, tokens, state):
        return {"sum": state["sum"] + tokens}

    def compute(self, state):
        return compute_merge_matrix_by_prefix_ids(state["sum"])


def test_merged_hypotheses_add_up_their_probabilities():
    p = np.array([0.0, 0.5, 0.4, 0.1])  # after any history; token 3 ends
    log_probs = np.log(np.broadcast_to(p, (STATES, BEAM_VOCAB, BEAM_VOCAB)) + 1e-30)
    outputs = search([[1, 0, 0]], log_probs, num_decodes=5, prefix_merger=SameSum())
    # The end alone; 1 or 2, then the end; 1, 2 and 2, 1 merged; 1, 1. No room for 2, 2.
    found = dict(zip(map(str, outputs.sequences[0].tolist()), outputs.scores[0], strict=True))
    expected = {
        "[3, 0, 0]": 0.1,
        "[1, 3, 0]": 0.05,
        "[2, 3, 0]": 0.04,
        "[1, 2, 3]": 0.04,
        "[1, 1, 3]": 0.025,
    }
    assert {k: np.exp(v) for k, v in found.items()} == pytest.approx(expected, rel=1e-4)


def test_merged_hypotheses_stay_open_while_their_sum_can_win():
    # Tokens: 1 begins, 2, 3, 4 ends. 2, 3 and 3, 2 merge into the best, which a third step ends.
    p = np.zeros((3, 5, 5))
    p[0, 1, [2, 3, 4]] = 0.35, 0.35, 0.3
    p[1, [2, 3], [3, 2]] = 0.45
    p[1, [2, 3], 4] = 0.55
    p[2, :, 4] = 1.0
    log_probs = jnp.log(p + 1e-30)

    def tokens_to_scores(ids, cache):
        return log_probs[cache["step"], ids[:, 0]], {"step": cache["step"] + 1}

    @functools.partial(jax.jit, static_argnums=0)
    def search(max_decode_len):
        return beam_search_decode(
            inputs=jnp.array([[1]]),
            time_step=jnp.array([0]),
            cache={"step": jnp.array([0])},
            tokens_to_scores=tokens_to_scores,
            eos_id=4,
            num_decodes=2,
            max_decode_len=max_decode_len,
            prefix_merger=SameSum(),
        )

    found = search(3)
    assert found.sequences[0].tolist() == [[2, 3, 4], [4, 0, 0]]
    np.testing.assert_allclose(np.exp(found.scores[0]), [0.315, 0.3], rtol=1e-5)
    np.testing.assert_allclose(np.exp(search(2).live_scores[0]), [0.315, 0.0], rtol=1e-5)
