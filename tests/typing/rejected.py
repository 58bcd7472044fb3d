"""Mistakes that pyright must find: it reports each `ignore` that has become unnecessary."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import jax
import jax.numpy as jnp

import weft
from weft import linen as nn
from weft import nnx
from weft.config import (
    REQUIRED,
    ConfigBase,
    Required,
    config_class,
    config_for_function,
)
from weft.hierarchy import (
    BaseLayer,
    Conv2D,
    Dropout,
    LayerNorm,
    Linear,
    TransformerFeedForwardLayer,
)
from weft.trainer import SpmdTrainer


@nnx.jit
def double(x: jax.Array) -> jax.Array:
    return 2 * x


@nnx.jit(static_argnames="n")
def repeat(x: jax.Array, n: int) -> list[jax.Array]:
    return [x] * n


@nnx.vmap(in_axes=(0, None))
def add(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


def nnx_modules(rngs: nnx.Rngs):
    nnx.Linear(4, "8", rngs=rngs)  # pyright: ignore[reportArgumentType]
    nnx.Linear(4, 8)  # pyright: ignore[reportCallIssue]
    nnx.Linear(4, 8, rngs=0)  # pyright: ignore[reportArgumentType]
    nnx.Linear(4, 8, use_bias="no", rngs=rngs)  # pyright: ignore[reportArgumentType]
    nnx.Linear(4, 8, bias=True, rngs=rngs)  # pyright: ignore[reportCallIssue]
    nnx.Dropout("0.5", rngs=rngs)  # pyright: ignore[reportArgumentType]
    print(nnx.Linear(4, 8, rngs=rngs).weight)  # pyright: ignore[reportAttributeAccessIssue]


def nnx_transformations(x: jax.Array):
    double("x")  # pyright: ignore[reportArgumentType]
    double(x, x)  # pyright: ignore[reportCallIssue]
    repeat(x, n="3")  # pyright: ignore[reportArgumentType]
    repeat(x)  # pyright: ignore[reportCallIssue]
    add(x)  # pyright: ignore[reportCallIssue]
    nnx.jit(double, static_argnum=0)  # pyright: ignore[reportCallIssue]
    nnx.vmap(in_axis=0)  # pyright: ignore[reportCallIssue]
    nnx.grad(double)(x, 3)  # pyright: ignore[reportCallIssue]


class Mlp(nn.Module):
    features: int

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(x)


def linen_modules():
    nn.Dense("4")  # pyright: ignore[reportArgumentType]
    nn.Dense()  # pyright: ignore[reportCallIssue]
    nn.Dense(4, bias=True)  # pyright: ignore[reportCallIssue]
    nn.remat(Mlp)(feature=3)  # pyright: ignore[reportCallIssue]
    Mlp(3)("x")  # pyright: ignore[reportArgumentType]


def half(x: float) -> float:
    return x / 2


class Layer(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED
        rate: float = "0.5"  # pyright: ignore[reportAssignmentType]
        norm: LayerNorm.Config = LayerNorm.default_config()


class Table(ConfigBase):
    rows: int = 2


def configs(trainer: SpmdTrainer.Config):
    cfg = Layer.default_config()
    cfg.dim = "8"  # pyright: ignore[reportAttributeAccessIssue]
    cfg.norm = Dropout.default_config()  # pyright: ignore[reportAttributeAccessIssue]
    Dropout.default_config().rate = "0.5"  # pyright: ignore[reportAttributeAccessIssue]
    cfg.dimm = 8  # pyright: ignore[reportAttributeAccessIssue]
    cfg.norm.epss = 1e-6  # pyright: ignore[reportAttributeAccessIssue]
    Linear.default_config().inptu_dim = 4  # pyright: ignore[reportAttributeAccessIssue]
    trainer.max_steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    Table(rows=3).row = 4  # pyright: ignore[reportAttributeAccessIssue]
    Linear.Config(input_dim="4")  # pyright: ignore[reportArgumentType]
    trainer.max_step = "3"  # pyright: ignore[reportAttributeAccessIssue]
    cfg.set(dimm=8)  # pyright: ignore[reportCallIssue]
    cfg.set(dim="8")  # pyright: ignore[reportArgumentType]
    cfg.set(dim=8).clone(norm=Dropout.default_config())  # pyright: ignore[reportArgumentType]
    cfg.norm.clone(epss=1e-6)  # pyright: ignore[reportCallIssue]
    Conv2D.default_config().set(windows=(3, 3))  # pyright: ignore[reportCallIssue]
    TransformerFeedForwardLayer.default_config().set(activation="nn.rellu")  # pyright: ignore[reportArgumentType]
    TransformerFeedForwardLayer.default_config().set(structure="pre")  # pyright: ignore[reportArgumentType]
    cfg.set(quantization="int4")  # pyright: ignore[reportArgumentType]
    trainer.set(max_steps=3)  # pyright: ignore[reportCallIssue]
    trainer.checkpointer.set(name=3)  # pyright: ignore[reportArgumentType]
    config_for_function(half).instantiate().lower()  # pyright: ignore[reportAttributeAccessIssue]


def packages():
    print(weft.nnx.Liner)  # pyright: ignore[reportAttributeAccessIssue]
    print(weft.linen.Dens)  # pyright: ignore[reportAttributeAccessIssue]


def fits(model: weft.nnx.Linear):
    weft.fit(model, (), "crossentropy", epochs=1)  # pyright: ignore[reportArgumentType]
    weft.fit(model, (), "mse", lr=0.1)  # pyright: ignore[reportCallIssue]
    weft.fit(model, (), "mse", optimizer="adan")  # pyright: ignore[reportArgumentType]
    print(weft.fit(model, (), "mse", epochs=1).modell)  # pyright: ignore[reportAttributeAccessIssue]
