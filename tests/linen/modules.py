"""Small modules for the tests of Linen."""

import jax
import jax.numpy as jnp

from tests.keys import draw, quick_key
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = quick_key(0)
X = draw(1, 3, 2)


class Affine(Module):
    features: int = 2
    scale: float = 1.0

    @compact
    def __call__(self, x):
        kernel = self.param("kernel", jax.nn.initializers.normal(1.0), (x.shape[-1], self.features))
        return self.scale * x @ kernel


class Counter(Module):
    @compact
    def __call__(self, x):
        calls = self.variable("state", "calls", lambda: jnp.zeros((), int))
        calls.value += 1
        return x * calls.value
