"""Does the layer norm compile faster than the textbook form, and run as fast?"""

import functools
import time

import jax
import jax.numpy as jnp

from benchmarks.harness import Row, ratios, row
from weft.functional import layer_norm

DIM, BLOCKS = 64, 12


def _textbook(x):
    """Computes the mean first, then the mean squared deviation."""
    deviation = x - x.mean(-1, keepdims=True)
    return deviation * jax.lax.rsqrt(jnp.square(deviation).mean(-1, keepdims=True) + 1e-6)


def _loss(norm, params, x):
    """Returns a residual stack, whose stream no operation but the norms has to write out."""
    for block in params:
        h = norm(x)
        q, k, v = (h @ block[name] for name in "qkv")
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2)) @ v
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    return jnp.sum(norm(x) ** 2)


def _params():
    shapes = dict.fromkeys("qkv", (DIM, DIM)) | {"up": (DIM, 4 * DIM), "down": (4 * DIM, DIM)}
    keys = iter(jax.random.split(jax.random.key(0), BLOCKS * len(shapes)))
    return [
        {name: 0.05 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        for _ in range(BLOCKS)
    ]


def run() -> list[Row]:
    """Measures forward and backward passes of a residual stack of 12 blocks with either form."""
    params, x = _params(), jax.random.normal(jax.random.key(1), (4, 32, DIM))
    forms = [functools.partial(layer_norm, eps=1e-6), _textbook]

    def compiled(norm):
        # A new function, so that the executable is not found in a cache.
        def step(params, x):
            return _loss(norm, params, x)

        return jax.jit(jax.value_and_grad(step)).lower(params, x).compile()

    steps = [compiled(norm) for norm in forms]
    losses = [float(step(params, x)[0]) for step in steps]
    assert abs(losses[0] - losses[1]) < 1e-3 * abs(losses[1]), losses
    compiling = ratios(
        *(lambda norm=norm: compiled(norm) for norm in forms), clock=time.process_time
    )
    running = ratios(
        *(lambda step=step: jax.block_until_ready(step(params, x)) for step in steps), pairs=50
    )
    return [
        row("compile 12 blocks, layer norm / textbook form", compiling, at_most=0.8),
        row("run 12 blocks, layer norm / textbook form", running, at_most=1.05),
    ]
