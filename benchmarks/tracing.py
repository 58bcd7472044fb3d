"""What does it cost to trace a model through scopes, compared with functions of nested dicts?"""

import time

import jax
import jax.numpy as jnp

from benchmarks.harness import Row, ratios, row
from weft.core import Scope, apply, init, lift

DIM, HEADS, LAYERS = 32, 4, 12
KEY = jax.random.key(0)


def _norm(params, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return scaled * params["scale"] + params["bias"]


def _dense(params, x):
    return x @ params["kernel"] + params["bias"]


def attend(q, k, v):
    q, k, v = (t.reshape(*t.shape[:-1], HEADS, -1) for t in (q, k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, logits, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)


def raw_block(params, x):
    """A decoder block on nested dicts."""
    h = _norm(params["norm1"], x)
    q, k, v = (_dense(params[name], h) for name in "qkv")
    x = x + _dense(params["out"], attend(q, k, v))
    h = jax.nn.gelu(_dense(params["up"], _norm(params["norm2"], x)))
    return x + _dense(params["down"], h)


def _norm_of(scope: Scope, x):
    scale = scope.param("scale", jax.nn.initializers.ones, x.shape[-1:])
    bias = scope.param("bias", jax.nn.initializers.zeros, x.shape[-1:])
    return _norm({"scale": scale, "bias": bias}, x)


def _dense_of(scope: Scope, x, features):
    shape = (x.shape[-1], features)
    kernel = scope.param("kernel", jax.nn.initializers.lecun_normal(), shape)
    bias = scope.param("bias", jax.nn.initializers.zeros, (features,))
    return _dense({"kernel": kernel, "bias": bias}, x)


def block(scope: Scope, x):
    """The same of a scope."""
    h = _norm_of(scope.push("norm1"), x)
    q, k, v = (_dense_of(scope.push(name), h, DIM) for name in "qkv")
    x = x + _dense_of(scope.push("out"), attend(q, k, v), DIM)
    h = jax.nn.gelu(_dense_of(scope.push("up"), _norm_of(scope.push("norm2"), x), 4 * DIM))
    return x + _dense_of(scope.push("down"), h, DIM)


def _unrolled(n, block):
    def model(scope: Scope, x):
        for i in range(n):
            x = block(scope.push(f"layer{i}"), x)
        return x

    return model


def raw_unrolled(n, block):
    def model(params, x):
        for i in range(n):
            x = block(params[f"layer{i}"], x)
        return x

    return model


def _scanned(block):
    scan = lift.scan(
        lambda scope, x, _: (block(scope, x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=LAYERS,
    )
    return lambda scope, x: scan(scope, x, None)[0]


def raw_scanned(block):
    def model(params, x):
        return jax.lax.scan(lambda x, params: (block(params, x), None), x, params)[0]

    return model


def _over_batches(model):
    return lift.vmap(model, variable_axes={"params": None}, split_rngs={"params": False})


def raw_over_batches(model):
    return jax.vmap(model, in_axes=(None, 0))


def _compared(question, models, raw, x, at_most, cold=False) -> Row:
    """Traces `models()` against `raw()`, each made anew; with `cold` from empty caches."""
    variables = init(models())(KEY, x)[1]
    return compared(question, lambda: apply(models()), raw, variables, x, at_most, cold)


def compared(question, make, raw, variables, x, at_most, cold=False) -> Row:
    """Traces `make()`, a function of variables and x, against `raw()`, one of parameters and x."""
    results = make()(variables, x), raw()(variables["params"], x)
    assert jnp.allclose(*results, rtol=1e-4, atol=1e-5), question

    def trace(make):
        if cold:
            jax.clear_caches()
        jax.make_jaxpr(make())(variables, x)

    measured = ratios(
        lambda: trace(make),
        lambda: trace(lambda: lambda variables, x: raw()(variables["params"], x)),
        clock=time.thread_time,
    )
    return row(question, measured, at_most=at_most)


def _depth() -> Row:
    def build(n):
        scan = lift.scan(
            lambda scope, x, _: (block(scope, x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=n,
        )
        x = jax.ShapeDtypeStruct((2, 8, DIM), jnp.float32)
        # A function made anew, so that neither the trace nor the executable is found in a cache.
        jax.jit(lambda key, x: init(scan)(key, x, None)).lower(KEY, x).compile()

    measured = ratios(lambda: build(48), lambda: build(12), pairs=7)
    return row("trace and compile init of 48 / 12 scanned scopes", measured, at_most=1.1)


def run() -> list[Row]:
    """A decoder unrolled, with each block under its own jit, scanned, and in three transformations
    at once.
    """
    x = jnp.ones((2, 8, DIM))
    batches = jnp.ones((3, 2, 8, DIM))
    rows = []
    for n, in_jit in ((12, 0.35), (24, 0.20), (48, 0.13)):
        raw = lambda n=n: raw_unrolled(n, raw_block)  # noqa: E731
        models = lambda n=n: _unrolled(n, block)  # noqa: E731
        jitted = lambda n=n: _unrolled(n, lift.jit(block))  # noqa: E731
        rows += [
            _compared(f"trace {n} scopes / raw", models, raw, x, 1.2),
            _compared(f"trace {n} scopes, each in a jit / raw", jitted, raw, x, in_jit, cold=True),
        ]
    rows.append(
        _compared(
            "trace a scan of 12 scopes / raw",
            lambda: _scanned(block),
            lambda: raw_scanned(raw_block),
            x,
            1.2,
            cold=True,
        )
    )
    rows.append(
        _compared(
            "trace vmap(scan(remat)) / raw",
            lambda: _over_batches(_scanned(lift.remat(block))),
            lambda: raw_over_batches(raw_scanned(jax.checkpoint(raw_block))),
            batches,
            2.0,
            cold=True,
        )
    )
    return [*rows, _depth()]
