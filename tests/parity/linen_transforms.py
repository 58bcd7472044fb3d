"""Programs for the parity of Linen's transformations."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw, quick_key
from tests.parity.linen import same_compiled

X = draw(1, 2, 3)
XS = draw(2, 4, 2, 3)
RNGS = {"params": quick_key(0), "dropout": quick_key(5), "noise": quick_key(6)}
SPLIT = {"params": True, "dropout": True}
AXES = {"params": 0, "counts": 0, "intermediates": 0}


class Programs:
    """The programs of a test file, each run on both libraries."""

    def __init__(self):
        self.all = []

    def program(self, fn):
        """Registers `fn(nn)`."""
        self.all.append(fn)
        return fn

    def body(self, *args, **options):
        """Registers a program of the body of a compact method, `fn(nn, self, x, *args)`."""

        def register(fn):
            run = of_body(fn, *args, **options)
            run.__name__ = fn.__name__
            return self.program(run)

        return register

    def test(self):
        """Returns the test of all of them."""

        @pytest.mark.parametrize("case", self.all, ids=lambda case: case.__name__)
        def test(case):
            with warnings.catch_warnings():
                # Flax, as it is used by the newest JAX.
                warnings.filterwarnings("ignore", category=DeprecationWarning)
                same_compiled(case)

        return test


def of_body(body, *args, mutable=("intermediates",), x=X):
    """Returns a program of a compact body: what it makes, and what it returns and changes
    afterwards.
    """

    def run(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, *args):
                return body(nn, self, *args)

        variables = Model().init(RNGS, x, *args)
        rest = {name: v for name, v in variables.items() if name != "intermediates"}
        rngs = {name: jax.random.fold_in(key, 1) for name, key in RNGS.items()}
        return Model().apply(rest, x, *args, rngs=rngs, mutable=list(mutable)), variables

    return run


def fast_random(key, shape):
    """Draws random numbers that compile fast."""
    return jax.random.bits(key, shape) / 2.0**32


@functools.cache
def block(nn):
    class Block(nn.Module):
        features: int = 3

        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "seen", x)
            calls = self.variable("counts", "calls", lambda: jnp.zeros((), int))
            if not self.is_initializing() and self.is_mutable_collection("counts"):
                calls.value += 1
            x = jnp.tanh(x) @ self.param("w", fast_random, (x.shape[-1], self.features))
            return x + fast_random(self.make_rng("dropout"), x.shape)

        def twice(self, x):
            return self(self(x))

    return Block


@functools.cache
def pair(nn):
    class Pair(nn.Module):
        def setup(self):
            self.encoder = nn.Dense(2)
            self.decoder = nn.Dense(3, use_bias=False)

        def __call__(self, x):
            return self.decode(self.encode(x))

        def encode(self, x):
            return nn.tanh(self.encoder(x))

        def decode(self, z):
            return self.decoder(z)

    return Pair


def step(nn, cls=None):
    cls = cls or block(nn)

    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            carry = cls(name="block")(carry)
            return carry if x is None else carry + x, carry.sum()

    return Step
