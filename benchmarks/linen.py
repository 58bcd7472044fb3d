"""What does a Linen model cost in Python: traced, called eagerly, dispatched, initialized?"""

import time

import jax
import jax.numpy as jnp

from benchmarks.harness import Row, ratios, row
from benchmarks.tracing import (
    DIM,
    KEY,
    LAYERS,
    attend,
    compared,
    raw_block,
    raw_over_batches,
    raw_scanned,
    raw_unrolled,
)
from weft import linen as nn


class Block(nn.Module):
    """The block of `benchmarks.tracing` in Linen's own layers."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm1")(x)
        q, k, v = (nn.Dense(DIM, name=name)(h) for name in "qkv")
        x = x + nn.Dense(DIM, name="out")(attend(q, k, v))
        h = nn.gelu(nn.Dense(4 * DIM, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(DIM, name="down")(h)


class Unrolled(nn.Module):
    n: int
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        for i in range(self.n):
            x = self.block(name=f"layer{i}")(x)
        return x


class Scanned(nn.Module):
    n: int = LAYERS
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            return block(x), None

        layers = nn.scan(body, {"params": 0}, split_rngs={"params": True}, length=self.n)
        return layers(self.block(name="layers"), x, None)[0]


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(8):
            x = nn.relu(nn.Dense(8)(x))
        return x


def _raw_mlp(params, x):
    for i in range(8):
        layer = params[f"Dense_{i}"]
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x


def _eager() -> Row:
    x = jnp.ones((4, 8))
    variables = MLP().init(KEY, x)
    model = MLP()
    measured = ratios(
        lambda: model.apply(variables, x).block_until_ready(),
        lambda: _raw_mlp(variables["params"], x).block_until_ready(),
        pairs=50,
        warmup=5,
        clock=time.thread_time,
    )
    return row("eager forward of an MLP of 8 layers of width 8 / raw", measured, at_most=12)


def _dispatch() -> Row:
    x = jnp.ones((4, 8))
    variables, model = MLP().init(KEY, x), MLP()
    applied = jax.jit(lambda variables, x: model.apply(variables, x))
    raw = jax.jit(lambda variables, x: _raw_mlp(variables["params"], x))

    def many(f):
        for _ in range(200):
            f(variables, x)

    measured = ratios(lambda: many(applied), lambda: many(raw), clock=time.thread_time)
    return row("dispatch of apply under jit / raw", measured, at_most=1.02)


def _abstract_init() -> Row:
    x = jax.ShapeDtypeStruct((2, 8, DIM), jnp.float32)

    def shapes(n):
        jax.eval_shape(lambda key, x: Unrolled(n).init(key, x), KEY, x)

    measured = ratios(lambda: shapes(48), lambda: shapes(12), pairs=7, clock=time.thread_time)
    return row("abstract init of 48 / 12 unrolled layers", measured, at_most=4.4)


def _depth() -> Row:
    x = jax.ShapeDtypeStruct((2, 8, DIM), jnp.float32)

    def build(n):
        jax.jit(lambda key, x: Scanned(n).init(key, x)).lower(KEY, x).compile()

    measured = ratios(lambda: build(48), lambda: build(12), pairs=7)
    return row("trace and compile init of 48 / 12 scanned layers", measured, at_most=1.1)


def run() -> list[Row]:
    """A decoder unrolled, with each block under its own jit, scanned, and in three transformations
    at once; an MLP eagerly and under jit; init.
    """
    x, batches = jnp.ones((2, 8, DIM)), jnp.ones((3, 2, 8, DIM))
    rows = []
    for n, in_jit in ((12, 0.35), (24, 0.20), (48, 0.13)):
        raw = lambda n=n: raw_unrolled(n, raw_block)  # noqa: E731
        variables = Unrolled(n).init(KEY, x)
        plain = lambda n=n: Unrolled(n).apply  # noqa: E731
        jitted = lambda n=n: Unrolled(n, nn.jit(Block)).apply  # noqa: E731
        question = f"trace {n} Linen layers"
        rows += [
            compared(f"{question} / raw", plain, raw, variables, x, 1.2),
            compared(f"{question}, each in a jit / raw", jitted, raw, variables, x, in_jit, True),
        ]
    raw = lambda: raw_scanned(raw_block)  # noqa: E731
    in_layers = lambda raw: lambda params, x: raw(params["layers"], x)  # noqa: E731
    rows.append(
        compared(
            "trace a scan of 12 Linen layers / raw",
            lambda: Scanned().apply,
            lambda: in_layers(raw()),
            Scanned().init(KEY, x),
            x,
            1.15,
            cold=True,
        )
    )
    ensemble = nn.vmap(Scanned, {"params": None}, {"params": False})
    rows.append(
        compared(
            "trace vmap(scan(remat)) of Linen layers / raw",
            lambda: ensemble(block=nn.remat(Block)).apply,
            lambda: in_layers(raw_over_batches(raw_scanned(jax.checkpoint(raw_block)))),
            Scanned().init(KEY, x),
            batches,
            2.0,
            cold=True,
        )
    )
    return [*rows, _eager(), _dispatch(), _abstract_init(), _depth()]
