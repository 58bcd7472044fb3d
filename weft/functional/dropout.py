"""Random dropping of elements, residual branches (`stochastic_depth`) or tokens (`drop_tokens`).

All functions draw from a given key, and always drop: callers skip them at inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from weft.errors import ArgumentValueError
from weft.functional.arrays import gathered


def dropout(
    x: Float[Array, "*shape"],
    *,
    rate: float,
    prng_key: Key[Array, ""] | None = None,
    mask: Bool[Array, "*#shape"] | None = None,
) -> Float[Array, "*shape"]:
    """Zeros elements of `x` with probability `rate`, and divides the others by `1 - rate`.

    Args:
        rate: in `[0, 1)`.
        mask: elements to keep, broadcastable to `x`, instead of a random mask.

    Raises ArgumentValueError if `rate` is not in `[0, 1)`, or both key and mask are missing.

    >>> dropout(jnp.ones(4), rate=0.5, mask=jnp.array([True, False, True, False])).tolist()
    [2.0, 0.0, 2.0, 0.0]
    """
    _check_rate(rate)
    if mask is None:
        if prng_key is None:
            raise ArgumentValueError(
                "dropout needs a prng_key to draw a mask, or the mask itself."
            )
        mask = get_dropout_mask(x.shape, prng_key=prng_key, rate=rate)
    return jnp.where(mask, x / (1 - rate), jnp.zeros((), x.dtype))


def get_dropout_mask(
    shape: Sequence[int], *, prng_key: Key[Array, ""], rate: float
) -> Bool[Array, "*shape"]:
    """Returns a mask that is True (keep) with probability `1 - rate`.

    >>> get_dropout_mask((2, 3), prng_key=jax.random.key(0), rate=0.0).all().item()
    True
    """
    _check_rate(rate)
    return jax.random.uniform(prng_key, shape) >= rate


def keep_mask(
    key: Key[Array, ""],
    rate: float,
    shape: Sequence[int],
    broadcast_dims: Sequence[int] = (),
) -> Bool[Array, "*shape"]:
    """Returns a mask that is True (keep) with probability `1 - rate`, as Flax draws it.

    Args:
        broadcast_dims: axes that share one decision; the mask has size 1 there.

    Raises ArgumentValueError if `broadcast_dims` are not axes of `shape`.

    >>> keep_mask(jax.random.key(0), 0.0, (2, 3), broadcast_dims=(-1,)).tolist()
    [[True], [True]]
    """
    sizes = list(shape)
    for axis in broadcast_dims:
        if not -len(sizes) <= axis < len(sizes):
            raise ArgumentValueError(
                f"broadcast_dims={tuple(broadcast_dims)} are not all axes of an input of shape "
                f"{tuple(shape)}."
            )
        sizes[axis] = 1
    return jax.random.bernoulli(key, 1.0 - rate, tuple(sizes))


def stochastic_depth(
    x: Float[Array, " batch *rest"],
    *,
    rate: float,
    prng_key: Key[Array, ""],
    mode: Literal["row", "batch"] = "row",
) -> Float[Array, " batch *rest"]:
    """Zeros a residual branch with probability `rate`, or scales it up (Huang et al., 2016).

    Also called drop path. The mode `"row"` decides per example, `"batch"` once for all.

    Raises ArgumentValueError if `rate` is not in `[0, 1)`, or `mode` is unknown.
    """
    if mode not in ("row", "batch"):
        raise ArgumentValueError(
            f"mode={mode!r} must be 'row' (each example) or 'batch' (all)."
        )
    num_decisions = x.shape[0] if mode == "row" else 1
    mask_shape = (num_decisions,) + (1,) * (x.ndim - 1)
    mask = get_dropout_mask(mask_shape, prng_key=prng_key, rate=rate)
    return dropout(x, rate=rate, mask=mask)


def get_stochastic_depth_linear_rate(
    peak_rate: float | None, stage_order: int, num_stages: int
) -> float | None:
    """Returns the rate of one of several stages, which grows linearly to `peak_rate` at the last.

    Args:
        peak_rate: the last stage's rate, in `[0, 1)`; None returns None.
        stage_order: counted from 0, so that the first stage is never dropped, or from 1, so that
            the last one has the peak rate.

    Raises:
        ArgumentValueError: if `peak_rate` is not in `[0, 1)`, or `stage_order` beyond `num_stages`.

    >>> get_stochastic_depth_linear_rate(0.5, stage_order=1, num_stages=4)
    0.125
    """
    if peak_rate is None:
        return None
    _check_rate(peak_rate)
    if num_stages < 1 or not 0 <= stage_order <= num_stages:
        raise ArgumentValueError(
            f"stage_order={stage_order} of num_stages={num_stages}; expected a number from 0 or 1 "
            "to the number of stages."
        )
    return peak_rate * stage_order / num_stages


def drop_tokens(
    x: Float[Array, "batch tokens dim"],
    *,
    rate: float,
    prng_key: Key[Array, ""],
    num_cls_tokens: int = 0,
) -> Float[Array, "batch kept dim"]:
    """Removes a random set of tokens from each example, in order and without scaling.

    Later layers get shorter examples, and cost less (Li et al., 2023).

    Args:
        rate: the fraction to remove, in `[0, 1)`; at least one token stays.
        num_cls_tokens: number of tokens at the front that always stay, and do not count.

    Raises ArgumentValueError if `rate` is not in `[0, 1)`.

    >>> x = jnp.ones((2, 9, 3))
    >>> drop_tokens(x, rate=0.5, prng_key=jax.random.key(0), num_cls_tokens=1).shape
    (2, 5, 3)
    """
    _check_rate(rate)
    x = gathered(x, 1)
    cls_tokens = x[:, :num_cls_tokens]
    tokens = x[:, num_cls_tokens:]
    num_kept = max(round(tokens.shape[1] * (1 - rate)), 1)
    # The first of a random permutation of each example, back in their order.
    random_order = jnp.argsort(
        jax.random.uniform(prng_key, tokens.shape[:2]), axis=1
    )
    index = jnp.sort(random_order[:, :num_kept], axis=1)
    tokens = jnp.take_along_axis(tokens, index[:, :, None], axis=1)
    return jnp.concatenate([cls_tokens, tokens], axis=1)


def _check_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ArgumentValueError(
            f"rate={rate!r} must be in [0, 1): a rate of 1 drops everything."
        )
