import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft import serialization
from weft.core import FrozenDict
from weft.errors import TrainStateError
from weft.training.train_state import (
    OVERWRITE_WITH_GRADIENT,
    DynamicScale,
    EarlyStopping,
    TrainState,
)


class WithStats(TrainState):
    batch_stats: dict


def made(params, cls=TrainState, tx=None, **kwargs):
    return cls.create(apply_fn=None, params=params, tx=tx or optax.sgd(0.5), **kwargs)


def test_step_updates_params_and_count():
    state = made({"w": jnp.ones(2)}, tx=optax.sgd(0.5, momentum=0.9))
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    state = step(step(state, {"w": jnp.ones(2)}), {"w": jnp.zeros(2)})
    assert state.step == 2
    np.testing.assert_allclose(state.params["w"], 1 - 0.5 - 0.5 * 0.9, rtol=1e-5)


def test_extra_fields_are_set_with_step():
    state = made({"w": jnp.ones(2)}, WithStats, batch_stats={"mean": 0})
    state = state.apply_gradients(grads={"w": jnp.ones(2)}, batch_stats={"mean": 1})
    assert state.batch_stats == {"mean": 1}
    assert jax.tree.leaves(made({}, WithStats, batch_stats=3)) == [0, 3]


@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_overwrite_with_gradient(kind):
    params = kind(
        {
            "params": {"w": jnp.ones(2)},
            OVERWRITE_WITH_GRADIENT: {"scale": jnp.zeros(2)},
            "constants": {"c": jnp.ones(1)},
        }
    )
    state = made(params, tx=optax.adam(0.5))
    assert state.opt_state[0].mu == {"w": pytest.approx([0, 0])}
    new = {"params": {"w": jnp.ones(2)}, OVERWRITE_WITH_GRADIENT: {"scale": jnp.full(2, 7.0)}}
    state = state.apply_gradients(grads=kind(new))
    assert type(state.params) is kind
    np.testing.assert_allclose(state.params["params"]["w"], 0.5, rtol=1e-5)
    np.testing.assert_array_equal(state.params[OVERWRITE_WITH_GRADIENT]["scale"], [7, 7])
    np.testing.assert_array_equal(state.params["constants"]["c"], [1])


def test_collection_must_be_in_both():
    plain, both = {"params": jnp.ones(2)}, {"params": jnp.ones(2), OVERWRITE_WITH_GRADIENT: {}}
    with pytest.raises(TrainStateError, match=r"params have the collection .* but grads do not"):
        made(both).apply_gradients(grads=plain)
    with pytest.raises(TrainStateError, match=r"grads have the collection .* but params do not"):
        made(plain).apply_gradients(grads=both)
    with pytest.raises(TrainStateError, match=r"collections \['w', '_over.*expected 'params'"):
        made({"w": jnp.ones(2), OVERWRITE_WITH_GRADIENT: {}})


def test_state_is_saved_and_restored():
    state = made({"w": jnp.ones(2)}, tx=optax.adam(0.1))
    moved = state.apply_gradients(grads={"w": jnp.ones(2)})
    back = serialization.from_bytes(state, serialization.to_bytes(moved))
    assert back.step == 1 and back.tx is state.tx
    np.testing.assert_array_equal(back.opt_state[0].mu["w"], moved.opt_state[0].mu["w"])


X = jnp.arange(3.0)


def loss(x, y=1.0):
    return jnp.sum(x**2) * y


def test_value_and_gradients_are_not_scaled():
    result = DynamicScale(scale=1024.0).value_and_grad(loss, argnums=(0, 1))(X, 2.0)
    assert result.finite and result.aux == 10.0
    np.testing.assert_array_equal(result.grad[0], 4 * X)
    assert result.grad[1] == 5.0


def test_has_aux_returns_aux_with_value():
    def with_rest(x, y):
        return loss(x, y), {"x": x}

    value, rest = DynamicScale().value_and_grad(with_rest, has_aux=True)(X, y=2.0).aux
    assert value == 10.0 and rest["x"].tolist() == X.tolist()


def test_small_gradients_of_half_precision_survive():
    x = jnp.array(1e-4, jnp.float16)
    tiny = lambda x: x * jnp.float16(1e-2) * jnp.float16(1e-6)  # noqa: E731
    assert jax.grad(tiny)(x) == 0
    result = DynamicScale(scale=2.0**15).value_and_grad(tiny)(x)
    assert result.grad.dtype == jnp.float32
    assert result.grad == pytest.approx(1e-8, rel=0.1)


def test_scale_grows_after_finite_steps_and_falls_after_others():
    dynamic, scales = DynamicScale(growth_interval=2, scale=4.0), []
    step = jax.jit(lambda d, x: d.value_and_grad(loss)(x))
    for x in (X, X, X, jnp.inf * X, X, X, X):
        dynamic, finite, _, _ = step(dynamic, x)
        scales.append((float(dynamic.scale), int(dynamic.fin_steps), bool(finite)))
    assert scales == [
        (4, 1, True),
        (4, 2, True),
        (8, 0, True),
        (4, 0, False),
        (4, 1, True),
        (4, 2, True),
        (8, 0, True),
    ]


@pytest.mark.parametrize("minimum, expected", [(3.0, 3.0), (None, 2.0)])
def test_minimum_scale_is_respected(minimum, expected):
    dynamic = DynamicScale(scale=4.0, minimum_scale=minimum)
    assert dynamic.value_and_grad(loss)(jnp.nan * X).dynamic_scale.scale == expected


def test_scale_does_not_overflow():
    dynamic = DynamicScale(scale=3e38, growth_interval=0)
    scale = dynamic.value_and_grad(jnp.sum)(X).dynamic_scale.scale
    assert scale == jnp.finfo(jnp.float32).max


def test_gradients_are_averaged_and_checked_over_axis():
    def step(x):
        return DynamicScale(scale=4.0).value_and_grad(loss, axis_name="i")(x)

    result = jax.vmap(step, axis_name="i")(jnp.stack([X, X + 1]))
    np.testing.assert_allclose(result.grad, jnp.stack([2 * X + 1, 2 * X + 1]))
    result = jax.vmap(step, axis_name="i")(jnp.stack([X, X * jnp.inf]))
    assert not result.finite.any()
    assert result.dynamic_scale.scale.tolist() == [2.0, 2.0]


def after(stopping, *metrics):
    for metric in metrics:
        stopping = stopping.update(metric)
    return stopping


def test_stops_after_patience():
    stopping = EarlyStopping(min_delta=0.1, patience=2)
    assert not after(stopping, 1.0, 0.95, 0.94).should_stop
    stopped = after(stopping, 1.0, 0.95, 0.94, 0.93)
    assert stopped.should_stop and stopped.best_metric == 1.0
    assert after(stopped, 0.1) == stopped.replace(
        best_metric=0.1, patience_count=0, has_improved=True
    )


def test_zero_patience_stops_at_once():
    assert after(EarlyStopping(), 1.0, 1.0).should_stop
    assert not after(EarlyStopping(), 1.0, 0.5).should_stop


def test_reset_keeps_the_options():
    stopping = EarlyStopping(min_delta=0.1, patience=2)
    assert after(stopping, 1.0, 2.0, 3.0, 4.0).reset() == stopping


def test_nan_is_not_an_improvement():
    stopping = after(EarlyStopping(patience=5), math.nan, 1.0)
    assert stopping.has_improved and stopping.best_metric == 1.0
    assert not stopping.update(math.nan).has_improved


def test_metric_may_be_an_array():
    assert after(EarlyStopping(), jnp.array(1.0), jnp.array(0.5)).has_improved
