"""By hand: functions of nested dicts. What all others are compared with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.libraries.library import Library, Program, Values

DIM, HEADS, EPS = 32, 4, 1e-6
_NORM = {"scale": (DIM,), "bias": (DIM,)}
PARTS = {
    "norm1": _NORM,
    **{name: {"kernel": (DIM, DIM), "bias": (DIM,)} for name in ("q", "k", "v", "out")},
    "norm2": _NORM,
    "up": {"kernel": (DIM, 4 * DIM), "bias": (4 * DIM,)},
    "down": {"kernel": (4 * DIM, DIM), "bias": (DIM,)},
}
X, BATCHES = jnp.ones((2, 8, DIM)), jnp.ones((3, 2, 8, DIM))


def decoder_values(n: int) -> Values:
    """Values for a decoder of n layers."""
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    return {
        f"layer{i}": {
            part: {name: draw(shape) for name, shape in leaves.items()}
            for part, leaves in PARTS.items()
        }
        for i in range(n)
    }


def stacked(values: Values) -> Values:
    """Returns one layer whose leaves have a leading axis over the layers."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *values.values())


def chain_values(n: int, width: int) -> Values:
    """Values for a chain of n layers: 2 n arrays."""
    kernels = 1.5 * np.random.default_rng(0).normal(size=(n, width, width)) / width
    return {
        f"layer{i:04}": {
            "bias": jnp.full(width, 0.1, jnp.float32),
            "kernel": jnp.asarray(kernel, jnp.float32),
        }
        for i, kernel in enumerate(kernels)
    }


def norm(params, x):
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + EPS)
    return scaled * params["scale"] + params["bias"]


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def attend(q, k, v):
    """Returns causal attention of vectors [..., time, dim]; the same code for every library."""
    q, k, v = (t.reshape(*t.shape[:-1], HEADS, -1) for t in (q, k, v))
    logits = jnp.einsum("...qhd,...khd->...hqk", q, k)
    causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, logits, -1e9))
    return jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(*q.shape[:-2], -1)


def block(params, x):
    """Computes a decoder block."""
    h = norm(params["norm1"], x)
    q, k, v = (dense(params[name], h) for name in "qkv")
    x = x + dense(params["out"], attend(q, k, v))
    h = jax.nn.gelu(dense(params["up"], norm(params["norm2"], x)))
    return x + dense(params["down"], h)


def _unrolled(block):
    def model(params, x):
        for layer in params.values():
            x = block(layer, x)
        return x

    return model


def _scanned(block):
    def model(params, x):
        return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params)[0]

    return model


def _init(n, key):
    kernel = jax.nn.initializers.lecun_normal()

    def draw(key, name, shape):
        if name == "kernel":
            return kernel(key, shape)
        return jnp.ones(shape) if name == "scale" else jnp.zeros(shape)

    def part(key, leaves):
        return {
            name: draw(jax.random.fold_in(key, j), name, shape)
            for j, (name, shape) in enumerate(leaves.items())
        }

    def layer(key):
        return {
            name: part(jax.random.fold_in(key, i), leaves)
            for i, (name, leaves) in enumerate(PARTS.items())
        }

    return {f"layer{i}": layer(jax.random.fold_in(key, i)) for i in range(n)}


class Raw(Library):
    name = "raw JAX"

    def unrolled(self, values):
        return Program(lambda: _unrolled(block), values)

    def jitted(self, values):
        return Program(lambda: _unrolled(jax.jit(lambda params, x: block(params, x))), values)

    def scanned(self, values):
        return Program(lambda: _scanned(block), stacked(values))

    def nested(self, values):
        return Program(
            lambda: jax.vmap(_scanned(jax.checkpoint(block)), in_axes=(None, 0)), stacked(values)
        )

    def transformed(self, values, kinds):
        wrap = {
            "vmap": lambda fn: jax.vmap(fn, in_axes=(None, 0)),
            "scan": lambda fn: (
                lambda params, x: jax.lax.scan(lambda _, x: (None, fn(params, x)), None, x)[1]
            ),
            "remat": lambda fn: jax.checkpoint(fn),
        }
        return Program(
            lambda: functools.reduce(lambda fn, kind: wrap[kind](fn), kinds, block), values
        )

    def shapes(self, n):
        return lambda: jax.eval_shape(functools.partial(_init, n), jax.random.key(0))

    def chain(self, values):
        def model(params, x):
            for layer in params.values():
                x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
            return x

        return Program(lambda: lambda params, x: model(params, x), values)


RAW = Raw()
