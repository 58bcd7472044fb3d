"""Activation functions of NNX."""

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.nnx.nn import activations
from weft.nnx.nn.activations import PReLU


@pytest.mark.parametrize("name", [n for n in activations.__all__ if n != "PReLU"])
def test_they_are_those_of_jax(name):
    assert getattr(activations, name) is getattr(jax.nn, name)


def test_the_slope_of_prelu_is_learned():
    layer = PReLU(0.5, negative_slope_metadata={"tag": "slope"})
    assert layer(jnp.array([-2.0, 3.0])).tolist() == [-1.0, 3.0]
    assert layer.negative_slope.tag == "slope"
    graphdef, state = nnx.split(layer)
    grads = jax.grad(lambda s: nnx.merge(graphdef, s)(jnp.array([-2.0, 3.0])).sum())(state)
    assert nnx.to_pure_dict(grads) == {"negative_slope": -2.0}


def test_prelu_keeps_the_dtype_of_the_input_unless_told():
    assert PReLU()(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert PReLU(dtype=jnp.float16)(jnp.ones(2)).dtype == jnp.float16
