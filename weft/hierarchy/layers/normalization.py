"""Normalization layers and moving averages.

Statistics are computed in `forward_dtype`, or the dtype of the input if None; the output has the
dtype of the input. `eps` is added to the variance, mean square or squared length. Parameters are
`scale` and, for layers that subtract a mean, `bias`.
"""

import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from weft import errors, functional
from weft.config import REQUIRED, Required
from weft.functional import arrays
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.module import Module
from weft.hierarchy.param_init import constant_initializer
from weft.hierarchy.parameter_spec import constant_spec, maybe_shard
from weft.typing import DType, MeshAxes, PartitionSpec, Tensor


class BaseNormalizationLayer(BaseLayer):
    """Base of layers that normalize vectors of a fixed size."""

    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED
        eps: float = 1e-8
        forward_dtype: DType | None = jnp.float32

    def forward(
        self, x: Tensor, *, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Normalizes vectors.

        Args:
            x: `Float[Array, "*batch input_dim"]`.
            segment_ids: `Int[Array, "batch time"]`, 0 for padding; used by layers that share
                statistics between positions.
        """
        raise NotImplementedError(type(self))

    _parameter_names: tuple[str, ...] = ()

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        initial = {"scale": 1.0, "bias": 0.0}
        return {
            name: self._vector_spec(initial[name])
            for name in self._parameter_names
        }

    def _scale_and_bias(self) -> list[Tensor]:
        return [self.parameters[name] for name in self._parameter_names]

    def _vector_spec(self, value: float, **kwargs: Any) -> ParameterSpec:
        shape, mesh_axes = (
            (self.config.input_dim,),
            self.config.param_partition_spec,
        )
        initializer = constant_initializer(value)
        return ParameterSpec(
            shape, mesh_axes=mesh_axes, initializer=initializer, **kwargs
        )


class LayerNormStateless(BaseNormalizationLayer):
    """Layer normalization without parameters."""

    def forward(
        self, x: Tensor, *, segment_ids: Tensor | None = None
    ) -> Tensor:
        # Every position has statistics of its own.
        cfg = self.config
        y = functional.layer_norm(
            x, *self._scale_and_bias(), eps=cfg.eps, dtype=cfg.forward_dtype
        )
        return self._add_tensor_stats("outputs", y)


class LayerNorm(LayerNormStateless):
    """Layer normalization ([Ba et al., 2016](https://arxiv.org/abs/1607.06450))."""

    _parameter_names = ("scale", "bias")


class RMSNormStateless(BaseNormalizationLayer):
    """Normalization by the root mean square, without parameters."""

    class Config(BaseNormalizationLayer.Config):
        """Configures a RMSNormStateless; specs that are None leave layouts to the compiler.

        `zero_centered` subtracts the mean, `(x - mean(x)) / sqrt(mean(x²) + eps)`: the mean square
        is that of `x` itself, so that a result is smaller than that of a LayerNorm.
        """

        zero_centered: bool | None = None
        input_partition_spec: PartitionSpec | MeshAxes | None = None
        output_partition_spec: PartitionSpec | MeshAxes | None = None

    def forward(
        self, x: Tensor, *, segment_ids: Tensor | None = None
    ) -> Tensor:
        # Every position has statistics of its own.
        cfg = self.config
        norm = (
            functional.centered_rms_norm
            if cfg.zero_centered
            else functional.rms_norm
        )
        x = maybe_shard(x, cfg.input_partition_spec)
        y = norm(
            x, *self._scale_and_bias(), eps=cfg.eps, dtype=cfg.forward_dtype
        )
        return maybe_shard(
            self._add_tensor_stats("outputs", y), cfg.output_partition_spec
        )


class RMSNorm(RMSNormStateless):
    """Normalization by the root mean square ([Zhang and Sennrich, 2019](https://arxiv.org/abs/1910.07467))."""

    class Config(RMSNormStateless.Config):
        """Configures a RMSNorm."""

        scale_offset: float = 0.0
        """Number added to the parameter `scale` before use; 1 for one that is 0 at first, so that
        weight decay draws the factor to 1."""

    _parameter_names = ("scale",)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"scale": self._vector_spec(1.0 - self.config.scale_offset)}

    def _scale_and_bias(self) -> list[Tensor]:
        scale, offset = self.parameters["scale"], self.config.scale_offset
        if not offset:
            return [scale]
        # In bfloat16, 1 + scale would lose what tells scales apart.
        return [scale.astype(jnp.float32) + offset]


class MultiheadRMSNorm(RMSNormStateless):
    """Normalization of all heads of a position together.

    The root mean square is that of `num_heads * input_dim` numbers. Parameter: `scale` of shape
    (num_heads, input_dim).
    """

    class Config(RMSNormStateless.Config):
        """Configures a MultiheadRMSNorm."""

        num_heads: Required[int] = REQUIRED

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape = (self.config.num_heads, self.config.input_dim)
        return {"scale": constant_spec(shape, 1.0, mesh_axes=("model", None))}

    def forward(
        self, x: Tensor, *, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Normalizes the last two axes of `Float[Array, "*batch num_heads input_dim"]`."""
        cfg = self.config
        spec = arrays.explicit_spec(x)
        together = (*x.shape[:-2], x.shape[-2] * x.shape[-1])
        y = functional.rms_norm(
            arrays.reshaped(x, together, spec[:-2]),
            self.parameters["scale"].reshape(-1),
            eps=cfg.eps,
            dtype=cfg.forward_dtype,
        )
        y = arrays.reshaped(y, x.shape, spec)
        return self._add_tensor_stats("outputs", y)


class NormType(enum.Enum):
    """Statistics of a group: mean and variance, or root mean square."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"


class GroupNorm(BaseNormalizationLayer):
    """Normalization of groups of channels ([Wu and He, 2018](https://arxiv.org/abs/1803.08494))."""

    class Config(BaseNormalizationLayer.Config):
        """Configures a GroupNorm."""

        num_groups: Required[int] = REQUIRED
        """Number of groups; must divide `input_dim`."""
        norm_type: NormType | None = NormType.LAYERNORM
        """None for LAYERNORM."""
        norm_axes: int | tuple[int, ...] | None = None
        """Axes that share statistics in addition to a group's channels, such as 1 for time, or -1
        for none; None for all but the batch."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.input_dim % cfg.num_groups:
            raise errors.LayerConfigError(
                f"{self.path()}: input_dim={cfg.input_dim} cannot be split into "
                f"num_groups={cfg.num_groups} equal groups; set num_groups to a divisor."
            )
        self._subtracts_mean = cfg.norm_type is not NormType.RMSNORM
        self._parameter_names = (
            ("scale", "bias") if self._subtracts_mean else ("scale",)
        )

    def forward(
        self, x: Tensor, *, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Normalizes groups of channels of `x`, `Float[Array, "batch *spatial input_dim"]`.

        Each segment of axis 1 has its own statistics, including padding (0).
        """
        cfg = self.config
        y = functional.group_norm(
            x,
            *self._scale_and_bias(),
            num_groups=cfg.num_groups,
            axis=cfg.norm_axes,
            eps=cfg.eps,
            subtract_mean=self._subtracts_mean,
            segment_ids=segment_ids,
            dtype=cfg.forward_dtype,
        )
        return self._add_tensor_stats("outputs", y)


class BatchNorm(BaseNormalizationLayer):
    """Batch normalization ([Ioffe and Szegedy, 2015](https://arxiv.org/abs/1502.03167)).

    In training, statistics are computed over all axes but the last and update the state
    `moving_mean` and `moving_variance`, which is used outside of training.
    """

    class Config(BaseNormalizationLayer.Config):
        """Configures a BatchNorm; `decay` is the weight of the old moving average."""

        decay: float = 0.999

    _parameter_names = ("scale", "bias")

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        moving: dict[str, Any] = {
            "dtype": jnp.float32,
            "weight_decay_scale": 0.0,
            "is_state": True,
        }
        return {
            **super()._create_layer_parameter_specs(),
            "moving_mean": self._vector_spec(0.0, **moving),
            "moving_variance": self._vector_spec(1.0, **moving),
        }

    def forward(
        self, x: Tensor, *, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Normalizes each channel of `x`, `Float[Array, "*batch input_dim"]`.

        Positions whose entry of `segment_ids` is 0 do not affect the statistics. NaN and infinities
        there are returned as they are, with gradient 0.
        """
        cfg = self.config
        names = ("moving_mean", "moving_variance")
        statistics = [self.parameters[name] for name in names]
        where = None
        if segment_ids is not None:
            where = (segment_ids > 0).reshape(
                *segment_ids.shape, *[1] * (x.ndim - 2)
            )
        if self.is_training:
            old = statistics
            axes = tuple(range(x.ndim - 1))
            new = functional.moments(
                x, axis=axes, where=where, dtype=cfg.forward_dtype
            )
            statistics = [m.reshape(-1) for m in new]
            for name, *averages in zip(names, old, statistics, strict=True):
                average = functional.update_running_average(
                    *averages, decay=cfg.decay
                )
                self.add_state_update(name, average)
        params = self._scale_and_bias()
        y = functional.batch_norm(
            x,
            *statistics,
            *params,
            eps=cfg.eps,
            where=where,
            dtype=cfg.forward_dtype,
        )
        return self._add_tensor_stats("outputs", y)


class L2Norm(BaseLayer):
    """Scales vectors to unit length."""

    class Config(BaseLayer.Config):
        eps: float = 1e-8
        forward_dtype: DType | None = jnp.float32

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last axis."""
        cfg = self.config
        y = x if cfg.forward_dtype is None else x.astype(cfg.forward_dtype)
        return functional.l2_normalize(y, eps=cfg.eps).astype(x.dtype)


class MovingAverage(BaseLayer):
    """Average of all values so far, optionally weighted towards recent ones.

    Value `n` has weight `max(1 / n, min_weight)`. Training updates the state `count` and `value`.
    """

    class Config(BaseLayer.Config):
        """Configures a MovingAverage of arrays of `shape`; `min_weight` 0 is the plain mean."""

        shape: Sequence[int] = ()
        min_weight: Required[float] = REQUIRED

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape, kind = (
            tuple(self.config.shape),
            {"dtype": jnp.float32, "is_state": True},
        )
        return {
            "count": constant_spec((), **kind),
            "value": constant_spec(shape, **kind),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Returns the average including `x`, an array of the configured shape."""
        count, value = self.parameters["count"], self.parameters["value"]
        weight = jnp.maximum(1 / (count + 1), self.config.min_weight)
        average = functional.update_running_average(value, x, decay=1 - weight)
        if self.is_training:
            self.add_state_update("count", count + 1)
            self.add_state_update("value", average)
        return average
