import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.config import config_for_function
from weft.hierarchy.base_layer import ParameterSpec
from weft.trainer import optimizers, schedule
from weft.trainer.optimizer_base import OptParam

RNG = np.random.default_rng(0)
STEPS = RNG.normal(size=(4, 3, 2)).astype(np.float32)


def run(tx, steps=STEPS, dtype=jnp.float32):
    params = {"w": OptParam(jnp.zeros(steps[0].shape, dtype))}
    state, out = tx.init(params), []
    for x in steps:
        updates, state = tx.update({"w": jnp.asarray(x, dtype)}, state, params)
        out.append(updates["w"])
    return out, state


@pytest.mark.parametrize("debias", [True, False])
def test_averages_of_updates_agree_with_optax(debias):
    out, state = run(optimizers.ema(0.9, debias=debias))
    theirs = optax.ema(0.9, debias=debias)
    optax_state = theirs.init(STEPS[0])
    for x, actual in zip(STEPS, out, strict=True):
        expected, optax_state = theirs.update(x, optax_state)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    assert int(state.count) == len(STEPS)


def test_an_integer_average_is_fixed_point_by_columns():
    exact, _ = run(optimizers.ema(0.9))
    rounded, state = run(optimizers.ema(0.9, accumulator_dtype=jnp.int8))
    assert state.ema["w"].dtype == jnp.int8
    assert state.scale["w"].shape == (2,)
    np.testing.assert_array_equal(np.max(np.abs(state.ema["w"]), axis=0), [127, 127])
    np.testing.assert_allclose(np.asarray(rounded), np.asarray(exact), atol=0.02)
    specs = optimizers.ema(0.9, accumulator_dtype=jnp.int8).partition(
        {"w": ParameterSpec((3, 2), jnp.float32, ("data", "model"))}
    )
    assert (specs.scale["w"].shape, specs.scale["w"].mesh_axes) == ((2,), ("model",))


def test_an_integer_average_of_zeros_is_zero():
    _, state = run(optimizers.ema(0.9, accumulator_dtype=jnp.int8), np.zeros((2, 3, 2)))
    assert not np.any(state.ema["w"])


def test_the_accumulator_has_its_own_dtype():
    out, state = run(optimizers.ema(0.9), dtype=jnp.bfloat16)
    assert (state.ema["w"].dtype, out[0].dtype) == (jnp.float32, jnp.bfloat16)
    _, state = run(optimizers.ema(0.9, accumulator_dtype=None), dtype=jnp.bfloat16)
    assert state.ema["w"].dtype == jnp.bfloat16


def test_averages_of_parameters_begin_at_zero():
    tx = optimizers.param_ema(decay=0.9)
    state = tx.init({"w": OptParam(jnp.ones(2))})
    updates, state = tx.update({"w": 7.0}, state, {"w": OptParam(jnp.array([1.0, 2.0]))})
    assert updates == {"w": 7.0}
    np.testing.assert_allclose(state.ema["w"], [0.1, 0.2], rtol=1e-6)
    _, state = tx.update({}, state, {"w": OptParam(jnp.array([3.0, 4.0]))})
    np.testing.assert_allclose(state.ema["w"], [0.39, 0.58], rtol=1e-6)
    assert int(state.count) == 2


def test_a_schedule_makes_them_begin_at_the_parameters():
    decay = config_for_function(schedule.ema_schedule).set(decay=0.9, warmup_steps=2)
    tx = config_for_function(optimizers.param_ema).set(decay=decay).instantiate()
    state = tx.init({"w": OptParam(jnp.ones(1))})
    averages = []
    for value in (2.0, 4.0, 6.0):
        _, state = tx.update({}, state, {"w": OptParam(jnp.array([value]))})
        averages.append(float(state.ema["w"][0]))
    np.testing.assert_allclose(averages, [2.0, 3.0, 0.9 * 3 + 0.1 * 6], rtol=1e-6)


def test_without_a_decay_no_average_is_kept():
    tx = optimizers.param_ema()
    state = tx.init({"w": OptParam(jnp.ones(1))})
    assert state == optax.EmptyState()
    assert tx.update({"w": 1.0}, state, {}) == ({"w": 1.0}, state)
    assert tx.partition({}) == optax.EmptyState()


def test_averages_of_parameters_keep_dtype_and_layout():
    spec = ParameterSpec((4, 2), jnp.bfloat16, ("data", None))
    tx = optimizers.param_ema(decay=0.9)
    copied = tx.partition({"w": spec}).ema["w"]
    assert (copied.dtype, copied.mesh_axes) == (jnp.bfloat16, ("data", None))
    params = {"w": OptParam(jnp.ones((4, 2), jnp.bfloat16))}
    _, state = jax.jit(lambda state: tx.update({}, state, params))(tx.init(params))
    assert state.ema["w"].dtype == jnp.bfloat16


def test_parameters_become_their_updates():
    tx = optimizers.replace_with_updates()
    params = {"w": OptParam(jnp.array([5.0, -1.0]))}
    updates, _ = tx.update({"w": jnp.array([2.0, 3.0])}, tx.init(params), params)
    new = optax.apply_updates({"w": params["w"].value}, updates)
    np.testing.assert_array_equal(new["w"], [2.0, 3.0])
