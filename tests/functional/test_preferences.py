"""Losses of preferences and rewards, against the formulas of their papers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import functional
from weft.errors import ArgumentValueError

RNG = np.random.default_rng(0)
PAIRS, TIME = 6, 9
IS_ANSWER = np.arange(TIME) >= RNG.integers(2, 7, size=(PAIRS, 1))
BETA = 0.3


def log_probs(*shape):
    return (-RNG.exponential(size=shape)).astype(np.float32)


CHOSEN, REJECTED = log_probs(PAIRS, TIME), log_probs(PAIRS, TIME)
REF_CHOSEN, REF_REJECTED = log_probs(PAIRS, TIME), log_probs(PAIRS, TIME)


def close(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_margins(has_reference=True):
    def total(x):
        return (x.astype(np.float64) * IS_ANSWER).sum(-1)

    margins = total(CHOSEN) - total(REJECTED)
    if has_reference:
        margins -= total(REF_CHOSEN) - total(REF_REJECTED)
    return margins


def weft_margins(chosen, has_reference=True):
    def total(x):
        return functional.answer_log_probs(jnp.asarray(x), jnp.asarray(IS_ANSWER))

    if not has_reference:
        return functional.preference_margins(total(chosen), total(REJECTED))
    return functional.preference_margins(
        total(chosen), total(REJECTED), total(REF_CHOSEN), total(REF_REJECTED)
    )


# Each with its derivative by the margin.
LOSSES = {
    "dpo": (
        lambda h: functional.dpo_loss(h, beta=BETA),
        lambda h: -np.log(sigmoid(BETA * h)),
        lambda h: -BETA * (1 - sigmoid(BETA * h)),
    ),
    "smoothed": (
        lambda h: functional.dpo_loss(h, beta=BETA, label_smoothing=0.2),
        lambda h: -0.8 * np.log(sigmoid(BETA * h)) - 0.2 * np.log(sigmoid(-BETA * h)),
        lambda h: BETA * (0.2 * sigmoid(BETA * h) - 0.8 * (1 - sigmoid(BETA * h))),
    ),
    "ipo": (
        lambda h: functional.ipo_loss(h, beta=BETA),
        lambda h: (h - 1 / (2 * BETA)) ** 2,
        lambda h: 2 * (h - 1 / (2 * BETA)),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("has_reference", [True, False])
def test_losses_of_pairs_and_their_gradients_are_those_of_the_papers(name, has_reference):
    loss, formula, derivative = LOSSES[name]
    margins = expected_margins(has_reference)

    @jax.jit
    def value_and_grad(chosen):
        def total(x):
            losses = loss(weft_margins(x, has_reference))
            return losses.sum(), losses

        return jax.value_and_grad(total, has_aux=True)(chosen)

    (_, losses), grads = value_and_grad(CHOSEN)
    close(losses, formula(margins))
    close(grads, derivative(margins)[:, None] * IS_ANSWER)


def test_tokens_of_prompts_may_be_nan_and_have_no_gradient():
    chosen = np.where(IS_ANSWER, CHOSEN, np.nan)

    def loss(x):
        return functional.dpo_loss(weft_margins(x)).sum()

    value, grads = jax.value_and_grad(loss)(jnp.asarray(chosen))
    assert np.isfinite(value)
    assert (np.asarray(grads)[~IS_ANSWER] == 0).all()
    assert (np.asarray(grads)[IS_ANSWER] != 0).all()


def test_reference_has_no_gradient():
    def loss(ref):
        return functional.dpo_loss(
            functional.preference_margins(jnp.zeros(2), jnp.zeros(2), ref, ref)
        ).sum()

    assert (jax.grad(loss)(jnp.ones(2)) == 0).all()


def test_losses_are_finite_far_from_the_reference_and_computed_in_float32_from_bfloat16():
    margins = jnp.array([-1e4, 1e4], jnp.bfloat16)
    loss = functional.dpo_loss(margins, beta=1.0)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [1e4, 0], rtol=1e-2)
    tokens = jnp.full((1, 1000), -0.01, jnp.bfloat16)
    total = functional.answer_log_probs(tokens, jnp.ones((1, 1000)))
    # A sum in bfloat16 would end at 4, where adding 0.01 changes nothing.
    np.testing.assert_allclose(total, [-10], rtol=1e-2)


REWARDS = RNG.integers(0, 3, size=(2, 3)).astype(np.float32)


def test_advantages_are_normalized_in_each_group():
    mean, deviation = REWARDS.mean(-1, keepdims=True), REWARDS.std(-1, keepdims=True)
    close(functional.group_advantages(jnp.asarray(REWARDS)), (REWARDS - mean) / (deviation + 1e-4))
    assert (functional.group_advantages(jnp.full((2, 4), 0.7)) == 0).all()


def grpo_formula(log_probs, old, reference, advantages, clip=0.2, beta=0.04):
    """Equation 3 of Shao et al., 2024, a token at a time; also the derivative by log_probs."""
    losses, grads = np.zeros(PAIRS), np.zeros((PAIRS, TIME))
    for i in range(PAIRS):
        length = IS_ANSWER[i].sum()
        for t in np.flatnonzero(IS_ANSWER[i]):
            ratio = np.exp(log_probs[i, t] - old[i, t])
            clipped = np.clip(ratio, 1 - clip, 1 + clip)
            gain = min(ratio * advantages[i], clipped * advantages[i])
            has_grad = float(ratio * advantages[i] <= clipped * advantages[i])
            r = np.exp(reference[i, t] - log_probs[i, t])
            divergence = r - np.log(r) - 1
            losses[i] += (-gain + beta * divergence) / length
            grads[i, t] = (-has_grad * ratio * advantages[i] + beta * (1 - r)) / length
    return losses, grads


def test_grpo_and_its_gradient_are_those_of_the_paper():
    old = CHOSEN + RNG.normal(scale=0.3, size=CHOSEN.shape).astype(np.float32)
    advantages = RNG.normal(size=PAIRS).astype(np.float32)
    hidden = np.where(IS_ANSWER, CHOSEN, np.nan)

    @jax.jit
    def value_and_grad(x):
        def total(x):
            losses, aux = functional.grpo_loss(
                x,
                jnp.asarray(advantages),
                jnp.asarray(IS_ANSWER),
                old_log_probs=jnp.asarray(old),
                reference_log_probs=jnp.asarray(REF_CHOSEN),
            )
            return losses.sum(), (losses, aux)

        return jax.value_and_grad(total, has_aux=True)(x)

    (_, (losses, aux)), grads = value_and_grad(hidden)
    expected_losses, expected_grads = grpo_formula(CHOSEN, old, REF_CHOSEN, advantages)
    close(losses, expected_losses)
    close(grads, expected_grads)
    ratios = np.exp(CHOSEN - old)
    is_above = (ratios > 1.2) & (advantages[:, None] > 0)
    is_below = (ratios < 0.8) & (advantages[:, None] < 0)
    is_clipped = (is_above | is_below) & IS_ANSWER
    close(aux["clipped"], is_clipped.sum(-1) / IS_ANSWER.sum(-1))


def test_first_step_of_grpo_is_the_policy_gradient():
    advantages = np.array([1.0, -2.0], np.float32)
    is_answer = np.array([[0, 1, 1], [0, 0, 0]])  # the second one is empty

    def total(x):
        return functional.grpo_loss(x, advantages, jnp.asarray(is_answer))[0].sum()

    value, grads = jax.value_and_grad(total)(jnp.asarray(log_probs(2, 3)))
    close(value, -1.0)
    close(grads, [[0, -0.5, -0.5], [0, 0, 0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: functional.preference_margins(jnp.ones(1), jnp.ones(1), jnp.ones(1)),
            "only one of the two answers; pass both, or neither",
        ),
        (lambda: functional.dpo_loss(jnp.ones(1), beta=0), "beta=0; expected a positive number"),
        (
            lambda: functional.dpo_loss(jnp.ones(1), label_smoothing=0.5),
            "label_smoothing=0.5; expected the share of wrong labels",
        ),
        (lambda: functional.ipo_loss(jnp.ones(1), beta=-1.0), "ipo_loss got beta=-1.0"),
        (
            lambda: functional.grpo_loss(jnp.ones((1, 1)), jnp.ones(1), jnp.ones((1, 1)), clip=0.0),
            "clip=0.0 and beta=0.04; expected a positive number",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ArgumentValueError, match=message):
        call()
