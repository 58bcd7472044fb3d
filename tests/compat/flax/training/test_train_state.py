import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft import serialization
from weft.errors import TrainStateError
from weft.training.train_state import (
    OVERWRITE_WITH_GRADIENT,
    DynamicScale,
    EarlyStopping,
    TrainState,
)


def made(params, cls=TrainState, tx=None, **kwargs):
    return cls.create(apply_fn=None, params=params, tx=tx or optax.sgd(0.5), **kwargs)


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


def test_small_gradients_of_half_precision_survive():
    x = jnp.array(1e-4, jnp.float16)
    tiny = lambda x: x * jnp.float16(1e-2) * jnp.float16(1e-6)  # noqa: E731
    assert jax.grad(tiny)(x) == 0
    result = DynamicScale(scale=2.0**15).value_and_grad(tiny)(x)
    assert result.grad.dtype == jnp.float32
    assert result.grad == pytest.approx(1e-8, rel=0.1)


def test_scale_does_not_overflow():
    dynamic = DynamicScale(scale=3e38, growth_interval=0)
    scale = dynamic.value_and_grad(jnp.sum)(X).dynamic_scale.scale
    assert scale == jnp.finfo(jnp.float32).max


def after(stopping, *metrics):
    for metric in metrics:
        stopping = stopping.update(metric)
    return stopping


def test_reset_keeps_the_options():
    stopping = EarlyStopping(min_delta=0.1, patience=2)
    assert after(stopping, 1.0, 2.0, 3.0, 4.0).reset() == stopping


def test_nan_is_not_an_improvement():
    stopping = after(EarlyStopping(patience=5), math.nan, 1.0)
    assert stopping.has_improved and stopping.best_metric == 1.0
    assert not stopping.update(math.nan).has_improved


def test_metric_may_be_an_array():
    assert after(EarlyStopping(), jnp.array(1.0), jnp.array(0.5)).has_improved
