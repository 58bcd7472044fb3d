import jax
import jax.numpy as jnp
import pytest

from weft.errors import (
    ArgumentShapeError,
    ArgumentValueError,
)
from weft.linen.layers import BatchApply, Dropout, Sequential
from weft.linen.linear import Dense
from weft.linen.methods import compact
from weft.linen.module import Module

RNGS = {"dropout": jax.random.key(0)}
ONES = jnp.ones((40, 50))


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_invalid_rate(rate):
    with pytest.raises(ArgumentValueError, match=f"rate={rate} must be in"):
        Dropout(rate, deterministic=False).apply({}, ONES, rngs=RNGS)


INPUTS = jnp.arange(24.0).reshape(2, 3, 4)


def test_layers_are_a_sequence():
    with pytest.raises(ArgumentValueError, match=r"layers=Dense\(...\); expected a list"):
        Sequential(Dense(3))


class Model(Module):
    net: Module

    @compact
    def __call__(self, x):
        return self.net(x)


def test_no_layers():
    with pytest.raises(ArgumentValueError, match="Sequential net has no layers"):
        Model(Sequential([])).apply({}, INPUTS)
    with pytest.raises(ArgumentValueError, match=r"\(the outermost module\) has no layers"):
        Sequential([]).apply({}, INPUTS)


def test_too_many_batch_axes():
    with pytest.raises(ArgumentShapeError, match=r"merges 4 axes.*shapes are \[\(2, 3, 4\)\]"):
        BatchApply(lambda x: x, num_dims=4)(INPUTS)


def test_result_without_the_batch_axis():
    with pytest.raises(ArgumentShapeError, match=r"shape \(2, 4\); expected its first .* size 6"):
        BatchApply(lambda x: x[:2])(INPUTS)
