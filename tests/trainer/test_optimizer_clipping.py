import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.config import config_for_function
from weft.errors import OptimizerArgumentError
from weft.hierarchy.module import InvocationContext, set_current_context
from weft.struct import VDict
from weft.trainer import optimizers
from weft.trainer.optimizers.base import OptParam
from weft.trainer.optimizers.clipping import global_norm, skips_undefined

RNG = np.random.default_rng(0)
GRADS = {"w": RNG.normal(size=(3, 4)).astype(np.float32), "b": np.array([3.0, -4.0], np.float32)}


def step(tx, updates):
    """Returns the updates, and what is reported."""
    context = InvocationContext(
        "root", parent=None, module=None, state={}, is_training=True, prng_key=None
    )
    with set_current_context(context):
        updates, _ = tx.update(jax.tree.map(jnp.asarray, updates), optax.EmptyState(), None)
    return updates, {name: float(x) for name, x in context.get_summaries().items()}


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_agrees_with_optax(max_norm):
    updates, reported = step(optimizers.clip_by_global_norm(max_norm), GRADS)
    expected, _ = optax.clip_by_global_norm(max_norm).update(GRADS, optax.EmptyState())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, expected)
    norm = float(optax.tree.norm(GRADS))
    np.testing.assert_allclose(reported["gradient_norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(reported["gradient_scale"], min(1, max_norm / norm), rtol=1e-6)


@pytest.mark.parametrize(
    ("updates", "norm"),
    [
        ({"w": jnp.full((3, 4), -1e30), "b": jnp.full(4, 1e30)}, 4e30),
        ({"w": jnp.array([6e25 + 8e25j]), "b": jnp.ones(2)}, 1e26),
        ([jnp.full(9, 3e38)], np.finfo(np.float32).max),
        ([jnp.array([1.0, jnp.inf])], np.inf),
        ([jnp.array([1e30, jnp.nan, jnp.inf])], np.nan),
    ],
    ids=["large", "complex", "at most the largest", "infinite", "no number"],
)
def test_global_norm_of_any_tree(updates, norm):
    for compute in (global_norm, jax.jit(global_norm)):
        np.testing.assert_allclose(compute(updates), norm, rtol=1e-6)


def test_large_updates_are_clipped():
    clip = optimizers.clip_by_global_norm(0.5)
    updates, reported = step(clip, jax.tree.map(lambda g: g * np.float32(1e30), GRADS))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, step(clip, GRADS)[0]
    )
    np.testing.assert_allclose(reported["gradient_norm"], 1e30 * optax.tree.norm(GRADS), rtol=1e-5)


def test_large_updates_are_dropped():
    norm = float(optax.tree.norm(GRADS))
    kept, reported = step(optimizers.clip_by_global_norm(drop_norm=norm * 1.01), GRADS)
    jax.tree.map(np.testing.assert_array_equal, kept, GRADS)
    assert reported["gradient_scale"] == 1
    dropped, reported = step(optimizers.clip_by_global_norm(drop_norm=norm * 0.99), GRADS)
    assert all(not np.any(x) for x in jax.tree.leaves(dropped))
    assert reported["gradient_scale"] == 0


def test_nan_is_not_hidden():
    broken = {**GRADS, "b": np.array([np.nan, 1.0], np.float32)}
    for tx in (optimizers.clip_by_global_norm(1.0), optimizers.clip_by_global_norm(drop_norm=1.0)):
        updates, reported = step(tx, broken)
        assert np.isnan(updates["w"]).all()
        assert np.isnan(reported["gradient_scale"])


def test_updates_keep_their_dtype():
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), GRADS)
    for tx in (optimizers.clip_by_global_norm(0.1), optimizers.clip_by_block_rms(0.1)):
        assert {x.dtype for x in jax.tree.leaves(step(tx, low)[0])} == {jnp.dtype(jnp.bfloat16)}


def test_blocks_are_clipped_separately():
    stacked = np.stack([GRADS["w"], 100 * GRADS["w"]])
    updates, reported = step(
        optimizers.clip_by_block_rms(0.5, summary_suffix="norm"),
        {"small": GRADS["b"] / 100, "repeat": VDict(layer={"w": stacked})},
    )
    rms = np.sqrt(np.mean(stacked**2, axis=(1, 2)))
    np.testing.assert_allclose(updates["small"], GRADS["b"] / 100, rtol=1e-6)
    expected = stacked / np.maximum(1, rms / 0.5)[:, None, None]
    np.testing.assert_allclose(updates["repeat"]["layer"]["w"], expected, rtol=1e-5)
    assert set(reported) == {"small/norm", "repeat/0/layer/w/norm", "repeat/1/layer/w/norm"}
    np.testing.assert_allclose(reported["repeat/1/layer/w/norm"], rms[1], rtol=1e-6)


PARAMS = {"w": OptParam(jnp.zeros(2))}
TRACE = config_for_function(optax.trace).set(decay=0.5)
skip_and_clip = optimizers.skip_and_clip_by_global_norm


def gradient(norm):
    return {"w": jnp.array([norm, 0.0])}


def run(tx, norms):
    """Returns the first components of the updates, the last state, and the last report."""
    state, first = tx.init(PARAMS), []
    for norm in norms:
        context = InvocationContext(
            "root", parent=None, module=None, state={}, is_training=True, prng_key=None
        )
        with set_current_context(context):
            updates, state = tx.update(gradient(norm), state, PARAMS)
        first.append(float(updates["w"][0]))
    return first, state, {name: float(x) for name, x in context.get_summaries().items()}


@pytest.mark.parametrize(
    ("tx", "skips"),
    [
        (optimizers.chain(optax.trace(0.5), skip_and_clip(TRACE)), True),
        (optax.chain(optax.zero_nans(), optax.sgd(0.1)), True),
        (optax.apply_if_finite(optax.sgd(0.1), 3), True),
        (optax.adam(0.1), False),
    ],
    ids=["skip and clip", "zero nans", "apply if finite", "adam"],
)
def test_skips_undefined_is_detected_from_the_state(tx, skips):
    assert skips_undefined(optimizers.chain(tx).init(PARAMS)) is skips


def test_skipped_step_keeps_state():
    kept, kept_state, _ = run(skip_and_clip(TRACE, drop_norm=5.0), [1.0, 2.0])
    for bad in (9.0, np.nan, np.inf, -np.inf):
        first, state, reported = run(skip_and_clip(TRACE, drop_norm=5.0), [1.0, bad, 2.0])
        assert first == [kept[0], 0.0, kept[1]]
        jax.tree.map(np.testing.assert_array_equal, state.inner_state, kept_state.inner_state)
        assert reported["nonvalid_count"] == int(state.nonvalid_count) == 1


def test_large_first_gradient_keeps_statistics_finite():
    tx = skip_and_clip(
        optax.scale(1.0),
        drop_norm=optimizers.drop_norm_by_grad_norm_stddev(min_count=1),
        grad_norm_ema_decay=0.9,
    )
    _, state, reported = run(tx, [1e25, 1.0])
    assert reported["nonvalid_count"] == 0
    assert np.isfinite(state.grad_norm_ema) and np.isfinite(state.grad_norm_square_ema)


def test_limits_may_follow_the_mean_norm():
    tx = skip_and_clip(
        optax.scale(1.0),
        drop_norm=config_for_function(optimizers.drop_norm_by_grad_norm_ema).set(
            multipliers=(3, 10)
        ),
        grad_norm_ema_decay=0.5,
    )
    # The first step has no limit; then the mean is 1, and 4 and 20 are above three times that.
    first, state, reported = run(tx, [1.0, 4.0, 20.0, 2.0])
    assert first == [1.0, 0.0, 0.0, 2.0]
    assert (int(state.count), int(state.nonvalid_count)) == (2, 2)
    assert {k: int(v) for k, v in state.drop_stats.items()} == {"3x_ema": 2, "10x_ema": 1}
    # The mean of the steps that count, corrected for its beginning: (0.25 * 1 + 0.5 * 2) / 0.75.
    np.testing.assert_allclose(state.grad_norm_ema, 5 / 3, rtol=1e-6)
    np.testing.assert_allclose(state.grad_norm_square_ema, 3.0, rtol=1e-6)
    assert reported["gradient_norm_ema"] == 1.0
    assert reported["count_exceeds_10x_ema"] == 1


def test_limits_may_follow_the_standard_deviation():
    tx = skip_and_clip(
        optax.scale(1.0),
        drop_norm=optimizers.drop_norm_by_grad_norm_stddev(min_count=2, multipliers=(2,)),
        grad_norm_ema_decay=0.5,
    )
    # After 1 and 9 the mean is 19/3 and the standard deviation sqrt(163/3 - (19/3)²) = 3.77.
    assert run(tx, [1.0, 9.0, 13.8])[0] == [1.0, 9.0, np.float32(13.8)]
    assert run(tx, [1.0, 9.0, 13.9])[0] == [1.0, 9.0, 0.0]
    assert run(tx, [1.0, 900.0])[0] == [1.0, 900.0]


def test_nan_step_does_not_affect_statistics():
    tx = skip_and_clip(
        optax.scale(1.0),
        drop_norm=optimizers.drop_norm_by_grad_norm_ema(),
        grad_norm_ema_decay=0.9,
    )
    _, state, _ = run(tx, [1.0, np.nan, 1.0])
    np.testing.assert_allclose(state.grad_norm_ema, 1.0, rtol=1e-6)
    assert all(int(count) == 0 for count in state.drop_stats.values())


def test_statistics_need_a_decay():
    with pytest.raises(OptimizerArgumentError, match=r"set for example grad_norm_ema_decay=0\.99"):
        skip_and_clip(optax.scale(1.0), drop_norm=optimizers.drop_norm_by_grad_norm_ema())
