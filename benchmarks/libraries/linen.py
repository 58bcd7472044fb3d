"""Linen, Weft's and Flax's: the same modules, made of the one's or the other's layers."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp

from benchmarks.libraries import raw
from benchmarks.libraries.library import Library, Program
from weft import linen


@functools.cache
def block_of(nn):
    """Returns the class of a decoder block."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm(name="norm1")(x)
            q, k, v = (nn.Dense(raw.DIM, name=name)(h) for name in "qkv")
            x = x + nn.Dense(raw.DIM, name="out")(raw.attend(q, k, v))
            h = nn.gelu(nn.Dense(4 * raw.DIM, name="up")(nn.LayerNorm(name="norm2")(x)))
            return x + nn.Dense(raw.DIM, name="down")(h)

    return Block


@functools.cache
def _unrolled_of(nn, block):
    class Unrolled(nn.Module):
        n: int

        @nn.compact
        def __call__(self, x):
            for i in range(self.n):
                x = block(name=f"layer{i}")(x)
            return x

    return Unrolled


@functools.cache
def _scanned_of(nn, block):
    class Scanned(nn.Module):
        n: int

        @nn.compact
        def __call__(self, x):
            def body(block, x, _):
                return block(x), None

            layers = nn.scan(body, {"params": 0}, split_rngs={"params": True}, length=self.n)
            return layers(block(name="layers"), x, None)[0]

    return Scanned


@functools.cache
def _chain_of(nn):
    class Chain(nn.Module):
        features: tuple[int, ...]
        names: tuple[str, ...]

        @nn.compact
        def __call__(self, x):
            for name, features in zip(self.names, self.features, strict=True):
                x = jnp.tanh(nn.Dense(features, name=name)(x))
            return x

    return Chain


class Linen(Library):
    def __init__(self, name, nn):
        self.name, self.nn = name, nn

    def unrolled(self, values):
        cls = _unrolled_of(self.nn, block_of(self.nn))
        return Program(lambda: cls(len(values)).apply, {"params": values})

    def jitted(self, values):
        cls = _unrolled_of(self.nn, self.nn.jit(block_of(self.nn)))
        return Program(lambda: cls(len(values)).apply, {"params": values})

    def scanned(self, values):
        cls = _scanned_of(self.nn, block_of(self.nn))
        return Program(lambda: cls(len(values)).apply, self._stacked(values))

    def nested(self, values):
        nn = self.nn
        scanned = _scanned_of(nn, nn.remat(block_of(nn)))
        cls = nn.vmap(scanned, variable_axes={"params": None}, split_rngs={"params": False})
        return Program(lambda: cls(len(values)).apply, self._stacked(values))

    def _stacked(self, values):
        return {"params": {"layers": raw.stacked(values)}}

    def transformed(self, values, kinds):
        nn, over = self.nn, {"split_rngs": {"params": False}}

        def scan(fn):
            def body(block, _, x):
                return (None, fn(block, x))

            scan = nn.scan(body, variable_broadcast="params", **over)
            return lambda block, x: scan(block, None, x)[1]

        wrap = {
            "vmap": lambda fn: nn.vmap(fn, variable_axes={"params": None}, **over),
            "scan": scan,
            "remat": nn.remat,
        }

        def make():
            def call(block, x):
                return block(x)

            fn = functools.reduce(lambda fn, kind: wrap[kind](fn), kinds, call)
            block = block_of(nn)()
            return lambda variables, x: nn.apply(fn, block)(variables, x)

        return Program(make, {"params": values})

    def shapes(self, n):
        cls = _unrolled_of(self.nn, block_of(self.nn))
        return lambda: jax.eval_shape(lambda key, x: cls(n).init(key, x), jax.random.key(0), raw.X)

    def chain(self, values):
        features = tuple(len(layer["bias"]) for layer in values.values())
        model = _chain_of(self.nn)(features, tuple(values))
        return Program(lambda: model.apply, {"params": values})


def libraries() -> list[Library]:
    found: list[Library] = [Linen("Weft Linen", linen)]
    with contextlib.suppress(ImportError):
        found.append(Linen("Flax Linen", importlib.import_module("flax.linen")))
    return found
