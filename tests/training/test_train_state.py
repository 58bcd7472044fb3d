import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft import serialization
from weft.core import FrozenDict
from weft.errors import TrainStateError
from weft.training.train_state import OVERWRITE_WITH_GRADIENT, TrainState


class WithStats(TrainState):
    batch_stats: dict


def made(params, cls=TrainState, tx=None, **kwargs):
    return cls.create(apply_fn=None, params=params, tx=tx or optax.sgd(0.5), **kwargs)


def test_a_step_moves_params_and_counts():
    state = made({"w": jnp.ones(2)}, tx=optax.sgd(0.5, momentum=0.9))
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    state = step(step(state, {"w": jnp.ones(2)}), {"w": jnp.zeros(2)})
    assert state.step == 2
    np.testing.assert_allclose(state.params["w"], 1 - 0.5 - 0.5 * 0.9, rtol=1e-5)


def test_further_fields_are_set_with_the_step():
    state = made({"w": jnp.ones(2)}, WithStats, batch_stats={"mean": 0})
    state = state.apply_gradients(grads={"w": jnp.ones(2)}, batch_stats={"mean": 1})
    assert state.batch_stats == {"mean": 1}
    assert jax.tree.leaves(made({}, WithStats, batch_stats=3)) == [0, 3]


@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_what_is_computed_backwards_is_overwritten(kind):
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


def test_both_or_none_have_the_collection():
    plain, both = {"params": jnp.ones(2)}, {"params": jnp.ones(2), OVERWRITE_WITH_GRADIENT: {}}
    with pytest.raises(TrainStateError, match=r"params have the collection .* but grads do not"):
        made(both).apply_gradients(grads=plain)
    with pytest.raises(TrainStateError, match=r"grads have the collection .* but params do not"):
        made(plain).apply_gradients(grads=both)
    with pytest.raises(TrainStateError, match=r"collections \['w', '_over.*expected 'params'"):
        made({"w": jnp.ones(2), OVERWRITE_WITH_GRADIENT: {}})


def test_a_state_is_saved_and_restored():
    state = made({"w": jnp.ones(2)}, tx=optax.adam(0.1))
    moved = state.apply_gradients(grads={"w": jnp.ones(2)})
    back = serialization.from_bytes(state, serialization.to_bytes(moved))
    assert back.step == 1 and back.tx is state.tx
    np.testing.assert_array_equal(back.opt_state[0].mu["w"], moved.opt_state[0].mu["w"])
