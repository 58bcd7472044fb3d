"""Python cost of hierarchy layers, counted: calls and instructions of Weft's functions.

Times depend on the machine, these counts do not. The bounds are a tenth above what was counted on
Python 3.11; for how counts depend on its version, see `benchmarks.frame.counting`.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import weft
from benchmarks.frame.counting import calls, instructions
from weft.config import config_class
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.layers import LayerNorm, Linear
from weft.hierarchy.module import functional

WEFT = weft.__path__[0]
X = jnp.ones((2, 4))


class Stack(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        n: int = 1

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        linear = Linear.default_config().set(input_dim=4, output_dim=4)
        for i in range(cfg.n):
            self._add_child(f"layer{i}", linear)
        self._add_child("norm", LayerNorm.default_config().set(input_dim=4))

    def forward(self, x):
        for i in range(self.config.n):
            x = jnp.tanh(self.children[f"layer{i}"](x))
        return self.norm(x)


def stack(n):
    """Returns a stack of n layers and what it is called with."""
    model = Stack.default_config().set(name="stack", n=n).instantiate(parent=None)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)

    def call(params, x):
        outputs, _ = functional(model, prng_key=None, state=params, inputs=[x], is_training=True)
        return outputs

    return call, params


def per_layer(run_of, count):
    """Returns the cost of each further layer."""
    return (count(run_of(12)) - count(run_of(4))) / 8


def calls_of_weft(run):
    return calls(run, 1, of=WEFT)


def instructions_of_weft(run):
    return instructions(run, of=WEFT)


def traced(n):
    call, params = stack(n)

    def run():
        # A new function, which is not in any cache.
        jax.jit(lambda params, x: call(params, x)).trace(params, X)

    return run


def eager(n):
    call, params = stack(n)
    return lambda: call(params, X)


def layer_of(n):
    model = Stack.default_config().set(name="stack", n=n).instantiate(parent=None)
    return lambda: jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))


@pytest.mark.parametrize(
    ("run_of", "of_calls", "of_instructions"),
    [(traced, 81, 2330), (eager, 81, 2420), (layer_of, 1040, 25500)],
    ids=["traced", "called eagerly", "made abstractly"],
)
def test_each_layer(run_of, of_calls, of_instructions):
    assert per_layer(run_of, calls_of_weft) <= of_calls
    assert per_layer(run_of, instructions_of_weft) <= of_instructions


def test_jitted_train_step():
    call, params = stack(50)
    tx = optax.adam(1e-3)

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(lambda params: call(params, x).sum())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = params, tx.init(params), X
    # It is a function of dicts: nothing of Weft runs but while it is traced.
    assert calls(lambda: step(*arguments), of=WEFT) == 0
    assert calls(lambda: step(*arguments)) <= 2
