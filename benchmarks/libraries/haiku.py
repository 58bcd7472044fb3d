"""Haiku: functions that make their parameters by name."""

import haiku as hk
import jax
import jax.numpy as jnp

from benchmarks.libraries import raw
from benchmarks.libraries.library import Library, Program, chain_input

_LEAVES = {"w": "kernel", "b": "bias", "scale": "scale", "offset": "bias"}


class Block(hk.Module):
    """A decoder block."""

    def __call__(self, x):
        def norm(name):
            return hk.LayerNorm(-1, True, True, eps=raw.EPS, name=name)

        h = norm("norm1")(x)
        q, k, v = (hk.Linear(raw.DIM, name=name)(h) for name in "qkv")
        x = x + hk.Linear(raw.DIM, name="out")(raw.attend(q, k, v))
        h = jax.nn.gelu(hk.Linear(4 * raw.DIM, name="up")(norm("norm2")(x)))
        return x + hk.Linear(raw.DIM, name="down")(h)


def _unrolled(n):
    def model(x):
        for i in range(n):
            x = Block(name=f"layer{i}")(x)
        return x

    return model


def _scanned(n, wrap=lambda block: block):
    def model(x):
        return hk.layer_stack(n)(wrap(lambda x: Block(name="layers")(x)))(x)

    return model


def _program(make, values, x):
    """Returns a program whose parameters are found by the parts of their paths."""

    def made():
        return hk.without_apply_rng(hk.transform(make())).apply

    shapes = jax.eval_shape(hk.transform(make()).init, jax.random.key(0), x)
    return Program(made, {path: _leaves(path, leaves, values) for path, leaves in shapes.items()})


def _leaves(path, leaves, values):
    for part in path.split("/"):
        values = values.get(part, values)
    return {name: values[_LEAVES[name]] for name in leaves}


class Haiku(Library):
    name = "Haiku"

    def unrolled(self, values):
        return _program(lambda: _unrolled(len(values)), values, raw.X)

    def scanned(self, values):
        return _program(lambda: _scanned(len(values)), raw.stacked(values), raw.X)

    def nested(self, values):
        def make():
            model = _scanned(len(values), hk.remat)
            return lambda x: hk.vmap(model, split_rng=False)(x)

        return _program(make, raw.stacked(values), raw.BATCHES)

    def shapes(self, n):
        return lambda: jax.eval_shape(hk.transform(_unrolled(n)).init, jax.random.key(0), raw.X)

    def chain(self, values):
        def make():
            def model(x):
                for name, layer in values.items():
                    x = jnp.tanh(hk.Linear(len(layer["bias"]), name=name)(x))
                return x

            return model

        return _program(make, values, chain_input(values))


def libraries() -> list[Library]:
    return [Haiku()]
