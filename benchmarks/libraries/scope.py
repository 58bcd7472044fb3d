"""Weft's functional core: functions of a scope."""

import functools

import jax

from benchmarks.libraries import raw
from benchmarks.libraries.library import Library, Program
from weft.core import Scope, apply, init, lift


def _norm(scope: Scope, x):
    scale = scope.param("scale", jax.nn.initializers.ones, x.shape[-1:])
    bias = scope.param("bias", jax.nn.initializers.zeros, x.shape[-1:])
    return raw.norm({"scale": scale, "bias": bias}, x)


def _dense(scope: Scope, x, features):
    shape = (x.shape[-1], features)
    kernel = scope.param("kernel", jax.nn.initializers.lecun_normal(), shape)
    bias = scope.param("bias", jax.nn.initializers.zeros, (features,))
    return raw.dense({"kernel": kernel, "bias": bias}, x)


def block(scope: Scope, x):
    """Computes a decoder block."""
    h = _norm(scope.push("norm1"), x)
    q, k, v = (_dense(scope.push(name), h, raw.DIM) for name in "qkv")
    x = x + _dense(scope.push("out"), raw.attend(q, k, v), raw.DIM)
    h = jax.nn.gelu(_dense(scope.push("up"), _norm(scope.push("norm2"), x), 4 * raw.DIM))
    return x + _dense(scope.push("down"), h, raw.DIM)


def _unrolled(n, block):
    def model(scope: Scope, x):
        for i in range(n):
            x = block(scope.push(f"layer{i}"), x)
        return x

    return model


def _scanned(n, block):
    scan = lift.scan(
        lambda scope, x, _: (block(scope, x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=n,
    )
    return lambda scope, x: scan(scope, x, None)[0]


def _mapped(scan):
    return lambda scope, x: scan(scope, None, x)[1]


class Scopes(Library):
    name = "Weft scopes"

    def unrolled(self, values):
        return Program(lambda: apply(_unrolled(len(values), block)), {"params": values})

    def jitted(self, values):
        return Program(lambda: apply(_unrolled(len(values), lift.jit(block))), {"params": values})

    def scanned(self, values):
        return Program(lambda: apply(_scanned(len(values), block)), {"params": raw.stacked(values)})

    def nested(self, values):
        def make():
            model = _scanned(len(values), lift.remat(block))
            return apply(
                lift.vmap(model, variable_axes={"params": None}, split_rngs={"params": False})
            )

        return Program(make, {"params": raw.stacked(values)})

    def transformed(self, values, kinds):
        over = {"split_rngs": {"params": False}}
        wrap = {
            "vmap": lambda fn: lift.vmap(fn, variable_axes={"params": None}, **over),
            "scan": lambda fn: _mapped(
                lift.scan(
                    lambda scope, _, x: (None, fn(scope, x)), variable_broadcast="params", **over
                )
            ),
            "remat": lift.remat,
        }
        return Program(
            lambda: apply(functools.reduce(lambda fn, kind: wrap[kind](fn), kinds, block)),
            {"params": values},
        )

    def shapes(self, n):
        return lambda: jax.eval_shape(init(_unrolled(n, block)), jax.random.key(0), raw.X)[1]


def libraries() -> list[Library]:
    return [Scopes()]
