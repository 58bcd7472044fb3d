"""Modules to transform, and all transformations that leave what they compute as it is."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft import linen as nn

KEY = quick_key(0)
X = jnp.arange(6.0).reshape(2, 3)
SPLIT = {"params": True}


class Linear(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "seen", x)
        return x @ self.param("w", jax.nn.initializers.normal(1.0), (x.shape[-1], self.features))


class Codec(nn.Module):
    def setup(self):
        self.encoder = Linear(2)
        self.decoder = Linear(3)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


def model(body):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return body(self, *args)

    return Model()


def shapes(variables):
    return jax.tree.map(jnp.shape, variables)


MAPPED = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
ALL = {
    "vmap": functools.partial(nn.vmap, **MAPPED),
    "pmap": functools.partial(nn.pmap, **MAPPED),
    "remat": nn.remat,
    "checkpoint": nn.checkpoint,
    "jit": nn.jit,
    "fold_rngs": functools.partial(nn.fold_rngs, rngs=True),
    "map_variables": functools.partial(nn.map_variables, init=True),
    "add_metadata_axis": functools.partial(nn.add_metadata_axis, variable_axes={"params": 0}),
    "named_call": nn.named_call,
}
everywhere = pytest.mark.parametrize("lift", ALL.values(), ids=ALL)
