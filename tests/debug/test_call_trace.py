"""Modules of every library, in each other, are named by where they are in the whole model."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen as flax_nn

from weft import linen as nn
from weft import nnx
from weft.config import REQUIRED, Required, config_class, config_for_class
from weft.debug.first_nonfinite import trace_calls
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.module import functional
from weft.interop import as_hierarchy, as_nnx
from weft.trainer.model import LibraryModel

X = jnp.ones((2, 4))
BATCH = {"x": X}


def calls_of(model, batch=BATCH):
    """Returns the calls of a training step's forward pass, in the order in which they end."""
    cfg = model if isinstance(model, BaseLayer.Config) else None
    if cfg is None:
        cfg = LibraryModel.default_config().set(layer=model, inputs=(batch,))
    layer = cfg.set(name="model").instantiate(parent=None)
    layer.create_parameter_specs_recursively()  # which makes the modules
    seen = []

    def see(call, method, args, kwargs):
        result = method(*args, **kwargs)
        seen.append(str(call))
        return result

    def run(key, batch):
        state = layer.initialize_parameters_recursively(key)
        with trace_calls(see):
            out, _ = functional(
                layer,
                prng_key=key,
                state=state,
                inputs={"input_batch": batch} if cfg is not model else (batch["x"],),
                is_training=True,
            )
        return out

    jax.eval_shape(run, jax.random.key(0), batch)
    return seen


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.down = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.down(x))


class OfNNX(nnx.Module):
    """Blocks in a loop, and others in a list."""

    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return Block(rngs=rngs)

        self.blocks = make(rngs)
        self.heads = nnx.List([nnx.Linear(4, 2, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)])

    def __call__(self, input_batch):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, block):
            return block(x)

        x = through(input_batch["x"], self.blocks)
        return jnp.mean(self.heads[0](x)) + jnp.mean(self.mean_head(x)), {}

    def mean_head(self, x):
        return self.heads[1](x)


def test_modules_of_nnx_in_loops_and_lists():
    assert calls_of(config_for_class(OfNNX)) == [
        "model.blocks.down, a Linear (__call__)",
        "model.blocks.norm, a LayerNorm (__call__)",
        "model.blocks, a Block (__call__)",
        "model.heads.0, a Linear (__call__)",
        "model.heads.1, a Linear (__call__)",
        "model, a OfNNX (mean_head)",
        "model, a OfNNX (__call__)",
    ]


class Inner(BaseLayer):
    def forward(self, x):
        return x + 1


class Around(BaseLayer):
    """A layer with another one, whatever it is."""

    @config_class
    class Config(BaseLayer.Config):
        layer: Required[object] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("layer", cfg.layer)

    def forward(self, x):
        return self.layer(x)


class Mixed(nnx.Module):
    """A module of Linen and a layer of the hierarchy, in NNX."""

    def __init__(self, *, rngs):
        self.dense = as_nnx(nn.Sequential([nn.Dense(4), nn.Dense(4)]), rngs=rngs).lazy_init(X)
        config = Around.default_config().set(layer=Inner.default_config())
        self.of_configs = as_nnx(config, rngs=rngs).lazy_init(X)

    def __call__(self, x):
        return self.of_configs(self.dense(x))


def test_all_three_nested():
    mixed = as_hierarchy(config_for_class(Mixed), inputs=(X,))
    config = Around.default_config().set(layer=Around.default_config().set(layer=mixed))
    found = [call for call in calls_of(config) if "InHierarchy" not in call]
    # Earlier calls created the NNX module.
    assert found[-8:] == [
        "model.layer.layer.dense.layers_0, a Dense (__call__)",
        "model.layer.layer.dense.layers_1, a Dense (__call__)",
        "model.layer.layer.dense, a Sequential (__call__)",
        "model.layer.layer.dense, a InNNX (__call__)",
        "model.layer.layer.of_configs.layer, a Inner (forward)",
        "model.layer.layer.of_configs, a InNNX (__call__)",
        "model.layer.layer, a Mixed (__call__)",
        "model.layer, a Around (forward)",
    ]


class OfFlax(flax_nn.Module):
    @flax_nn.compact
    def __call__(self, x):
        return flax_nn.Dense(3, name="head")(flax_nn.Dense(4, name="body")(x))


class OfHaiku(hk.Module):
    def __call__(self, x):
        return hk.Linear(3, name="head")(hk.nets.MLP([4], name="body")(x))


@pytest.mark.parametrize(
    ("layer", "calls"),
    [
        (OfFlax, ["body, a Dense (__call__)", "head, a Dense (__call__)"]),
        (
            OfHaiku,
            [
                "of_haiku.body.linear_0, a Linear (__call__)",
                "of_haiku.body, a MLP (__call__)",
                "of_haiku.head, a Linear (__call__)",
            ],
        ),
    ],
    ids=["flax", "haiku"],
)
def test_flax_and_haiku_modules_are_named(layer, calls):
    config = Around.default_config().set(layer=as_hierarchy(layer, inputs=(X,)))
    assert calls_of(config)[: len(calls)] == [f"model.layer.{call}" for call in calls]


def test_untracked_module_is_named_by_enclosing_layer():
    layer = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    config = Around.default_config().set(
        layer=as_hierarchy(eqx.nn.Lambda(lambda x: x @ layer.weight.T), inputs=(X,))
    )
    assert calls_of(config) == ["model.layer, a InHierarchy (forward)"]
