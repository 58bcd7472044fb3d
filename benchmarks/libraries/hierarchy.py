"""Weft's hierarchy of layers made by configs."""

import jax
import jax.numpy as jnp

from benchmarks.libraries import raw
from benchmarks.libraries.library import Library, Program, renamed
from weft.config import REQUIRED, InstantiableConfig, Required, config_class
from weft.hierarchy import transforms
from weft.hierarchy.base_layer import BaseLayer, RematSpec
from weft.hierarchy.layers import LayerNorm, Linear
from weft.hierarchy.module import functional
from weft.hierarchy.repeat import Repeat


class Block(BaseLayer):
    """A decoder block."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        for name, leaves in raw.PARTS.items():
            if "scale" in leaves:
                norm = LayerNorm.default_config().set(input_dim=raw.DIM, eps=raw.EPS)
                self._add_child(name, norm)
            else:
                rows, columns = leaves["kernel"]
                linear = Linear.default_config().set(input_dim=rows, output_dim=columns)
                self._add_child(name, linear)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.out(raw.attend(self.q(h), self.k(h), self.v(h)))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Unrolled(BaseLayer):
    """Layers one after the other."""

    @config_class
    class Config(BaseLayer.Config):
        layers: Required[dict[str, InstantiableConfig]] = REQUIRED
        activation: str | None = None

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        for name, layer in cfg.layers.items():
            self._add_child(name, layer)

    def forward(self, x):
        activation = getattr(jnp, self.config.activation or "", lambda x: x)
        for name in self.config.layers:
            x = activation(getattr(self, name)(x))
        return x


class Scanned(Repeat):
    """Blocks in a loop."""

    def forward(self, x):
        return self._run(lambda x, _: (self.layer(x), None), x).carry


class Ensemble(BaseLayer):
    """A decoder over a leading axis of its input."""

    @config_class
    class Config(BaseLayer.Config):
        decoder: Required[InstantiableConfig] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("decoder", cfg.decoder)

    def forward(self, x):
        return transforms.vmap(lambda x: self.decoder(x), state_axis=None)(x)


def _program(cfg, values):
    layer = cfg.set(name="model").instantiate(parent=None)

    def make():
        return lambda params, x: functional(layer, None, params, (x,), is_training=True)[0]

    return Program(make, renamed(values, {"kernel": "weight"}))


def _unrolled(n):
    layers = {f"layer{i}": Block.default_config() for i in range(n)}
    return Unrolled.default_config().set(layers=layers)


def _scanned(n, **kwargs):
    return Scanned.default_config().set(num_layers=n, layer=Block.default_config().set(**kwargs))


class Hierarchy(Library):
    name = "Weft hierarchy"

    def unrolled(self, values):
        return _program(_unrolled(len(values)), values)

    def scanned(self, values):
        return _program(_scanned(len(values)), {"layer": raw.stacked(values)})

    def nested(self, values):
        decoder = _scanned(len(values), remat_spec=RematSpec())
        cfg = Ensemble.default_config().set(decoder=decoder)
        return _program(cfg, {"decoder": {"layer": raw.stacked(values)}})

    def shapes(self, n):
        cfg = _unrolled(n).set(name="model")

        def make():
            model = cfg.instantiate(parent=None)
            return jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))

        return make

    def chain(self, values):
        layers = {
            name: Linear.default_config().set(
                input_dim=layer["kernel"].shape[0], output_dim=layer["kernel"].shape[1]
            )
            for name, layer in values.items()
        }
        return _program(Unrolled.default_config().set(layers=layers, activation="tanh"), values)


def libraries() -> list[Library]:
    return [Hierarchy()]
