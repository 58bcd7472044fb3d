import jax
import jax.numpy as jnp
import optax
import pytest

from weft import nnx
from weft.errors import GradientStructureError
from weft.nnx.train_state import TrainState


class Linear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), tag="w")
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x @ self.w


class WithStats(TrainState):
    stats: nnx.State


def make():
    graphdef, params, stats = nnx.split(Linear(), nnx.Param, ...)
    return WithStats.create(graphdef, params=params, tx=optax.adam(0.1), stats=stats, step=2)


@jax.jit
def step(state, x):
    def loss(params):
        y, (_, new) = state.apply(params, "stats")(x)
        return y.sum(), nnx.filter_state(new, nnx.BatchStat)

    grads, stats = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads, stats=stats)


def test_a_step_gives_a_new_state():
    state = make()
    new = step(step(state, jnp.ones((3, 2))), jnp.ones((3, 2)))
    assert int(new.step) == 4 and new.stats.calls[...] == 2 and state.step == 2
    assert new.params.w[0] == pytest.approx(0.8, abs=1e-3) and state.params.w[0] == 1
    assert new.opt_state[0].mu.w.tag == "w"
    assert float(new.apply("params", "stats")(jnp.ones(2))[0]) == pytest.approx(1.6, abs=1e-3)


def test_gradients_are_variables_or_arrays():
    state = make()
    one = state.apply_gradients(nnx.State({"w": jnp.ones(2)}))
    two = state.apply_gradients(state.params)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert one.params.w.tolist() == two.params.w.tolist()
    plain = TrainState.create(one.graphdef, params=nnx.State({"w": jnp.ones(2)}), tx=optax.sgd(1.0))
    assert plain.apply_gradients(nnx.State({"w": nnx.Param(jnp.ones(2))})).params.w.tolist() == [
        0.0,
        0.0,
    ]


def test_gradients_that_do_not_fit():
    with pytest.raises(GradientStructureError, match="there is no gradient for 'w'"):
        make().apply_gradients(nnx.State({}))
    with pytest.raises(GradientStructureError, match=r"'w' has shape \(3,\)"):
        make().apply_gradients(nnx.State({"w": jnp.ones(3)}))
