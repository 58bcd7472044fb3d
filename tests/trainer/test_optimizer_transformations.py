import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.config import config_for_function
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.module import InvocationContext, set_current_context
from weft.hierarchy.parameter_spec import FactorizationSpec
from weft.struct import VDict
from weft.trainer import optimizers, schedule
from weft.trainer.optimizers.base import OptParam
from weft.trainer.optimizers.transformations import scale_by_factored_rms

ONES = {"linear": {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "scale": jnp.ones(2)}


def summaries_of(tx, updates=1.0, steps=1):
    """Returns the summaries of a transformation's last step."""
    state = tx.init({"w": OptParam(jnp.ones(()))})
    for _ in range(steps):
        context = InvocationContext(
            "root", parent=None, module=None, state={}, is_training=True, prng_key=None
        )
        with set_current_context(context):
            _, state = tx.update({"w": updates}, state, {"w": OptParam(jnp.ones(()))})
    return {name: float(value) for name, value in context.get_summaries().items()}


@pytest.mark.parametrize("flip_sign", [True, False])
def test_learning_rate_is_reported_unsigned(flip_sign):
    fn = optimizers.scale_from_learning_rate(lambda step: 0.5 + step, flip_sign=flip_sign)
    reported = summaries_of(optimizers.scale_by_schedule(fn), steps=2)
    sign = -1 if flip_sign else 1
    assert reported == {
        "lr_schedule_step": 2,
        "learning_rate": 2.5,
        "schedule_step": 2,
        "schedule_scale": sign * 2.5,
    }


def test_whole_optimizers_report_their_learning_rate():
    adam = {"b1": 0.9, "b2": 0.99, "eps": 1e-8}
    for tx in (
        optimizers.adamw_optimizer(0.5, **adam),
        optimizers.adamw_decoupled_optimizer(0.5, **adam, update_schedule=0.1),
        optimizers.lion_optimizer(0.5, 0.9, 0.99),
        optimizers.sgd_optimizer(0.5, decouple_weight_decay=True),
    ):
        assert summaries_of(tx)["learning_rate"] == 0.5


def test_first_full_path_match_sets_the_scale(caplog):
    scale = optimizers.per_param_scale_by_path(
        scale_by_path=[("scale", 0.5), (".*/bias", 0.0), ("linear/.*", 2.0), ("lin", 9.0)],
        description="weight decay",
        default_scale=7.0,
    )
    with caplog.at_level(logging.INFO):
        scales = scale(ONES)
    assert scales == {"linear": {"weight": 2.0, "bias": 0.0}, "scale": 0.5}
    assert "weight decay of linear/bias: 0.0" in caplog.messages
    assert scale({"other": 1.0}) == {"other": 7.0}


def test_rms_scales_have_a_minimum():
    scales = optimizers.per_param_scale_by_rms(min_scale=0.5)(
        {"a": OptParam(jnp.array([3.0, -4.0])), "b": OptParam(jnp.zeros(2))}
    )
    np.testing.assert_allclose(scales["a"], np.sqrt(12.5), rtol=1e-6)
    np.testing.assert_allclose(scales["b"], 0.5)


def test_layers_of_a_stack_are_scaled_one_by_one():
    values = np.array([[3.0, 4.0], [30.0, 40.0]], np.float32)
    params = VDict(layer={"w": OptParam(jnp.asarray(values))})
    updates = VDict(layer={"w": jnp.ones((2, 2))})
    by_rms = optimizers.scale_by_param_block_rms()
    scaled, _ = by_rms.update(updates, by_rms.init(params), params)
    rms = np.sqrt(np.mean(values**2, axis=1, keepdims=True)) * np.ones((2, 2))
    np.testing.assert_allclose(scaled["layer"]["w"], rms, rtol=1e-6)
    by_ratio = optimizers.scale_by_trust_ratio()
    scaled, _ = by_ratio.update(updates, by_ratio.init(params), params)
    np.testing.assert_allclose(scaled["layer"]["w"][:, 0], [5 / np.sqrt(2), 50 / np.sqrt(2)])


def test_decay_may_depend_on_a_power_of_the_learning_rate():
    tx = optimizers.add_decayed_weights(
        0.5, learning_rate_exponent=2.0, learning_rate=lambda step: step * 1.0
    )
    params = {"w": OptParam(jnp.array(1.0))}
    state = tx.init(params)
    for expected in (0.5, 2.0, 4.5):
        updates, state = tx.update({"w": jnp.array(0.0)}, state, params)
        assert float(updates["w"]) == expected
    assert int(state.count) == 3


def test_decay_follows_the_layers_scale():
    tx = optimizers.add_decayed_weights(0.5)
    params = {
        "decayed": OptParam(jnp.array(1.0)),
        "spared": OptParam(jnp.array(1.0), weight_decay_scale=0.0),
    }
    updates, _ = tx.update({"decayed": 0.0, "spared": 0.0}, tx.init(params), params)
    assert updates == {"decayed": 0.5, "spared": 0.0}
    assert tx.init(params) == optimizers.AddDecayedWeightsState(count=None)


def test_scale_agrees_with_optax():
    tx = optimizers.scale(3.0)
    params = {"w": OptParam(jnp.array(1.0))}
    assert tx.update({"w": 2.0}, optax.EmptyState(), params)[0] == {"w": 6.0}


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


def test_integer_average_is_fixed_point_per_column():
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


def test_accumulator_has_its_own_dtype():
    out, state = run(optimizers.ema(0.9), dtype=jnp.bfloat16)
    assert (state.ema["w"].dtype, out[0].dtype) == (jnp.float32, jnp.bfloat16)
    _, state = run(optimizers.ema(0.9, accumulator_dtype=None), dtype=jnp.bfloat16)
    assert state.ema["w"].dtype == jnp.bfloat16


def test_parameter_averages_start_at_zero():
    tx = optimizers.param_ema(decay=0.9)
    state = tx.init({"w": OptParam(jnp.ones(2))})
    updates, state = tx.update({"w": 7.0}, state, {"w": OptParam(jnp.array([1.0, 2.0]))})
    assert updates == {"w": 7.0}
    np.testing.assert_allclose(state.ema["w"], [0.1, 0.2], rtol=1e-6)
    _, state = tx.update({}, state, {"w": OptParam(jnp.array([3.0, 4.0]))})
    np.testing.assert_allclose(state.ema["w"], [0.39, 0.58], rtol=1e-6)
    assert int(state.count) == 2


def test_schedule_starts_averages_at_parameters():
    decay = config_for_function(schedule.ema_schedule).set(decay=0.9, warmup_steps=2)
    tx = config_for_function(optimizers.param_ema).set(decay=decay).instantiate()
    state = tx.init({"w": OptParam(jnp.ones(1))})
    averages = []
    for value in (2.0, 4.0, 6.0):
        _, state = tx.update({}, state, {"w": OptParam(jnp.array([value]))})
        averages.append(float(state.ema["w"][0]))
    np.testing.assert_allclose(averages, [2.0, 3.0, 0.9 * 3 + 0.1 * 6], rtol=1e-6)


def test_averages_of_parameters_keep_dtype_and_layout():
    spec = ParameterSpec((4, 2), jnp.bfloat16, ("data", None))
    tx = optimizers.param_ema(decay=0.9)
    copied = tx.partition({"w": spec}).ema["w"]
    assert (copied.dtype, copied.mesh_axes) == (jnp.bfloat16, ("data", None))
    params = {"w": OptParam(jnp.ones((4, 2), jnp.bfloat16))}
    _, state = jax.jit(lambda state: tx.update({}, state, params))(tx.init(params))
    assert state.ema["w"].dtype == jnp.bfloat16


def param(shape, *axes):
    return OptParam(jnp.zeros(shape), FactorizationSpec(axes) if axes else None)


def run_factored(tx, param, grads):
    state = tx.init({"w": param})
    for grad in grads:
        updates, state = tx.update({"w": jnp.asarray(grad)}, state, {"w": param})
    return updates["w"], state


@pytest.mark.parametrize("axes", [("row", "col"), ("col", "row")])
def test_factors_agree_with_optax(axes):
    grads = RNG.normal(size=(3, 128, 256)).astype(np.float32)
    ours, state = run_factored(
        scale_by_factored_rms(schedule.adafactor_decay_rate(0.8)), param((128, 256), *axes), grads
    )
    theirs = optax.scale_by_factored_rms(decay_rate=0.8, epsilon=1e-30)
    optax_state = theirs.init(grads[0])
    for grad in grads:
        expected, optax_state = theirs.update(grad, optax_state, grad)
    np.testing.assert_allclose(ours, expected, rtol=2e-4)
    assert sorted([state.v_row["w"].shape, state.v_col["w"].shape]) == [(128,), (256,)]
    assert state.v["w"].shape == (1,)


def test_moments_without_factors():
    grads = RNG.normal(size=(2, 5)).astype(np.float32)
    updates, state = run_factored(scale_by_factored_rms(0.9, eps=0.5), param((5,)), grads)
    v = 0.9 * 0.1 * (grads[0] ** 2 + 0.5) + 0.1 * (grads[1] ** 2 + 0.5)
    np.testing.assert_allclose(state.v["w"], v, rtol=1e-5)
    np.testing.assert_allclose(updates, grads[1] / np.sqrt(v), rtol=1e-5)
    assert state.v_row["w"].shape == state.v_col["w"].shape == (1,)


def test_other_axes_are_batch_axes():
    grad = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    stacked, state = run_factored(
        scale_by_factored_rms(0.9), param((2, 3, 4), None, "row", "col"), [grad]
    )
    assert (state.v_row["w"].shape, state.v_col["w"].shape) == ((2, 4), (2, 3))
    for i in range(2):
        alone, _ = run_factored(scale_by_factored_rms(0.9), param((3, 4), "row", "col"), [grad[i]])
        np.testing.assert_allclose(stacked[i], alone, rtol=1e-5)


def test_one_named_axis_is_not_enough():
    _, state = run_factored(
        scale_by_factored_rms(0.9), param((3, 4), "row", None), [np.ones((3, 4))]
    )
    assert state.v["w"].shape == (3, 4)


def test_factors_drop_the_reduced_axis():
    specs = {
        "w": ParameterSpec(
            shape=(2, 3, 4),
            dtype=jnp.bfloat16,
            mesh_axes=("stage", "data", "model"),
            factorization=FactorizationSpec((None, "row", "col")),
        ),
        "b": ParameterSpec(shape=(4,), dtype=jnp.float32, mesh_axes=("model",)),
    }
    state = scale_by_factored_rms(0.9).partition(specs)
    assert (state.v_row["w"].shape, state.v_row["w"].mesh_axes) == ((2, 4), ("stage", "model"))
    assert (state.v_col["w"].shape, state.v_col["w"].mesh_axes) == ((2, 3), ("stage", "data"))
    assert (state.v["w"].shape, tuple(state.v["b"].mesh_axes)) == ((1,), ("model",))
    assert {spec.dtype for spec in jax.tree.leaves(state.v)} == {jnp.float32}
    whole = scale_by_factored_rms(0.9, factored=False).partition(specs)
    assert (whole.v["w"].shape, whole.v_row["w"].shape) == ((2, 3, 4), (1,))
