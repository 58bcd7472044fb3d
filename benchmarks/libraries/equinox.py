"""Equinox: modules that are pytrees, which map one vector each."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.libraries import raw
from benchmarks.libraries.library import (
    RATE,
    Library,
    Program,
    Stateful,
    chain_input,
    shrink,
)


class Block(eqx.Module):
    """A decoder block of inputs [time, dim]."""

    norm1: eqx.nn.LayerNorm
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = iter(jax.random.split(key, 6))

        def linear(*shape):
            return eqx.nn.Linear(*shape, key=next(keys))

        self.norm1 = eqx.nn.LayerNorm(raw.DIM, eps=raw.EPS)
        self.q, self.k, self.v, self.out = (linear(raw.DIM, raw.DIM) for _ in range(4))
        self.norm2 = eqx.nn.LayerNorm(raw.DIM, eps=raw.EPS)
        self.up, self.down = linear(raw.DIM, 4 * raw.DIM), linear(4 * raw.DIM, raw.DIM)

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        q, k, v = (jax.vmap(layer)(h) for layer in (self.q, self.k, self.v))
        x = x + jax.vmap(self.out)(raw.attend(q, k, v))
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(h)


class Decoder(eqx.Module):
    """Blocks one after the other."""

    layers: list[Block]

    def __init__(self, n, key):
        self.layers = [Block(key) for key in jax.random.split(key, n)]

    def __call__(self, x, call=lambda layer, x: layer(x)):
        for layer in self.layers:
            x = call(layer, x)
        return x


class Chain(eqx.Module):
    """Linear layers with a tanh after each."""

    layers: list[eqx.nn.Linear]

    def __init__(self, shapes, key):
        self.layers = [eqx.nn.Linear(*shape, key=key) for shape in shapes]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def _filled(layer, values):
    """Returns the layer, a norm or linear, with the values; `weight` is [..., out, in]."""
    weight = values["scale"] if "scale" in values else jnp.swapaxes(values["kernel"], -1, -2)

    def both(layer):
        return (layer.weight, layer.bias)

    return eqx.tree_at(both, layer, (jnp.array(weight), jnp.array(values["bias"])))


def _block(values):
    made = eqx.filter_eval_shape(Block, jax.random.key(0))

    def parts(block):
        return [getattr(block, name) for name in raw.PARTS]

    filled = [_filled(getattr(made, name), values[name]) for name in raw.PARTS]
    return eqx.tree_at(parts, made, filled)


def _decoder(values):
    made = eqx.filter_eval_shape(Decoder, 1, jax.random.key(0))
    return eqx.tree_at(lambda d: d.layers, made, [_block(layer) for layer in values.values()])


def _over_batch(model, **kwargs):
    return jax.vmap(functools.partial(model, **kwargs))


def _scanned(block, call):
    def model(x):
        arrays, static = eqx.partition(block, eqx.is_array)

        def body(x, arrays):
            return (call(eqx.combine(arrays, static), x), None)

        return jax.lax.scan(body, x, arrays)[0]

    return model


class Equinox(Library):
    name = "Equinox"

    def unrolled(self, values):
        return Program(lambda: lambda model, x: jax.vmap(model)(x), _decoder(values))

    def jitted(self, values):
        def make():
            call = eqx.filter_jit(lambda layer, x: layer(x))
            return lambda model, x: _over_batch(model, call=call)(x)

        return Program(make, _decoder(values))

    def scanned(self, values):
        def call(layer, x):
            return layer(x)

        def make():
            return lambda block, x: jax.vmap(_scanned(block, call))(x)

        return Program(make, _block(raw.stacked(values)))

    def nested(self, values):
        def make():
            call = eqx.filter_checkpoint(lambda layer, x: layer(x))

            def model(block, x):
                return eqx.filter_vmap(lambda x: jax.vmap(_scanned(block, call))(x))(x)

            return model

        return Program(make, _block(raw.stacked(values)))

    def transformed(self, values, kinds):
        wrap = {
            "vmap": lambda fn: eqx.filter_vmap(fn, in_axes=(None, 0)),
            "scan": lambda fn: (
                lambda block, x: jax.lax.scan(lambda _, x: (None, fn(block, x)), None, x)[1]
            ),
            "remat": lambda fn: eqx.filter_checkpoint(fn),
        }

        def make():
            def call(block, x):
                return jax.vmap(block)(x)

            return functools.reduce(lambda fn, kind: wrap[kind](fn), kinds, call)

        return Program(make, _block(values))

    def shapes(self, n):
        return lambda: eqx.filter_eval_shape(lambda key: Decoder(n, key), jax.random.key(0))

    def _chain(self, values):
        shapes = [layer["kernel"].shape for layer in values.values()]
        made = eqx.filter_eval_shape(Chain, shapes, jax.random.key(0))
        layers = [_filled(a, b) for a, b in zip(made.layers, values.values(), strict=True)]
        return eqx.tree_at(lambda chain: chain.layers, made, layers)

    def chain(self, values):
        def make():
            return lambda model, x: jax.vmap(model)(x)

        return Program(make, self._chain(values))

    def shrinking(self, values, plain=False):
        model = self._chain(values)
        jitted = eqx.filter_jit(lambda x, model: shrink(model, x), donate="all-except-first")
        return {"": Stateful(lambda model, x: jitted(x, model), model, jnp.ones(()))}

    def training(self, values, tx):
        def step(x, both):
            model, state = both
            of_model = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))
            loss, updates = of_model(model)
            if tx is None:
                updates = jax.tree.map(lambda g: -RATE * g, updates)
            else:
                updates, state = tx.update(updates, state, eqx.filter(model, eqx.is_array))
            return (eqx.apply_updates(model, updates), state), loss

        model = self._chain(values)
        state = () if tx is None else tx.init(eqx.filter(model, eqx.is_array))
        jitted = eqx.filter_jit(step, donate="all-except-first")

        def called(both, x):
            return jitted(x, both)

        return {"": Stateful(called, (model, state), chain_input(values))}


def libraries() -> list[Library]:
    return [Equinox()]
