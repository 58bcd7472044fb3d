"""Linear layers, noise on parameters, and layers that are the identity but in training."""

from typing import Any

import jax
import jax.numpy as jnp

from weft import functional
from weft.config import REQUIRED, Required
from weft.functional import statistics
from weft.hierarchy.base_layer import BaseLayer, ParameterNoise, ParameterSpec
from weft.hierarchy.module import nowrap
from weft.hierarchy.param_init import FanAxes
from weft.hierarchy.parameter_spec import (
    constant_spec,
    maybe_shard,
    weight_and_bias_specs,
)
from weft.hierarchy.stored_weight import StoredWeightLayer
from weft.typing import MeshAxes, NestedTensor, PartitionSpec, Tensor


class Linear(StoredWeightLayer):
    """Linear map of the last axis.

    Parameters: `weight` of shape (input_dim, output_dim), and `bias`.

    >>> cfg = Linear.default_config().set(name="linear", input_dim=2, output_dim=3)
    >>> layer = cfg.instantiate(parent=None)
    >>> layer.create_parameter_specs_recursively()["weight"].shape
    (2, 3)
    """

    class Config(StoredWeightLayer.Config):
        """Configures a Linear; without an `output_partition_spec` the compiler chooses."""

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        bias: bool = True
        param_partition_spec: Any = (None, None)
        output_partition_spec: PartitionSpec | MeshAxes | None = None

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (cfg.input_dim, cfg.output_dim)
        return weight_and_bias_specs(
            cfg, shape, ("row", "col"), bias_axes=slice(1, None)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps `Float[Array, "*batch input_dim"]` to `Float[Array, "*batch output_dim"]`."""
        parameters = self.parameters
        bias = parameters["bias"] if self.config.bias else None

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return functional.dense(
                x,
                self._normalized(weight),
                bias,
                dot_general=self.dot_general(),
            )

        y = self._with_weight(product, x, parameters)
        return maybe_shard(
            self._add_tensor_stats("outputs", y),
            self.config.output_partition_spec,
        )

    def _normalized(self, weight: Tensor) -> Tensor:
        return weight


class UnitNormLinear(Linear):
    """Linear map with weight vectors of unit length; cosines for inputs of unit length."""

    def _normalized(self, weight: Tensor) -> Tensor:
        return functional.l2_normalize(weight, axis=0, eps=1e-12)


class MultiLinear(BaseLayer):
    """Stack of linear maps of the same input.

    Parameters: `weight` of shape (input_dim, num_outputs, output_dim), and `bias`.
    """

    class Config(BaseLayer.Config):
        """Configures a MultiLinear of `num_outputs` maps, each to `output_dim`."""

        input_dim: Required[int] = REQUIRED
        num_outputs: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        bias: bool = True
        param_partition_spec: Any = (None, None, "model")

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg, factors = self.config, ("row", None, "col")
        shape = (cfg.input_dim, cfg.num_outputs, cfg.output_dim)
        axes = FanAxes(in_axis=0, out_axis=(1, 2))
        return weight_and_bias_specs(
            cfg, shape, factors, bias_axes=slice(1, None), fan_axes=axes
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Applies every map to `Float[Array, "*batch input_dim"]`.

        Returns `Float[Array, "*batch num_outputs output_dim"]`.
        """
        bias = self.parameters["bias"] if self.config.bias else None
        y = functional.dense_general(
            inputs,
            self.parameters["weight"],
            bias,
            dot_general=self.dot_general(),
        )
        return self._add_tensor_stats("outputs", y)


class VariationalNoise(ParameterNoise):
    """Independent normal noise on every parameter (Graves, 2011)."""

    class Config(ParameterNoise.Config):
        """Configures a VariationalNoise with the standard deviation `vn_std`; 0 adds nothing."""

        vn_std: Required[float] = REQUIRED

    def apply(self, prng_key: Tensor, params: NestedTensor) -> NestedTensor:
        std = self.config.vn_std
        if std <= 0:
            return params
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(prng_key, len(leaves))
        noisy = [
            x
            + jax.random.normal(key, x.shape, x.dtype)
            * jnp.asarray(std, x.dtype)
            for x, key in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy)


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
        return functional.dropout(x, rate=rate, prng_key=self.get_prng_key())

    @nowrap
    def get_prng_key(self) -> Tensor:
        """Returns the key for dropping elements."""
        return self.require_prng_key("dropout")


class StochasticDepth(BaseLayer):
    """Layer that drops a residual branch at random in training, or scales it up."""

    class Config(BaseLayer.Config):
        """Configures a StochasticDepth."""

        rate: float | None = None
        """The probability that the branch is dropped; None or 0 drops nothing."""
        mode: str = "row"
        """The mode "row" draws for each example, "batch" once for all."""

    def forward(self, x: Tensor) -> Tensor:
        """Drops the branch's output, `Float[Array, "batch *rest"]`."""
        cfg = self.config
        if not self.is_training or not cfg.rate:
            return x
        prng_key = self.require_prng_key("stochastic depth")
        return functional.stochastic_depth(
            x, rate=cfg.rate, prng_key=prng_key, mode=cfg.mode
        )


class DropToken(BaseLayer):
    """Layer that removes random tokens from each example in training, which shortens it."""

    class Config(BaseLayer.Config):
        """Configures a DropToken."""

        rate: float = 0
        num_cls_tokens: int = 0
        """Number of leading tokens to always keep, excluded from `rate`."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `Float[Array, "batch tokens dim"]` to `Float[Array, "batch kept dim"]`."""
        cfg = self.config
        if not self.is_training or not cfg.rate:
            return x
        key = self.require_prng_key("the removal of tokens")
        return functional.drop_tokens(
            x, rate=cfg.rate, prng_key=key, num_cls_tokens=cfg.num_cls_tokens
        )


class GradientMonitor(BaseLayer):
    """Identity that makes the norm of the gradient at an activation visible to the learner.

    It is the gradient of the parameter `gradient_norm`, which is not used otherwise. Let a
    `weft.trainer.GradientMonitorTransformation` report it and keep it from the optimizer.
    """

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"gradient_norm": constant_spec((), dtype=jnp.float32)}

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, an array of any shape."""
        return statistics.with_gradient_norm(
            x, self.parameters["gradient_norm"]
        )
