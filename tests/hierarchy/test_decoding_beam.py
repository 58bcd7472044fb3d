import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.hierarchy.decoding import (
    NEG_INF,
    beam_search_decode,
    brevity_penalty_fn,
    compute_merge_matrix_by_prefix_ids,
    infer_initial_time_step,
)

VOCAB, EOS, STATES = 4, 3, 11


def table(seed):
    """log p(next token | a hash of all tokens so far, the newest token)"""
    logits = 2 * np.random.default_rng(seed).normal(size=(STATES, VOCAB, VOCAB))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def advance(history, token):
    return (history * 5 + token + 1) % STATES


def scores_of(log_probs):
    """tokens_to_scores of a model that knows all tokens so far from its cache."""

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


STATIC = ("num_decodes", "max_decode_len", "brevity_penalty", "eos_id", "prefix_merger")
jitted_beams = jax.jit(beams, static_argnames=STATIC)


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
    """All continuations that end with EOS, the best first; by trying each."""
    found = []
    room = length - len(prompt) + 1
    for n in range(room):
        for body in itertools.product([t for t in range(VOCAB) if t != EOS], repeat=n):
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
def test_a_wide_beam_finds_what_trying_all_sequences_finds(seed):
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


def test_prompts_of_different_lengths_are_searched_side_by_side():
    log_probs = table(3)
    inputs = [[1, 0, 0, 0], [2, 1, 1, 0], [1, 2, 0, 0]]
    outputs = search(inputs, log_probs, num_decodes=27)
    for row, prompt in enumerate([[1], [2, 1, 1], [1, 2]]):
        assert_found(outputs, best_endings(log_probs, prompt, 4)[:3], row)


def test_the_companions_in_a_batch_change_nothing():
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


def test_the_scores_are_the_sums_of_log_probabilities():
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


def test_a_narrow_beam_is_greedy():
    log_probs = table(6)
    log_probs[:, :, EOS] = -1e4  # it never ends by itself
    outputs = search([[1, 0, 0, 0, 0, 0]], log_probs, num_decodes=1)
    prompt = [1]
    for _ in range(6):
        scores = [score(log_probs, prompt, [token]) for token in range(VOCAB)]
        prompt.append(int(np.argmax(scores)))
    assert outputs.live_sequences[0, 0].tolist() == prompt[1:]


def test_what_is_missing_has_no_score_and_only_padding():
    log_probs = table(7)
    outputs = search([[1, 2, 1, 2]], log_probs, num_decodes=27)
    # One token fits after the prompt, and it must be the end.
    assert_found(outputs, best_endings(log_probs, [1, 2, 1, 2], 4))
    assert outputs.scores[0, 1:].tolist() == [NEG_INF] * 26
    assert outputs.sequences[0, 1:].tolist() == [[0] * 4] * 26
    assert (outputs.live_scores[0] > NEG_INF).tolist() == [True] * 3 + [False] * 24


def test_the_search_ends_once_nothing_better_can_come():
    steps = []

    def tokens_to_scores(ids, cache):
        steps.append(ids)
        return jnp.log(jnp.tile(jnp.array([0.001, 0.001, 0.001, 0.997]), (ids.shape[0], 1))), cache

    inputs = [[1, 0, 0, 0, 0, 0, 0, 0]]
    search(inputs, table(0), num_decodes=1, tokens_to_scores=tokens_to_scores, loop="python")
    assert len(steps) == 1


def test_both_loops_agree():
    inputs = [[1, 0, 0, 0], [2, 1, 0, 0], [2, 1, 1, 0]]
    in_jit = search(inputs, table(8), num_decodes=27)
    in_python = search(inputs, table(8), num_decodes=27, loop="python")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), in_jit, in_python)


def test_results_may_be_longer_than_the_prompts():
    log_probs = table(9)
    outputs = search([[1, 2]], log_probs, num_decodes=27, max_decode_len=4)
    assert_found(outputs, best_endings(log_probs, [1, 2], 4)[:5])
    with pytest.raises(ArgumentShapeError, match="longer than max_decode_len=4"):
        search([[1, 2, 0, 0, 0, 0]], log_probs, num_decodes=2, max_decode_len=4)


def test_an_end_token_outside_of_the_vocabulary_is_refused():
    with pytest.raises(ArgumentValueError, match="eos_id=7 is not in the vocabulary of 4 tokens"):
        search([[1, 0]], table(0), num_decodes=2, eos_id=7)


def test_an_unknown_brevity_penalty_is_refused():
    with pytest.raises(ArgumentValueError, match="bp_type='gnmt'; expected 't5' or 'hf'"):
        brevity_penalty_fn(bp_type="gnmt")


@pytest.mark.parametrize(
    "alpha, bp_type, length, expected",
    [(0, "t5", 9, -6), (1, "t5", 1, -6), (1, "t5", 7, -3), (0.5, "hf", 4, -3), (1, "hf", 10, -0.6)],
)
def test_brevity_penalties_by_hand(alpha, bp_type, length, expected):
    penalize = brevity_penalty_fn(alpha=alpha, bp_type=bp_type)
    found = penalize(length=jnp.array(length), raw_scores=jnp.array(-6.0))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_first_of_equal_hypotheses_stands_for_all():
    matrix = compute_merge_matrix_by_prefix_ids(jnp.array([[1, 2, 1, 3, 2], [4, 4, 4, 4, 4]]))
    first = np.zeros((5, 5), int)
    first[[0, 0, 1, 1, 3], [0, 2, 1, 4, 3]] = 1
    np.testing.assert_array_equal(matrix[0], first)
    np.testing.assert_array_equal(matrix[1], [[1] * 5, *[[0] * 5] * 4])


class SameSum:
    """Hypotheses with equal sums of tokens count as one."""

    def init_state(self, *, tokens):
        return {"sum": jnp.zeros(tokens.shape[:2], int)}

    def update(self, *, tokens, state):
        return {"sum": state["sum"] + tokens}

    def compute(self, state):
        return compute_merge_matrix_by_prefix_ids(state["sum"])


def test_merged_hypotheses_add_up_their_probabilities():
    p = np.array([0.0, 0.5, 0.4, 0.1])  # whatever came before; token 3 ends
    log_probs = np.log(np.broadcast_to(p, (STATES, VOCAB, VOCAB)) + 1e-30)
    outputs = search([[1, 0, 0]], log_probs, num_decodes=5, prefix_merger=SameSum())
    # The end at once; 1 or 2 and the end; 1, 2 and 2, 1 together; 1, 1; there is no place for 2, 2.
    found = dict(zip(map(str, outputs.sequences[0].tolist()), outputs.scores[0], strict=True))
    expected = {
        "[3, 0, 0]": 0.1,
        "[1, 3, 0]": 0.05,
        "[2, 3, 0]": 0.04,
        "[1, 2, 3]": 0.04,
        "[1, 1, 3]": 0.025,
    }
    assert {k: np.exp(v) for k, v in found.items()} == pytest.approx(expected, rel=1e-4)
