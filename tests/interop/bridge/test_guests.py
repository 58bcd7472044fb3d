import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import KEY, X
from weft import linen as nn
from weft import nnx
from weft.errors import BridgeContextError, InvalidRngError, ModifyScopeVariableError
from weft.interop.bridge.guests import linen_in_bridge_mdl, nnx_in_bridge_mdl
from weft.interop.bridge.modules import Module, compact


class Net(Module):
    train: bool = False

    @compact
    def __call__(self, x):
        x = nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(x)
        x = linen_in_bridge_mdl(nn.BatchNorm(use_running_average=not self.train), name="norm")(x)
        x = linen_in_bridge_mdl(nn.Dense(2))(x)
        dropout = nnx_in_bridge_mdl(lambda rngs: nnx.Dropout(0.5, rngs=rngs), name="dropout")
        return dropout(x, deterministic=not self.train)


def test_their_variables_are_below_their_names():
    y, variables = Net().init_with_output(nnx.Rngs(0), X)
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {
            "Linear_0": {"bias": (3,), "kernel": (3, 3)},
            "norm": {"bias": (3,), "scale": (3,)},
            "Dense_0": {"bias": (2,), "kernel": (3, 2)},
        },
        "batch_stats": {"norm": {"mean": (3,), "var": (3,)}},
    }
    want = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(variables["params"]["Linear_0"]["kernel"], want.kernel)
    np.testing.assert_allclose(jax.jit(Net().apply)(variables, X), y, rtol=1e-5)


def test_state_and_keys():
    net = Net(train=True)
    variables = Net().init(nnx.Rngs(0), X)
    rngs = {"dropout": KEY}
    _, after = net.apply(variables, X, rngs=rngs, mutable=["batch_stats"])
    assert jnp.any(after["batch_stats"]["norm"]["mean"])
    with pytest.raises(ModifyScopeVariableError, match="batch_stats"):
        net.apply(variables, X, rngs=rngs)
    with pytest.raises(InvalidRngError, match="draws a key from a PRNG stream"):
        net.apply(variables, X, mutable=True)


def test_outside_of_modules_they_are_refused():
    with pytest.raises(BridgeContextError, match="linen_in_bridge_mdl was called outside"):
        linen_in_bridge_mdl(nn.Dense(2))
    with pytest.raises(BridgeContextError, match="nnx_in_bridge_mdl was called outside"):
        nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs))
    with pytest.raises(BridgeContextError, match="the PRNG streams was asked for by a Net"):
        Net()(X)
