from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.linen.modules import KEY, Affine, Counter
from weft import linen as nn
from weft.linen import summary
from weft.linen.methods import compact
from weft.linen.module import Module

PLAIN = {"width": 100, "force_terminal": False}


class Block(Module):
    @compact
    def __call__(self, x, *, scale=1.0):
        layer = Affine(name="layer")
        return {"y": Counter()(layer(layer(x))) * scale}


class Model(Module):
    @compact
    def __call__(self, x):
        return Block()(x)["y"]


def lines(table):
    """Returns the cells of a table, line by line."""
    found = [line.strip("│").split("│") for line in table.split("\n") if line.startswith("│")]
    return [[cell.strip() for cell in line] for line in found]


def test_flops_are_counted_and_nothing_is_computed():
    shape = jax.ShapeDtypeStruct((1000, 2), jnp.float32)
    options = {"compute_flops": True, "compute_vjp_flops": True, "console_kwargs": PLAIN}
    row = lines(Affine(3).tabulate(KEY, shape, **options))[0]
    forward, backward = int(row[4]), int(row[5])
    assert forward == 1000 * 3 * 2 * 2  # a product and a sum for each number of the kernel
    assert 2 * forward < backward < 4 * forward


def test_bytes_have_units_and_keys_have_sizes():
    class Model(Module):
        @compact
        def __call__(self):
            self.variable("state", "key", lambda: jax.random.key(0))
            self.param("big", jax.nn.initializers.zeros, (1000, 1000), jnp.bfloat16)

    rows = lines(Model().tabulate(KEY, console_kwargs=PLAIN))
    assert rows[-1][4:] == ["1,000,000 (2.0 MB)", "1 (8 B)"]


def test_errors_of_the_model_propagate():
    with pytest.raises(IndexError, match="out of range"):
        Affine().tabulate(KEY, jax.ShapeDtypeStruct((), jnp.float32))


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(3)(x), None


class Rows(nn.Module):
    """A layer around a transformation of a submodule."""

    make: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        return self.make()(x)


SPLIT = {"split_rngs": {"params": True}}
LIFTED = {
    "scan": lambda: lambda x: nn.scan(Step, {"params": 0}, length=3, **SPLIT)()(x, None)[0],
    "vmap": lambda: nn.vmap(nn.Dense, {"params": 0}, **SPLIT)(3),
    "lstm": lambda: lambda x: nn.RNN(nn.LSTMCell(3))(x[:, None]),
    "bidirectional": lambda: (
        lambda x: nn.Bidirectional(nn.RNN(nn.LSTMCell(3)), nn.RNN(nn.GRUCell(3)))(x[:, None])
    ),
    "weight norm": lambda: nn.WeightNorm(nn.Dense(3)),
    "remat of jit": lambda: nn.remat(nn.jit(nn.Dense))(3),
}


@pytest.mark.parametrize("lift", LIFTED)
def test_flops_of_calls_in_transformations(lift):
    calls, _ = summary.record_calls(
        Rows(LIFTED[lift]), KEY, (jnp.ones((2, 3)),), show_repeated=True
    )
    dense = [call for call in calls if type(call.module) is nn.Dense]
    flops = {call.path: summary._flops(call, KEY, with_vjp=False) for call in calls}
    assert len(flops) > 1
    assert all(n > 0 for n in flops.values())
    for call in dense:
        (rows, columns), features = call.args[0].shape, call.outputs.shape[-1]
        assert flops[call.path] >= 2 * rows * columns * features
