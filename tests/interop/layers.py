"""Layers of every library, for tests of what they are to the others."""

import equinox
import flax.linen
import flax.nnx
import haiku
import jax

from tests.keys import draw, quick_key
from weft import linen, nnx
from weft.config import config_for_class
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.layers.normalization import BatchNorm

KEY = quick_key(0)
X = draw(1, 4, 3)
SHAPE = jax.ShapeDtypeStruct((4, 3), "float32")
normal = jax.nn.initializers.normal(1.0)


class Perceptron(equinox.Module):
    """As `equinox.nn.Linear`, for a batch."""

    inner: equinox.nn.Linear
    scale: int

    def __init__(self, n_in, n_out, *, key):
        self.inner = equinox.nn.Linear(n_in, n_out, key=key)
        self.scale = 2

    def __call__(self, x):
        return self.scale * jax.vmap(self.inner)(x)


class Average(equinox.Module):
    """Adds up what it has seen, in training."""

    index: equinox.nn.StateIndex
    factor: jax.Array
    inference: bool

    def __init__(self):
        self.index = equinox.nn.StateIndex(jax.numpy.zeros(3))
        self.factor = jax.numpy.ones(3)
        self.inference = False

    def __call__(self, x, state):
        total = state.get(self.index)
        if not self.inference:
            total = total + x.sum(0)
            state = state.set(self.index, total)
        return (x - total[None]) * self.factor[None], state


def _laid_out(lib):
    return lib.with_partitioning(normal, (None, "model"))


# Arguments of `as_linen`, `as_nnx` and `as_hierarchy`: a layer from three to two features.
DENSE = {
    "linen": lambda: (linen.Dense(2),),
    "linen-class": lambda: (linen.Dense, 2),
    "linen-config": lambda: (config_for_class(linen.Dense).set(features=2),),
    "nnx": lambda: (nnx.Linear(3, 2, rngs=nnx.Rngs(0)),),
    "nnx-class": lambda: (nnx.Linear, 3, 2),
    "hierarchy": lambda: (Linear.default_config().set(input_dim=3, output_dim=2),),
    "flax-linen": lambda: (flax.linen.Dense(2),),
    "flax-linen-class": lambda: (flax.linen.Dense, 2),
    "flax-nnx": lambda: (flax.nnx.Linear(3, 2, rngs=flax.nnx.Rngs(0)),),
    "flax-nnx-class": lambda: (flax.nnx.Linear, 3, 2),
    "equinox": lambda: (Perceptron(3, 2, key=KEY),),
    "equinox-class": lambda: (Perceptron, 3, 2),
    "haiku": lambda: (haiku.transform(lambda x: haiku.nets.MLP([4, 2])(x)),),
    "haiku-class": lambda: (haiku.Linear, 2),
}
# Layers whose axes have names, with those of the weight.
NAMED = {
    "linen": lambda: (linen.Dense(2, kernel_init=_laid_out(linen)),),
    "linen-logical": lambda: (
        linen.Dense(
            2,
            kernel_init=linen.with_logical_partitioning(
                normal, (None, "out"), rules=[("out", "model")]
            ),
        ),
    ),
    "hierarchy": lambda: (
        Linear.default_config().set(
            input_dim=3, output_dim=2, param_partition_spec=(None, "model")
        ),
    ),
    "flax-linen": lambda: (flax.linen.Dense(2, kernel_init=_laid_out(flax.linen)),),
}
# Layers that change their state when they are called in training, with the collection.
STATEFUL = {
    "linen": (lambda: (linen.BatchNorm(),), "batch_stats"),
    "nnx": (lambda: (nnx.BatchNorm(3, rngs=nnx.Rngs(0)),), "batch_stats"),
    "nnx-class": (lambda: (nnx.BatchNorm, 3), "batch_stats"),
    "hierarchy": (lambda: (BatchNorm.default_config().set(input_dim=3),), "state"),
    "flax-linen": (lambda: (flax.linen.BatchNorm(),), "batch_stats"),
    "flax-nnx-class": (lambda: (flax.nnx.BatchNorm, 3), "batch_stats"),
    "equinox": (lambda: (equinox.nn.make_with_state(Average)(),), "state"),
    "equinox-class": (lambda: (Average,), "state"),
    "haiku-class": (lambda: (haiku.BatchNorm, True, True, 0.9), "state"),
}
# Layers that draw keys in training.
RANDOM = {
    "linen": lambda: (linen.Dropout(0.5),),
    "nnx": lambda: (nnx.Dropout(0.5, rngs=nnx.Rngs(3)),),
    "flax-linen": lambda: (flax.linen.Dropout(0.5),),
    "flax-nnx-class": lambda: (flax.nnx.Dropout, 0.5),
    "equinox": lambda: (equinox.nn.Dropout(0.5),),
}
