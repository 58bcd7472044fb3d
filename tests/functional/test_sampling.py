import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ArgumentValueError
from weft.functional import (
    EXCLUDED_LOGIT,
    chain,
    draw_tokens,
    min_p_logits,
    sample_token,
    scale_by,
    top_k_logits,
    top_p_logits,
)

LOGITS = jnp.array(np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32))


def kept(logits):
    return np.array(logits > EXCLUDED_LOGIT / 2)


def test_scale_by_avoids_division_by_zero():
    np.testing.assert_allclose(scale_by(2.0)(LOGITS), LOGITS / 2, rtol=1e-6)
    np.testing.assert_allclose(scale_by(0.0)(LOGITS), LOGITS / 1e-4, rtol=1e-5)
    each = jnp.array([1.0, 2.0, 4.0, 0.0])
    np.testing.assert_allclose(
        scale_by(each, min_temperature=0.5)(LOGITS),
        LOGITS / np.array([[1], [2], [4], [0.5]]),
        rtol=1e-6,
    )


@pytest.mark.parametrize("break_ties", ["all", "smallest_index"])
@pytest.mark.parametrize("k", [1, 3, 9, 20])
def test_top_k_keeps_the_largest(k, break_ties):
    out = np.array(top_k_logits(k, break_ties=break_ties)(LOGITS))
    expected = np.argsort(np.argsort(-np.array(LOGITS), -1), -1) < k
    np.testing.assert_array_equal(kept(out), expected)
    np.testing.assert_array_equal(out[expected], np.array(LOGITS)[expected])


def test_excluded_logits_are_those_of_impossible_choices():
    for modify in (top_k_logits(1), top_k_logits(1, break_ties="smallest_index"), top_p_logits(0)):
        assert modify(jnp.array([1.0, 3.0])).tolist() == [-1e7, 3]


def test_ties_stay_all_or_by_index():
    logits = jnp.array([1.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(top_k_logits(2)(logits)).tolist() == [False, True, True, True, False]
    by_index = top_k_logits(2, break_ties="smallest_index")(logits)
    assert kept(by_index).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 0.99, 1.0])
def test_top_p_keeps_the_fewest_that_reach_p(p):
    out = top_p_logits(p)(LOGITS)
    probs = np.array(jax.nn.softmax(LOGITS), np.float64)
    for row, keeps in zip(probs, kept(out), strict=True):
        if p == 1:
            assert keeps.all()
            continue
        order = np.argsort(-row)
        needed = int(np.searchsorted(np.cumsum(row[order]), p)) + 1
        assert set(np.nonzero(keeps)[0]) == set(order[:needed])


def test_top_p_may_differ_by_example():
    out = top_p_logits(jnp.array([0.0, 1.0, 0.0, 1.0]))(LOGITS)
    assert kept(out).sum(-1).tolist() == [1, 9, 1, 9]


def test_chain_applies_from_left_to_right():
    out = chain(top_k_logits(3), scale_by(2.0))(LOGITS)
    np.testing.assert_array_equal(out, scale_by(2.0)(top_k_logits(3)(LOGITS)))
    np.testing.assert_array_equal(chain()(LOGITS), LOGITS)


@pytest.mark.parametrize("modify", [scale_by(0.5), top_k_logits(2), top_p_logits(0.5)])
def test_modifiers_run_under_jit_and_keep_the_dtype(modify):
    logits = LOGITS.astype(jnp.bfloat16)
    out = jax.jit(modify)(logits)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, modify(logits))


def test_no_key_means_greedy():
    token, log_prob = sample_token(LOGITS, prng_key=None)
    np.testing.assert_array_equal(token, LOGITS.argmax(-1))
    np.testing.assert_allclose(log_prob, jax.nn.log_softmax(LOGITS).max(-1), rtol=1e-5)


def test_excluded_tokens_are_never_sampled():
    keys = jax.random.split(jax.random.key(0), 200)
    modify = top_k_logits(2)
    tokens = jax.vmap(lambda key: sample_token(modify(LOGITS), prng_key=key)[0])(keys)
    for row, allowed in enumerate(kept(modify(LOGITS))):
        assert set(np.unique(tokens[:, row])) == set(np.nonzero(allowed)[0])


def test_bad_arguments_are_named():
    with pytest.raises(ArgumentValueError, match="k=0 must be at least 1"):
        top_k_logits(0)
    with pytest.raises(ArgumentValueError, match="break_ties='first' must be"):
        top_k_logits(1, break_ties="first")


def test_min_p_is_a_share_of_the_largest_probability():
    probs = jnp.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    kept = min_p_logits(jnp.array([0.5, 0.2]))(jnp.log(probs)) > EXCLUDED_LOGIT
    assert kept.tolist() == [[True, True, False], [False, True, False]]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    top_k=st.sampled_from([None, 1, 7, 400]),
    top_p=st.sampled_from([None, 0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0.2]),
    scale=st.sampled_from([0.1, 3.0]),
)
def test_tokens_are_drawn_from_what_the_modifiers_keep(seed, top_k, top_p, min_p, scale):
    # With a small scale, more than 256 tokens are needed for most values of `top_p`.
    logits_key, draw_key = jax.random.split(jax.random.key(seed))
    logits = scale * jax.random.normal(logits_key, (2, 600))
    modifiers = []
    if top_k is not None:
        modifiers.append(top_k_logits(top_k, break_ties="smallest_index"))
    if top_p is not None:
        modifiers.append(top_p_logits(top_p))
    if min_p is not None:
        modifiers.append(min_p_logits(min_p))
    kept = np.asarray(chain(*modifiers)(logits) > EXCLUDED_LOGIT)
    keys = jax.random.split(draw_key, 2)
    tokens = draw_tokens(logits, keys, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept[np.arange(2), tokens].all()
    # Another row does not change what is drawn.
    alone = draw_tokens(logits[:1], keys[:1], top_k=top_k, top_p=top_p, min_p=min_p)
    assert alone[0] == tokens[0]


@pytest.mark.parametrize("rules", [{"top_p": 0.7}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.4}])
def test_frequencies_are_the_probabilities_of_what_is_kept(rules):
    logits = jnp.log(jnp.array([0.1, 0.4, 0.3, 0.15, 0.05]))
    modifiers = []
    if "top_k" in rules:
        modifiers.append(top_k_logits(rules["top_k"]))
    if "top_p" in rules:
        modifiers.append(top_p_logits(rules["top_p"]))
    if "min_p" in rules:
        modifiers.append(min_p_logits(rules["min_p"]))
    expected = jax.nn.softmax(chain(*modifiers)(logits))
    keys = jax.random.split(jax.random.key(0), 4000)
    tokens = draw_tokens(jnp.broadcast_to(logits, (4000, 5)), keys, **rules)
    frequencies = np.bincount(tokens, minlength=5) / 4000
    np.testing.assert_allclose(frequencies, expected, atol=0.03)
