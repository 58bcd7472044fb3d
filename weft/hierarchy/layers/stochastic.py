"""Layers that are the identity but in training, where they drop elements or observe gradients."""

import jax.numpy as jnp

from weft.functional import drop_tokens, dropout, statistics, stochastic_depth
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.module import nowrap
from weft.hierarchy.parameter_spec import constant_spec
from weft.typing import Tensor


class Dropout(BaseLayer):
    """Layer that zeros random elements in training and scales up the others."""

    class Config(BaseLayer.Config):
        """Configures a Dropout; `rate` None or 0 drops nothing."""

        rate: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drops elements of an array of any shape."""
        rate = self.config.rate
        if not self.is_training or not rate:
            return x
        return dropout(x, rate=rate, prng_key=self.get_prng_key())

    @nowrap
    def get_prng_key(self) -> Tensor:
        """Returns the key for dropping elements."""
        return self.require_prng_key("dropout")


class StochasticDepth(BaseLayer):
    """Layer that drops a residual branch at random in training, or scales it up."""

    class Config(BaseLayer.Config):
        """Configures a StochasticDepth.

        Attributes:
            rate: the probability that the branch is dropped; None or 0 drops nothing.
            mode: "row" draws for each example, "batch" once for all.
        """

        rate: float | None = None
        mode: str = "row"

    def forward(self, x: Tensor) -> Tensor:
        """Drops the branch's output, `Float[Array, "batch *rest"]`."""
        cfg = self.config
        if not self.is_training or not cfg.rate:
            return x
        prng_key = self.require_prng_key("stochastic depth")
        return stochastic_depth(x, rate=cfg.rate, prng_key=prng_key, mode=cfg.mode)


class DropToken(BaseLayer):
    """Layer that removes random tokens from each example in training, which shortens it."""

    class Config(BaseLayer.Config):
        """Configures a DropToken.

        Attributes:
            num_cls_tokens: number of leading tokens to always keep, excluded from `rate`.
        """

        rate: float = 0
        num_cls_tokens: int = 0

    def forward(self, x: Tensor) -> Tensor:
        """Maps `Float[Array, "batch tokens dim"]` to `Float[Array, "batch kept dim"]`."""
        cfg = self.config
        if not self.is_training or not cfg.rate:
            return x
        key = self.require_prng_key("the removal of tokens")
        return drop_tokens(x, rate=cfg.rate, prng_key=key, num_cls_tokens=cfg.num_cls_tokens)


class GradientMonitor(BaseLayer):
    """Identity that makes the norm of the gradient at an activation visible to the learner.

    It is the gradient of the parameter `gradient_norm`, which is not used otherwise. Let a
    `weft.trainer.GradientMonitorTransformation` report it and keep it from the optimizer.
    """

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"gradient_norm": constant_spec((), dtype=jnp.float32)}

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, an array of any shape."""
        return statistics.with_gradient_norm(x, self.parameters["gradient_norm"])
