import logging

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.hierarchy.module import InvocationContext, set_current_context
from weft.trainer import optimizers
from weft.trainer.optimizer_base import OptParam
from weft.vdict import VDict

ONES = {"linear": {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "scale": jnp.ones(2)}


def summaries_of(tx, updates=1.0, steps=1):
    """What a transformation reports in its last step."""
    state = tx.init({"w": OptParam(jnp.ones(()))})
    for _ in range(steps):
        context = InvocationContext(
            "root", parent=None, module=None, state={}, is_training=True, prng_key=None
        )
        with set_current_context(context):
            _, state = tx.update({"w": updates}, state, {"w": OptParam(jnp.ones(()))})
    return {name: float(value) for name, value in context.get_summaries().items()}


def test_a_schedule_is_asked_with_the_steps_done_so_far():
    tx = optimizers.scale_by_schedule(lambda step: step * 10.0)
    assert summaries_of(tx, steps=3) == {"schedule_step": 2, "schedule_scale": 20}


def test_a_name_tells_two_schedules_apart():
    tx = optimizers.chain(
        optimizers.scale_by_schedule(2.0, name="a"), optimizers.scale_by_schedule(3.0, name="b")
    )
    scales = {k: v for k, v in summaries_of(tx).items() if k.endswith("scale")}
    assert scales == {"a/schedule_scale": 2, "b/schedule_scale": 3}


@pytest.mark.parametrize("flip_sign", [True, False])
def test_the_learning_rate_is_reported_as_it_was_given(flip_sign):
    fn = optimizers.scale_from_learning_rate(lambda step: 0.5 + step, flip_sign=flip_sign)
    reported = summaries_of(optimizers.scale_by_schedule(fn), steps=2)
    sign = -1 if flip_sign else 1
    assert reported == {
        "lr_schedule_step": 1,
        "learning_rate": 1.5,
        "schedule_step": 1,
        "schedule_scale": sign * 1.5,
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


def test_the_first_pattern_that_matches_the_whole_path_gives_the_scale(caplog):
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


def test_scales_by_root_mean_square_have_a_least_value():
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


def test_decay_without_weight_changes_nothing():
    params = {"w": OptParam(jnp.array(jnp.nan))}
    for tx in (optimizers.add_decayed_weights(0.0), optimizers.l2_regularizer(None)):
        updates, _ = tx.update({"w": jnp.array(1.0)}, tx.init(params), params)
        assert updates == {"w": 1.0}


def test_decay_may_depend_on_a_power_of_the_learning_rate():
    tx = optimizers.add_decayed_weights(
        0.5, learning_rate_exponent=2.0, learning_rate=lambda step: step + 1.0
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
