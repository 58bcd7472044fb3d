"""Compiled operations carry the path of their module, through each lifted transformation."""

import re

import jax
import jax.numpy as jnp
import pytest

from weft import linen as nn

X = jnp.ones((3, 2))


class Block(nn.Module):
    def setup(self):
        self.dense = nn.Dense(2)

    def __call__(self, x):
        return self.dense(x)

    def other(self, x):
        return self.dense(x)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Block(name="block")(x), None


class Model(nn.Module):
    body: object

    @nn.compact
    def __call__(self, x):
        return self.body(x)


def called(module, x):
    return module(x)


def in_function(transformed):
    return lambda x: transformed(Block(name="block"), x)


def scanned(x):
    of_layers = nn.scan(Step, {"params": 0}, split_rngs={"params": True}, length=2)
    return of_layers(name="steps")(x, None)[0]


def looped(module, x):
    y = module(x)
    return nn.while_loop(lambda m, c: c.sum() < 2, lambda m, c: m(c), module, y)


# With the modules' names, in order.
CASES = {
    "plain": (in_function(called), "Model/block/dense"),
    "method": (in_function(Block.other), "Model/block.other/dense"),
    "vmap": (
        lambda x: nn.vmap(Block, {"params": 0}, {"params": True})(name="block")(x),
        "Model/block/dense",
    ),
    "vmap of a function": (
        in_function(nn.vmap(called, {"params": None}, {"params": False})),
        "Model/block/dense",
    ),
    "scan": (scanned, "steps/block/dense"),
    "remat": (lambda x: nn.remat(Block)(name="block")(x), "Model/block/dense"),
    "remat of a method": (
        lambda x: nn.remat(Block, methods="other")(name="block").other(x),
        "Model/block.other/dense",
    ),
    "jit": (lambda x: nn.jit(Block)(name="block")(x), "block/dense"),
    "jit of a function": (in_function(nn.jit(called)), "block/dense"),
    "cond": (in_function(lambda m, x: nn.cond(True, called, called, m, x)), "Model/block/dense"),
    "while_loop": (in_function(looped), "Model/block/dense"),
    "vjp": (in_function(lambda m, x: nn.vjp(called, m, x)[0]), "Model/block/dense"),
    "map_variables": (
        lambda x: nn.map_variables(Block, "params", lambda v: v, init=True)(name="block")(x),
        "Model/block/dense",
    ),
}
OF_JAX = {"checkpoint", "while", "body", "cond", "branch_0_fun", "branch_1_fun"}
OF_JAX |= {"closed_call", "eval_jaxpr"}  # in JAX 0.10 and 0.12


def paths(fn, *args):
    """Returns the paths of the matrix products, without JAX's own names."""
    text = jax.jit(fn).lower(*args).as_text(debug_info=True)
    found = set()
    for name in re.findall(r'"([^"]*)/dot_general', text):
        parts = [re.sub(r"^\w+\((.*)\)$", r"\1", p) for p in name.split("/") if "jit(" not in p]
        found.add("/".join(p for p in parts if p not in OF_JAX))
    return found


@pytest.mark.parametrize(("body", "path"), CASES.values(), ids=CASES)
def test_each_operation_is_in_the_scopes_of_its_modules(body, path):
    model = Model(body)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    # Inside of a scan, JAX 0.12 keeps what is around it.
    assert paths(model.apply, params, X) in ({path}, {f"Model/{path}"})
