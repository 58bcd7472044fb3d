"""Mixtures of experts that drop no tokens.

The choices of all tokens are sorted by expert, and one grouped matrix product applies each expert's
weight to its rows (MegaBlocks: Gale et al., 2023). On a mesh, each device sorts its own tokens.
"""

import enum
import math
from typing import Any, cast

import jax
import jax.numpy as jnp

from weft._lazy import AxlearnEnumType
from weft.config import InstantiableConfig, maybe_instantiate
from weft.core.spmd import axes_of, get_global_mesh
from weft.errors import ArgumentShapeError, LayerConfigError
from weft.functional.routing import sort_by_expert
from weft.hierarchy.config_setters import for_each_config
from weft.hierarchy.mixture_of_experts.feed_forward import (
    DIM_TO_MESH_AXES,
    TransformerFeedForwardMoE,
)
from weft.hierarchy.mixture_of_experts.gating import BaseGating, TopKDropFreeGating
from weft.hierarchy.module import Module
from weft.typing import DType, PartitionSpec, Tensor


class GMMBackend(enum.Enum, metaclass=AxlearnEnumType):
    """Implementation of the grouped matrix product."""

    RAGGED_DOT = "ragged_dot"
    """`jax.lax.ragged_dot`."""
    MEGABLOX = "megablox"
    """JAX's Pallas kernel for TPUs."""


_TOKENS = {"bsm": PartitionSpec("data", None, None)}
# Weights with the hidden dimensions over "model", of experts on all devices or over "expert".
_UNSPLIT = {"emh": PartitionSpec(None, None, "model"), "ehm": PartitionSpec(None, "model", None)}
_SPLIT = {dims: DIM_TO_MESH_AXES[dims] for dims in _UNSPLIT}


class TransformerFeedForwardDropFreeMoE(TransformerFeedForwardMoE):
    """Mixture of experts in which each token reaches every expert it chose."""

    class Config(TransformerFeedForwardMoE.Config):
        """Configures a TransformerFeedForwardDropFreeMoE.

        Attributes:
          gating: a `TopKDropFreeGating` or a subclass.
          seq_load_balance_loss_weight: weight of a load-balancing loss per sequence; None for none.
          input_dim_to_partition_spec: sharding of tokens ("bsm") and weights ("emh", "ehm") where
            experts are applied; axis m is never sharded there.
          output_dim_to_partition_spec: sharding of the result ("bsm").
          gmm_backend: None for `jax.lax.ragged_dot`.
          tiling: block sizes of rows, contracted and other columns, or a config that returns them;
            required by `GMMBackend.MEGABLOX`.
          preferred_element_type: dtype of products; None for that of the tokens.
          interpret: whether to interpret the kernel, slowly, for tests without a TPU.
        """

        gating: BaseGating.Config = TopKDropFreeGating.default_config()
        num_groups: int = 1
        dim_to_mesh_axis_map: dict[str, PartitionSpec | None] = {**DIM_TO_MESH_AXES, **_UNSPLIT}
        seq_load_balance_loss_weight: float | None = None
        input_dim_to_partition_spec: dict[str, PartitionSpec | None] = {**_TOKENS, **_UNSPLIT}
        output_dim_to_partition_spec: dict[str, PartitionSpec | None] = {**_TOKENS}
        gmm_backend: GMMBackend | None = None
        tiling: InstantiableConfig | tuple[int, int, int] | None = None
        preferred_element_type: DType | None = None
        interpret: bool = False

    # Dropout of hidden dimensions would need a key per device.
    _drops_hidden = False

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not isinstance(self.gating, TopKDropFreeGating):
            raise LayerConfigError(
                f"{self.path()}: gating is a {type(self.gating).__name__}, which drops tokens; "
                "use a TopKDropFreeGating or a TopKBiasGating, or change the layer to a "
                "TransformerFeedForwardMoE."
            )
        self._tiling: Any = maybe_instantiate(cast(Any, cfg.tiling))
        if cfg.gmm_backend is GMMBackend.MEGABLOX and self._tiling is None:
            raise LayerConfigError(
                f"{self.path()}: gmm_backend={cfg.gmm_backend} needs a tiling: block sizes "
                "of rows, contracted and other columns, such as (128, 128, 128)."
            )

    def _apply_experts(self, x: Tensor, live: Tensor | None) -> Tensor:
        if x.ndim != 3:
            raise ArgumentShapeError(
                f"{self.path()}: inputs of shape {x.shape}; expected (batch, time, "
                f"{self.config.input_dim})."
            )
        seq_weight = self.config.seq_load_balance_loss_weight
        output = self.gating(
            self._router_logits(x), seq_load_balance_loss_weight=seq_weight, live=live
        )
        self._add_losses(output)
        weights = [self.parameters[name] for name in (*self._wi_names(), "wo_weight")]
        experts, gates = output.dispatch_tensor, output.combine_tensor
        y, num_dropped = self._apply_sharded(x, experts, gates, weights)
        self._report_dropped(num_dropped / experts.size)
        return y

    def _report_dropped(self, share: Tensor) -> None:
        """Reports the fraction of dropped choices; nothing is dropped here."""

    def _apply_sharded(
        self, x: Tensor, experts: Tensor, gates: Tensor, weights: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Applies experts to the tokens of each device; also counts dropped choices."""
        mesh = get_global_mesh()
        if mesh is None:
            return self._apply_locally(x, experts, gates, *weights)
        cfg = self.config
        specs = {k: v or PartitionSpec() for k, v in cfg.input_dim_to_partition_spec.items()}
        tokens = PartitionSpec(*(*specs["bsm"], None, None, None)[:2], None)
        hidden = _mesh_axes(specs["emh"], 2)
        of_experts = _mesh_axes(specs["emh"], 0)
        of_tokens = _mesh_axes(tokens, 0) + _mesh_axes(tokens, 1)

        def on_device(*args: Tensor) -> tuple[Tensor, Tensor]:
            y, num_dropped = self._apply_locally(*args, axes=of_experts)
            total = jax.lax.psum(num_dropped, of_experts + of_tokens)
            return jax.lax.psum(y, hidden + of_experts), total

        y, num_dropped = jax.shard_map(
            on_device,
            mesh=mesh if isinstance(mesh, jax.sharding.Mesh) else None,
            in_specs=(*[tokens] * 3, *[specs["emh"]] * (len(weights) - 1), specs["ehm"]),
            out_specs=(tokens, PartitionSpec()),
            check_vma=False,
        )(x, experts, gates, *weights)
        spec = cfg.output_dim_to_partition_spec.get("bsm")
        return (y if spec is None else jax.lax.with_sharding_constraint(y, spec)), num_dropped

    def _num_rows(self, num_choices: int, num_parts: int) -> int:
        """Returns how many choices fit on each of `num_parts` devices that share the experts."""
        return num_choices

    def _apply_locally(
        self,
        x: Tensor,
        experts: Tensor,
        gates: Tensor,
        *weights: Tensor,
        axes: tuple[str, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Applies experts to one device's tokens; `axes` are the mesh axes of experts."""
        k, num_experts = experts.shape[-1], weights[0].shape[0]
        tokens, flat = x.reshape(-1, x.shape[-1]), experts.reshape(-1, k)
        # Without mesh axes, this is device 0 of 1.
        part = jax.lax.axis_index(axes) if axes else 0
        parts = math.prod(jax.lax.axis_size(name) for name in axes)
        first = part * num_experts
        num_rows = self._num_rows(flat.size, parts)
        rows = sort_by_expert(flat, first=first, num_experts=num_experts, num_rows=num_rows)
        at = rows.choices // k
        inputs = jnp.where(rows.is_real[:, None], tokens[at], 0)
        hidden: Any = None
        for weight, activation in zip(weights[:-1], self._activations, strict=True):
            y = activation(self._grouped_product(inputs, weight, rows.sizes))
            hidden = y if hidden is None else hidden * y
        y = self._grouped_product(hidden, weights[-1], rows.sizes)
        # Rows that no expert computed hold arbitrary values.
        y = jnp.where(rows.is_real[:, None], y, 0) * gates.reshape(-1)[rows.choices][:, None]
        mine = (flat >= first) & (flat < first + num_experts)
        num_dropped = jnp.sum(mine) - jnp.sum(rows.is_real)
        outputs = jnp.zeros(tokens.shape, y.dtype).at[at].add(y)
        return outputs.reshape(x.shape).astype(x.dtype), num_dropped.astype(jnp.float32)

    def _grouped_product(self, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        cfg = self.config
        dtype = cfg.preferred_element_type or x.dtype
        weight = weight.astype(x.dtype)
        if cfg.gmm_backend is not GMMBackend.MEGABLOX:
            return jax.lax.ragged_dot(x, weight, sizes, preferred_element_type=dtype)
        # Importing Pallas is slow, and most models do not need it.
        from jax.experimental.pallas.ops.tpu import megablox

        tiling = tuple(
            min(a, b) for a, b in zip(self._tiling, (*x.shape, weight.shape[-1]), strict=True)
        )
        padded = jnp.pad(x, ((0, -x.shape[0] % tiling[0]), (0, 0)))
        y = megablox.gmm(
            padded, weight, sizes.astype(jnp.int32), dtype, tiling, interpret=cfg.interpret
        )
        return y[: x.shape[0]]


def _mesh_axes(spec: PartitionSpec, at: int) -> tuple[str, ...]:
    return axes_of(spec[at]) if at < len(spec) else ()


class ApproximateTokenDropFreeMoE(TransformerFeedForwardDropFreeMoE):
    """Mixture of experts over a mesh axis with spare capacity on each device.

    Each of `n` devices along the mesh axis of experts processes at most the fraction
    `expert_parallel_capacity / n` of the choices and drops the excess; one device drops nothing.
    """

    class Config(TransformerFeedForwardDropFreeMoE.Config):
        """Configures an ApproximateTokenDropFreeMoE; `expert_parallel_capacity` is at least 1."""

        expert_parallel_capacity: float = 1.25
        dim_to_mesh_axis_map: dict[str, PartitionSpec | None] = {**DIM_TO_MESH_AXES}
        input_dim_to_partition_spec: dict[str, PartitionSpec | None] = {**_TOKENS, **_SPLIT}

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.expert_parallel_capacity < 1:
            raise LayerConfigError(
                f"{self.path()}: expert_parallel_capacity={cfg.expert_parallel_capacity} leaves "
                "each device less than an equal share; expected at least 1."
            )

    def _num_rows(self, num_choices: int, num_parts: int) -> int:
        share = math.ceil(self.config.expert_parallel_capacity * num_choices / num_parts)
        return min(num_choices, share)

    def _report_dropped(self, share: Tensor) -> None:
        self.add_summary("over_capacity", share)


def set_interpret_in_moe_config_recursively(
    cfg: Any, preferred_element_type: DType | None = jnp.bfloat16
) -> None:
    """Makes mixtures of experts in a config interpret their kernels, for runs without a TPU.

    `preferred_element_type` becomes the dtype of their products.
    """

    def set_interpret(config: Any) -> None:
        if isinstance(config, TransformerFeedForwardDropFreeMoE.Config):
            config.set(interpret=True, preferred_element_type=preferred_element_type)

    for_each_config(cfg, set_interpret)
