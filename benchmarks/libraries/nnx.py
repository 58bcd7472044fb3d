"""NNX, Weft's and Flax's: the same objects, made of the one's or the other's layers."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp

from benchmarks.libraries import raw
from benchmarks.libraries.library import RATE, Library, Program, chain_input
from weft import nnx as weft_nnx


@functools.cache
def block_of(nnx):
    """Returns the class of a decoder block."""

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            linear = functools.partial(nnx.Linear, rngs=rngs)
            self.norm1 = nnx.LayerNorm(raw.DIM, rngs=rngs)
            self.q, self.k, self.v, self.out = (linear(raw.DIM, raw.DIM) for _ in range(4))
            self.norm2 = nnx.LayerNorm(raw.DIM, rngs=rngs)
            self.up, self.down = linear(raw.DIM, 4 * raw.DIM), linear(4 * raw.DIM, raw.DIM)

        def __call__(self, x):
            h = self.norm1(x)
            x = x + self.out(raw.attend(self.q(h), self.k(h), self.v(h)))
            return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))

    return Block


@functools.cache
def decoder_of(nnx):
    """Returns the class of a decoder; `call` is how a layer is called."""

    class Decoder(nnx.Module):
        def __init__(self, n, *, rngs):
            self.names = tuple(f"layer{i}" for i in range(n))
            for name in self.names:
                setattr(self, name, block_of(nnx)(rngs=rngs))

        def __call__(self, x, call=lambda layer, x: layer(x)):
            for name in self.names:
                x = call(getattr(self, name), x)
            return x

    return Decoder


@functools.cache
def chain_of(nnx):
    """Returns the class of a chain of layers."""

    class Chain(nnx.Module):
        def __init__(self, shapes, *, rngs):
            self.names = tuple(shapes)
            for name, shape in shapes.items():
                setattr(self, name, nnx.Linear(*shape, rngs=rngs))

        def __call__(self, x):
            for name in self.names:
                x = jnp.tanh(getattr(self, name)(x))
            return x

    return Chain


def _filled(module, values):
    """Returns the module with the values in its variables.

    It was made with others: Flax takes minutes to make large ones without values.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            _filled(getattr(module, name), value)
        else:
            setattr(module, name, type(getattr(module, name))(jnp.array(value)))
    return module


class NNX(Library):
    def __init__(self, name, nnx):
        self.name, self.nnx = name, nnx

    def _decoder(self, values):
        nnx = self.nnx
        model = decoder_of(nnx)(len(values), rngs=nnx.Rngs(0))
        return _filled(model, values)

    def _block(self, values):
        nnx = self.nnx
        model = block_of(nnx)(rngs=nnx.Rngs(0))
        return _filled(model, raw.stacked(values))

    def unrolled(self, values):
        return Program(lambda: lambda model, x: model(x), self._decoder(values), self.nnx.jit)

    def jitted(self, values):
        def make():
            call = self.nnx.jit(lambda layer, x: layer(x))
            return lambda model, x: model(x, call)

        return Program(make, self._decoder(values), self.nnx.jit)

    def _scanned(self, call):
        nnx = self.nnx
        scan = nnx.scan(lambda x, layer: call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return lambda model, x: scan(x, model)

    def scanned(self, values):
        def make():
            return self._scanned(lambda layer, x: layer(x))

        return Program(make, self._block(values), self.nnx.jit)

    def nested(self, values):
        def make():
            scanned = self._scanned(self.nnx.remat(lambda layer, x: layer(x)))
            return self.nnx.vmap(scanned, in_axes=(None, 0), out_axes=0)

        return Program(make, self._block(values), self.nnx.jit)

    def transformed(self, values, kinds):
        nnx = self.nnx
        wrap = {
            "vmap": lambda fn: nnx.vmap(fn, in_axes=(None, 0), out_axes=0),
            "scan": lambda fn: nnx.scan(fn, in_axes=(None, 0), out_axes=0),
            "remat": nnx.remat,
        }

        def make():
            def call(block, x):
                return block(x)

            return functools.reduce(lambda fn, kind: wrap[kind](fn), kinds, call)

        model = block_of(nnx)(rngs=nnx.Rngs(0))
        return Program(make, _filled(model, values), nnx.jit)

    def shapes(self, n):
        nnx = self.nnx

        def make():
            model = nnx.eval_shape(lambda: decoder_of(nnx)(n, rngs=nnx.Rngs(0)))
            return nnx.state(model, nnx.Param)

        return make

    def _chain(self, values):
        nnx = self.nnx
        shapes = {name: layer["kernel"].shape for name, layer in values.items()}
        model = chain_of(nnx)(shapes, rngs=nnx.Rngs(0))
        return _filled(model, values)

    def chain(self, values):
        return Program(lambda: lambda model, x: model(x), self._chain(values), self.nnx.jit)

    def _ways(self, jit, make, x, plain=False):
        """Returns jitted functions of x and of the result of `make`, by calling convention."""
        is_weft = self.is_weft
        if plain:
            return {"": functools.partial(jit(), *make(), x)}
        ways = {"": jit()} if is_weft else {"": jit(), ", tree mode": jit(graph=False)}
        steps = {way: functools.partial(jitted, *make(), x) for way, jitted in ways.items()}
        cached = self.nnx.cached_partial(jit(), *make())
        return {**steps, ", cached_partial": functools.partial(cached, x)}

    def shrinking(self, values, plain=False):
        def shrink(model, x):
            for name in model.names:
                layer = getattr(model, name)
                layer.kernel[...] *= 0.999
                layer.bias[...] *= 0.999
            return x + 1

        jit = functools.partial(self.nnx.jit, shrink, donate_argnums=0)
        return self._ways(jit, lambda: (self._chain(values),), jnp.ones(()), plain)

    def training(self, values, tx):
        nnx = self.nnx

        def of_model(model, x):
            return nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)

        def descend(model, x):
            loss, grads = of_model(model, x)
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, params, grads))
            return loss

        def optimize(model, optimizer, x):
            loss, grads = of_model(model, x)
            optimizer.update(model, grads)
            return loss

        def make():
            model = self._chain(values)
            return (model,) if tx is None else (model, nnx.Optimizer(model, tx, wrt=nnx.Param))

        fn, donated = (descend, 0) if tx is None else (optimize, (0, 1))
        jit = functools.partial(nnx.jit, fn, donate_argnums=donated)
        return self._ways(jit, make, chain_input(values))


def libraries() -> list[Library]:
    found: list[Library] = [NNX("Weft NNX", weft_nnx)]
    with contextlib.suppress(ImportError):
        found.append(NNX("Flax NNX", importlib.import_module("flax.nnx")))
    return found
