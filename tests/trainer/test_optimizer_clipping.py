import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.hierarchy.module import InvocationContext, set_current_context
from weft.trainer import optimizers
from weft.trainer.optimizer_clipping import global_norm
from weft.vdict import VDict

RNG = np.random.default_rng(0)
GRADS = {"w": RNG.normal(size=(3, 4)).astype(np.float32), "b": np.array([3.0, -4.0], np.float32)}


def step(tx, updates):
    """The updates, and what is reported."""
    context = InvocationContext(
        "root", parent=None, module=None, state={}, is_training=True, prng_key=None
    )
    with set_current_context(context):
        updates, _ = tx.update(jax.tree.map(jnp.asarray, updates), optax.EmptyState(), None)
    return updates, {name: float(x) for name, x in context.get_summaries().items()}


def test_the_norm_is_computed_in_float32():
    many = {"w": jnp.full((10_000,), 0.01, jnp.bfloat16)}
    np.testing.assert_allclose(global_norm(many), 1.0, rtol=1e-2)
    assert global_norm({}) == 0.0


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
def test_the_norm_is_a_number_wherever_the_updates_are(updates, norm):
    for compute in (global_norm, jax.jit(global_norm)):
        np.testing.assert_allclose(compute(updates), norm, rtol=1e-6)


def test_large_updates_are_clipped_as_others_are():
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


def test_what_is_no_number_is_not_hidden():
    broken = {**GRADS, "b": np.array([np.nan, 1.0], np.float32)}
    for tx in (optimizers.clip_by_global_norm(1.0), optimizers.clip_by_global_norm(drop_norm=1.0)):
        updates, reported = step(tx, broken)
        assert np.isnan(updates["w"]).all()
        assert np.isnan(reported["gradient_scale"])


def test_without_limits_the_norm_is_only_reported():
    updates, reported = step(optimizers.clip_by_global_norm(), GRADS)
    jax.tree.map(np.testing.assert_array_equal, updates, GRADS)
    assert list(reported) == ["gradient_norm"]


def test_updates_keep_their_dtype():
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), GRADS)
    for tx in (optimizers.clip_by_global_norm(0.1), optimizers.clip_by_block_rms(0.1)):
        assert {x.dtype for x in jax.tree.leaves(step(tx, low)[0])} == {jnp.dtype(jnp.bfloat16)}


def test_each_block_is_clipped_by_its_own_size():
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


def test_blocks_may_be_reported_and_not_clipped():
    updates, reported = step(optimizers.clip_by_block_rms(None, summary_suffix="rms"), GRADS)
    jax.tree.map(np.testing.assert_array_equal, updates, GRADS)
    np.testing.assert_allclose(reported["b/rms"], np.sqrt(12.5), rtol=1e-6)
    assert step(optimizers.clip_by_block_rms(1.0), GRADS)[1] == {}
