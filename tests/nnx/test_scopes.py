"""While a trace runs, each module's call is in a scope with its name."""

import re

import jax
import jax.numpy as jnp
import pytest

from weft import nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Derived(Block):
    def __call__(self, x):
        return super().__call__(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = [Block(rngs), Derived(rngs)]
        self.heads = {"a": [nnx.Linear(3, 3, rngs=rngs)]}

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["a"][0](x)


@pytest.mark.parametrize("compile_", [nnx.jit, jax.jit])
def test_each_operation_is_in_the_scopes_of_its_modules(compile_):
    def step(model, x):
        return model(x)

    model = Model(nnx.Rngs(0))
    text = compile_(step).lower(model, jnp.ones((2, 3))).as_text(debug_info=True)
    found = set(re.findall(r'"jit\(step\)/([^"]*)/dot_general"', text))
    assert found == {"Model/blocks_0/linear", "Model/blocks_1/linear", "Model/heads_a_0"}


def test_scopes_are_closed_where_a_call_fails():
    class Failing(nnx.Module):
        def __call__(self, x):
            raise KeyError

    block = Block(nnx.Rngs(0))
    with pytest.raises(KeyError):
        jax.jit(Failing())(1.0)
    text = jax.jit(lambda x: block(x)).lower(jnp.ones((2, 3))).as_text(debug_info=True)
    assert "Block/linear/dot_general" in text and "Failing" not in text
