"""Max pooling and squeeze-and-excitation."""

from collections.abc import Sequence

import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.functional import conv_output_shape, get_activation_fn, max_pool
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.conv_layers import Conv2D
from weft.hierarchy.module import Module, nowrap
from weft.typing import Tensor


class MaxPool2D(BaseLayer):
    """Max pooling without padding."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a MaxPool2D; both fields have one entry per axis."""

        window: tuple[int, int] = (2, 2)
        strides: tuple[int, int] = (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the maxima of each window of `x`, `Num[Array, "batch height width channels"]`."""
        cfg = self.config
        return max_pool(x, cfg.window, strides=cfg.strides)

    @nowrap
    def output_shape(self, *, input_shape: Sequence[int | None]) -> list[int | None]:
        """Returns the shape of the output; sizes may be None if unknown."""
        cfg = self.config
        batch, *spatial, channels = input_shape
        out = conv_output_shape(spatial, window=cfg.window, strides=cfg.strides, padding="VALID")
        return [batch, *out, channels]


class SqueezeExcitation(BaseLayer):
    """Scales each channel by a gate computed from the means of all channels (Hu et al., 2018).

    With `se_ratio=0` and no `num_reduced_filters`, it is the identity.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a SqueezeExcitation.

        Attributes:
            input_dim: number of channels.
            se_ratio: hidden size of the gate, as a fraction of `input_dim`.
            num_reduced_filters: hidden size of the gate; None goes by `se_ratio`.
            activation: activation between the two layers of the gate.
            gating: activation after the second.
        """

        input_dim: Required[int] = REQUIRED
        se_ratio: float = 0.0
        num_reduced_filters: int | None = None
        activation: str = "nn.relu"
        gating: str = "nn.sigmoid"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        reduced = cfg.num_reduced_filters
        if reduced is None and cfg.se_ratio > 0:
            reduced = max(1, int(cfg.input_dim * cfg.se_ratio))
        self._reduced = reduced
        self._activation = get_activation_fn(cfg.activation)
        self._gating = get_activation_fn(cfg.gating)
        if reduced:
            conv = Conv2D.default_config()
            self._add_child("reduce", conv.clone(input_dim=cfg.input_dim, output_dim=reduced))
            self._add_child("expand", conv.clone(input_dim=reduced, output_dim=cfg.input_dim))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scales the channels of `inputs`, `Float[Array, "batch height width input_dim"]`."""
        if not self._reduced:
            return inputs
        squeezed = jnp.mean(inputs, axis=(1, 2), keepdims=True)
        return inputs * self._gating(self.expand(self._activation(self.reduce(squeezed))))
