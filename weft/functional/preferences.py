"""Losses of language models that learn from preferences and rewards, computed in float32.

Both kinds take log probabilities of the tokens of answers, not of their prompts:

    pairs of answers      answer_log_probs   →   dpo_loss, ipo_loss
    answers and rewards   group_advantages   →   grpo_loss

They keep the model close to a reference, usually the model before the training.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from weft.errors import ArgumentValueError
from weft.functional.arrays import counted
from weft.functional.loss import Aux, weighted_mean


def answer_log_probs(
    token_log_probs: Float[Array, "*batch time"],
    is_answer: Num[Array, "*batch time"] | Bool[Array, "*batch time"],
) -> Float[Array, "*batch"]:
    """Returns the log probability of each answer: the sum over its tokens.

    Args:
        token_log_probs: of each token after those before it. Where `is_answer` is 0, as for the
            tokens of a prompt, it may be anything, including NaN, and has gradient 0.

    >>> token_log_probs = jnp.array([[jnp.nan, -1.0, -0.5]])
    >>> answer_log_probs(token_log_probs, jnp.array([[False, True, True]])).tolist()
    [-1.5]
    """
    log_probs = token_log_probs.astype(jnp.float32)
    return jnp.sum(counted(log_probs, is_answer), axis=-1)


def preference_margins(
    chosen_log_probs: Float[Array, "*batch"],
    rejected_log_probs: Float[Array, "*batch"],
    reference_chosen_log_probs: Float[Array, "*batch"] | None = None,
    reference_rejected_log_probs: Float[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Returns how much more a model prefers the chosen answer than the reference does.

    This is `log(p(chosen) / q(chosen)) - log(p(rejected) / q(rejected))` of the model `p` and the
    reference `q`. Multiplied by `beta`, it is the margin of the rewards that the model implies.
    Without a reference, `q` is the same for all answers. The reference has no gradient.

    Raises:
        ArgumentValueError: if the reference of only one of the answers is given.

    >>> preference_margins(jnp.array(-1.0), jnp.array(-3.0)).item()
    2.0
    """
    if (reference_chosen_log_probs is None) != (
        reference_rejected_log_probs is None
    ):
        raise ArgumentValueError(
            "preference_margins got the reference's log probabilities of only one of the two "
            "answers; pass both, or neither for a loss without a reference."
        )
    margins = _difference(chosen_log_probs, rejected_log_probs)
    if reference_chosen_log_probs is None:
        return margins
    assert reference_rejected_log_probs is not None
    reference_margins = _difference(
        reference_chosen_log_probs, reference_rejected_log_probs
    )
    return margins - jax.lax.stop_gradient(reference_margins)


def _difference(x: Array, y: Array) -> Array:
    return x.astype(jnp.float32) - y.astype(jnp.float32)


def dpo_loss(
    margins: Float[Array, "*batch"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Float[Array, "*batch"]:
    """Returns the loss of direct preference optimization for each pair of answers.

    With margins `h` it is `-log sigmoid(beta h)` (Rafailov et al., 2023, equation 7). With label
    smoothing `s` it is `-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)`, for labels that
    are wrong with probability `s` (Mitchell, 2023).

    Args:
        margins: the result of `preference_margins`.
        beta: the larger, the closer the model stays to the reference.
        label_smoothing: the probability `s`, at least 0 and below 0.5.

    Raises:
        ArgumentValueError: if `beta` or `label_smoothing` is out of range.

    >>> dpo_loss(jnp.array([0.0, 100.0]), beta=1.0).round(3).tolist()
    [0.693..., 0.0]
    """
    _check_beta("dpo_loss", beta)
    if not 0 <= label_smoothing < 0.5:
        raise ArgumentValueError(
            f"dpo_loss got {label_smoothing=}; expected the share of wrong labels, from 0 to below "
            "0.5. With half of them wrong, nothing can be learned."
        )
    logits = beta * margins.astype(jnp.float32)
    loss = jax.nn.softplus(-logits)
    if label_smoothing:
        # -log sigmoid(-x) = x - log sigmoid(x)
        loss = loss + label_smoothing * logits
    return loss


def ipo_loss(
    margins: Float[Array, "*batch"], *, beta: float = 0.1
) -> Float[Array, "*batch"]:
    """Returns the loss of identity preference optimization for each pair of answers.

    It is `(h - 1 / (2 beta))²` with margins `h` (Azar et al., 2023, equation 17, where `beta` is
    tau). Unlike that of DPO, it does not reward margins beyond `1 / (2 beta)`, and so does not
    overfit to pairs whose labels are certain.

    Args:
        margins: the result of `preference_margins`.
        beta: the larger, the closer the model stays to the reference.

    Raises:
        ArgumentValueError: if `beta` is not positive.

    >>> ipo_loss(jnp.array([5.0, 6.0]), beta=0.1).tolist()
    [0.0, 1.0]
    """
    _check_beta("ipo_loss", beta)
    return jnp.square(margins.astype(jnp.float32) - 1 / (2 * beta))


def _check_beta(function: str, beta: float) -> None:
    if not beta > 0:
        raise ArgumentValueError(
            f"{function} got {beta=}; expected a positive number, such as 0.1."
        )


def group_advantages(
    rewards: Float[Array, "*prompts answers"], *, eps: float = 1e-4
) -> Float[Array, "*prompts answers"]:
    """Returns how much better each answer is than the other answers to the same prompt.

    This is the reward minus the mean of the group, divided by its standard deviation (Shao et al.,
    2024, section 4.1.2). It is 0 if all answers have the same reward.

    Args:
        rewards: of several answers to each prompt.
        eps: is added to the standard deviation.

    >>> group_advantages(jnp.array([[1.0, 0.0], [1.0, 1.0]])).round(2).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    rewards = rewards.astype(jnp.float32)
    mean = jnp.mean(rewards, axis=-1, keepdims=True)
    deviation = jnp.std(rewards, axis=-1, keepdims=True)
    return (rewards - mean) / (deviation + eps)


def reference_divergences(
    token_log_probs: Float[Array, "*batch"],
    reference_log_probs: Float[Array, "*batch"],
) -> Float[Array, "*batch"]:
    """Returns an estimate of the Kullback-Leibler divergence from the reference for each token.

    With the log ratio `r = log(q / p)` of the reference `q` to the model `p` it is
    `exp(r) - r - 1`, which is never negative. Over tokens drawn from the model, its mean is the
    divergence (Schulman, 2020; Shao et al., 2024, equation 4).

    >>> log_probs = jnp.log(jnp.array([0.5, 0.25]))
    >>> reference_divergences(log_probs, jnp.log(jnp.array([0.5, 0.5]))).round(2).tolist()
    [0.0, 0.3...]
    """
    log_ratios = _difference(
        jax.lax.stop_gradient(reference_log_probs), token_log_probs
    )
    return jnp.expm1(log_ratios) - log_ratios


def grpo_loss(
    token_log_probs: Float[Array, "answers time"],
    advantages: Float[Array, " answers"],
    is_answer: Num[Array, "answers time"] | Bool[Array, "answers time"],
    *,
    old_log_probs: Float[Array, "answers time"] | None = None,
    reference_log_probs: Float[Array, "answers time"] | None = None,
    clip: float = 0.2,
    beta: float = 0.04,
) -> tuple[Float[Array, " answers"], Aux]:
    """Returns the loss of group relative policy optimization for each answer.

    With the ratio `r` of the token's probabilities of the model and of the one that has drawn the
    answer, it is the mean over the answer's tokens of

        -min(r * advantage, clip(r, 1 - clip, 1 + clip) * advantage) + beta * divergence

    where the divergence is that of `reference_divergences` (Shao et al., 2024, equation 3).

    Args:
        token_log_probs: of each token after those before it. Where `is_answer` is 0, it may be
            anything, including NaN, and has gradient 0.
        advantages: of the whole answers, the result of `group_advantages`. They have no gradient.
        old_log_probs: those of the model that has drawn the answers. None if it is the same model,
            so that ratios are 1, with the gradient of one.
        reference_log_probs: those of the reference; None for no divergence.
        clip: how far ratios may be from 1 before an advantage has no gradient.
        beta: the weight of the divergence.

    Returns:
        The losses, and a dict of arrays `Float[Array, "answers"]`, means over the tokens of each
        answer: `divergence`, 0 without a reference, and `clipped`, the share of tokens with a
        clipped ratio.

    Raises:
        ArgumentValueError: if `clip` is not positive, or `beta` is negative.

    >>> log_probs = jnp.log(jnp.full((2, 3), 0.5))
    >>> loss, _ = grpo_loss(log_probs, jnp.array([1.0, -1.0]), jnp.ones((2, 3)))
    >>> loss.tolist()
    [-1.0, 1.0]
    """
    if not clip > 0 or not beta >= 0:
        raise ArgumentValueError(
            f"grpo_loss got {clip=} and {beta=}; expected a positive number, such as 0.2, and a "
            "weight of at least 0."
        )
    log_probs = counted(token_log_probs.astype(jnp.float32), is_answer)
    if old_log_probs is None:
        old_log_probs = log_probs
    old_log_probs = counted(jax.lax.stop_gradient(old_log_probs), is_answer)
    ratios = jnp.exp(_difference(log_probs, old_log_probs))
    clipped_ratios = jnp.clip(ratios, 1 - clip, 1 + clip)
    token_advantages = jax.lax.stop_gradient(advantages)[:, None]
    gains = jnp.minimum(
        ratios * token_advantages, clipped_ratios * token_advantages
    )
    divergences = jnp.zeros_like(gains)
    if reference_log_probs is not None:
        divergences = reference_divergences(
            log_probs, counted(reference_log_probs, is_answer)
        )
    is_clipped = ratios * token_advantages > gains
    loss = _token_means(beta * divergences - gains, is_answer)
    return loss, {
        "divergence": _token_means(divergences, is_answer),
        "clipped": _token_means(is_clipped.astype(jnp.float32), is_answer),
    }


def _token_means(values: Array, is_answer: Array) -> Array:
    """Returns the mean over the tokens of each answer, 0 for one without any."""
    means, _ = jax.vmap(weighted_mean)(values, is_answer)
    return means
