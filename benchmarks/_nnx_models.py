"""The models of `benchmarks.tracing` and `benchmarks.linen`, of a library's own layers and by hand.

Each is made for a library, so that Weft and Flax are given the same program.
"""

import jax
import jax.numpy as jnp

from benchmarks.tracing import DIM, attend


def block_of(nnx):
    """The decoder block as a class."""

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.norm1 = nnx.LayerNorm(DIM, rngs=rngs)
            self.q = nnx.Linear(DIM, DIM, rngs=rngs)
            self.k = nnx.Linear(DIM, DIM, rngs=rngs)
            self.v = nnx.Linear(DIM, DIM, rngs=rngs)
            self.out = nnx.Linear(DIM, DIM, rngs=rngs)
            self.norm2 = nnx.LayerNorm(DIM, rngs=rngs)
            self.up = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
            self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)

        def __call__(self, x):
            h = self.norm1(x)
            x = x + self.out(attend(self.q(h), self.k(h), self.v(h)))
            return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))

    return Block


def unrolled_of(nnx, block=None):
    """A class of stacks of blocks."""
    block = block or block_of(nnx)

    class Unrolled(nnx.Module):
        def __init__(self, n, *, rngs):
            self.names = tuple(f"layer{i}" for i in range(n))
            for name in self.names:
                setattr(self, name, block(rngs=rngs))

        def __call__(self, x):
            for name in self.names:
                x = getattr(self, name)(x)
            return x

    return Unrolled


def stacked(nnx, n):
    """Blocks in one, with a leading axis, each index of which has parameters of its own."""
    block = block_of(nnx)

    @nnx.split_rngs(splits=n)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return block(rngs=rngs)

    return make(nnx.Rngs(0))


def mlp_of(nnx, width=8):
    """A class of eight layers with a ReLU after each."""

    class MLP(nnx.Module):
        def __init__(self, *, rngs):
            self.names = tuple(f"layer{i}" for i in range(8))
            for name in self.names:
                setattr(self, name, nnx.Linear(width, width, rngs=rngs))

        def __call__(self, x):
            for name in self.names:
                x = jax.nn.relu(getattr(self, name)(x))
            return x

    return MLP


def raw_mlp(params, x):
    for layer in params.values():
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x


def raw_block_init(key):
    """The parameters of a block, drawn as the layers draw them."""
    kernel, norm = jax.nn.initializers.lecun_normal(), lambda: {
        "scale": jnp.ones(DIM), "bias": jnp.zeros(DIM)
    }  # fmt: skip
    shapes = dict.fromkeys(("q", "k", "v", "out"), (DIM, DIM))
    shapes |= {"up": (DIM, 4 * DIM), "down": (4 * DIM, DIM)}
    made = {
        name: {"kernel": kernel(jax.random.fold_in(key, i), shape), "bias": jnp.zeros(shape[1])}
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {"norm1": norm(), "norm2": norm(), **made}


def pure(nnx, model):
    """The parameters of a model as nested dicts."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
