"""That the bridge is where its users look for it, and that nothing else loads it."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft import linen as nn
from weft import nnx
from weft.nnx import bridge

X = draw(1, 4, 3)


def test_all_names_exist():
    assert all(hasattr(bridge, name) for name in dir(bridge))


def test_nnx_does_not_import_linen():
    program = (
        "import sys, weft.nnx; "
        "print([m for m in sys.modules if m.startswith(('weft.linen', 'weft.hierarchy'))])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True
    )
    assert printed.stdout.strip() == "[]"


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
def test_linen_in_nnx_in_linen_under_jit_vmap_and_scan(graph):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")))(x)
            return nn.BatchNorm(use_running_average=False)(x)

    class Pair(nnx.Module):
        def __init__(self, *, rngs):
            make = nnx.vmap(lambda rngs: bridge.ToNNX(Block(), rngs).lazy_init(X))
            self.blocks = nnx.split_rngs(splits=2)(make)(rngs)

        def __call__(self, x):
            run = nnx.vmap(lambda b: b(x, mutable=["batch_stats"]), graph=graph)
            return run(self.blocks).sum(0)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda pair, x, _: (pair(x), None),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan(bridge.to_linen(Pair, name="pair"), x, None)[0]

    with nnx.use_eager_sharding(False):
        variables = jax.jit(Stack().init)(jax.random.key(0), X)
        kernel = variables["params"]["pair"]["blocks"]["Dense_0"]["kernel"]
        y, after = jax.jit(lambda v: Stack().apply(v, X, mutable=["batch_stats"]))(variables)
    assert kernel.value.shape == (3, 2, 3, 3)
    assert kernel.names[0] == "layers"
    assert kernel.names[-2:] == ("a", "b")
    assert y.shape == X.shape
    mean = after["batch_stats"]["pair"]["blocks"]["BatchNorm_0"]["mean"]
    assert mean.shape == (3, 2, 3)
    np.testing.assert_allclose(mean[0, 0], 0.01 * X.sum(-1).mean(), rtol=1e-4)
    assert jnp.all(jnp.isfinite(y))
