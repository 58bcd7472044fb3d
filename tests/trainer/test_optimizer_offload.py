import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.errors import OptimizerArgumentError
from weft.hierarchy.base_layer import ParameterSpec
from weft.trainer import optimizers
from weft.trainer.optimizers.base import OptParam

SPECS = {"w": ParameterSpec((4, 8), jnp.float32, ("data", "model"))}
VALUES = {"w": jnp.arange(32.0).reshape(4, 8)}


def opt_params(values):
    return jax.tree.map(OptParam, values)


def test_state_stays_in_host_memory():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = optimizers.offload_optimizer(optax.adam(0.1))
    plain = optax.adam(0.1)
    shardings = jax.tree.map(lambda spec: spec.sharding(mesh), tx.partition(SPECS))
    state = jax.jit(lambda v: tx.init(opt_params(v)), out_shardings=shardings)(VALUES)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}

    step = jax.jit(
        lambda v, state: tx.update(v, state, opt_params(v)),
        out_shardings=(None, shardings),
        donate_argnums=1,
    )
    plain_state = plain.init(VALUES)
    for _ in range(2):
        updates, state = step(VALUES, state)
        expected, plain_state = plain.update(VALUES, plain_state)
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
    assert {s.data.shape for s in state[0].mu["w"].addressable_shards} == {(2, 2)}


def test_pattern_selects_offloaded_state():
    tx = optimizers.offload_optimizer(optax.adam(0.1), pattern="0/mu/.*")
    kinds = jax.tree.map(lambda spec: spec.memory_kind or "", tx.partition(SPECS))[0]
    assert kinds._asdict() == {"count": "", "mu": {"w": "pinned_host"}, "nu": {"w": ""}}
    state = tx.init(opt_params(VALUES))[0]
    assert state.mu["w"].sharding.memory_kind == "pinned_host"
    assert state.nu["w"].sharding.memory_kind == "device"


@pytest.mark.parametrize("argument", ["offload_src", "offload_dst"])
def test_unknown_memories_are_rejected(argument):
    with pytest.raises(OptimizerArgumentError, match=rf"pinned_host'\]; got {argument}='disk'"):
        optimizers.offload_optimizer(optax.adam(0.1), **{argument: "disk"})
