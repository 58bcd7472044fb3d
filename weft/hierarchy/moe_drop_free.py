"""A mixture of experts that drops no token.

Instead of rooms of equal size, the choices of all tokens are sorted by expert, and one grouped
matrix product applies to each row the weight of its expert (MegaBlocks: Gale et al., 2023). On a
mesh each device sorts its own tokens.
"""

import enum
import math
from typing import Any, cast

import jax
import jax.numpy as jnp

from weft.config import InstantiableConfig, config_class, maybe_instantiate
from weft.errors import ArgumentShapeError, LayerConfigError
from weft.functional.routing import sort_by_expert
from weft.hierarchy.config_setters import for_each_config
from weft.hierarchy.gating import BaseGating, TopKDropFreeGating
from weft.hierarchy.module import Module
from weft.hierarchy.moe_layer import TransformerFeedForwardMoE
from weft.typing import DType, PartitionSpec, Tensor


class GMMBackend(enum.Enum):
    """What computes a grouped matrix product."""

    RAGGED_DOT = "ragged_dot"
    """`jax.lax.ragged_dot`."""
    MEGABLOX = "megablox"
    """JAX's Pallas kernel for TPUs."""


class TransformerFeedForwardDropFreeMoE(TransformerFeedForwardMoE):
    """A mixture of experts in which each token reaches all experts that it chose."""

    @config_class
    class Config(TransformerFeedForwardMoE.Config):
        """Configures a TransformerFeedForwardDropFreeMoE.

        Attributes:
          gating: chooses experts, a `TopKDropFreeGating` or the like.
          seq_load_balance_loss_weight: of a load-balancing loss of each sequence by itself; None
            for no such loss.
          input_dim_to_partition_spec: how tokens ("bsm") and weights ("emh", "ehm") lie over the
            mesh where experts are applied. Tokens and model dimensions of weights are whole there.
          output_dim_to_partition_spec: how the result ("bsm") lies over the mesh.
          gmm_backend: computes grouped matrix products; `jax.lax.ragged_dot` if None.
          tiling: of rows, contracted and other columns, for `GMMBackend.MEGABLOX`; or a config
            that makes it.
          preferred_element_type: the dtype of products; that of the tokens if None.
          interpret: whether to run the kernel without a TPU, slowly, for tests.
        """

        gating: BaseGating.Config = TopKDropFreeGating.default_config()
        num_groups: int = 1
        seq_load_balance_loss_weight: float | None = None
        input_dim_to_partition_spec: dict[str, PartitionSpec | None] = {
            "bsm": PartitionSpec("data", None, None),
            "emh": PartitionSpec(None, None, "model"),
            "ehm": PartitionSpec(None, "model", None),
        }
        output_dim_to_partition_spec: dict[str, PartitionSpec | None] = {
            "bsm": PartitionSpec("data", None, None),
        }
        gmm_backend: GMMBackend | None = None
        tiling: InstantiableConfig | tuple[int, int, int] | None = None
        preferred_element_type: DType | None = None
        interpret: bool = False

    # What is applied to hidden dimensions would have to draw on each device.
    _drops_hidden = False

    @classmethod
    def default_config(cls) -> Any:
        """A config with hidden dimensions over the mesh axis "model"."""
        cfg = super().default_config()
        weights = {dims: cfg.input_dim_to_partition_spec[dims] for dims in ("emh", "ehm")}
        return cfg.set(dim_to_mesh_axis_map={**cfg.dim_to_mesh_axis_map, **weights})

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not isinstance(self.gating, TopKDropFreeGating):
            raise LayerConfigError(
                f"{self.path()}: gating is a {type(self.gating).__name__}, which drops tokens; "
                "expected a TopKDropFreeGating or a TopKBiasGating, or a TransformerFeedForwardMoE "
                "around it."
            )
        self._tiling: Any = maybe_instantiate(cast(Any, cfg.tiling))
        if cfg.gmm_backend is GMMBackend.MEGABLOX and self._tiling is None:
            raise LayerConfigError(
                f"{self.path()}: gmm_backend={cfg.gmm_backend} needs a tiling, the sizes of blocks "
                "of rows, contracted and other columns, such as (128, 128, 128)."
            )

    def _apply_experts(self, x: Tensor, live: Tensor | None) -> Tensor:
        if x.ndim != 3:
            raise ArgumentShapeError(
                f"{self.path()}: inputs of the shape {x.shape}; expected (batch, time, "
                f"{self.config.input_dim})."
            )
        output = self.gating(
            x.astype(jnp.float32) @ self.parameters["gate_weight"].astype(jnp.float32),
            seq_load_balance_loss_weight=self.config.seq_load_balance_loss_weight,
            live=live,
        )
        self._add_losses(output)
        weights = [self.parameters[name] for name in (*self._wi_names(), "wo_weight")]
        y, num_dropped = self._on_mesh(x, output.dispatch_tensor, output.combine_tensor, weights)
        self._report_dropped(num_dropped / output.dispatch_tensor.size)
        return y

    def _report_dropped(self, share: Tensor) -> None:
        """Takes note of the share of choices that found no room: none here."""

    def _on_mesh(
        self, x: Tensor, experts: Tensor, gates: Tensor, weights: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Applies experts on each device to its own tokens; also counts dropped choices."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return self._apply_locally(x, experts, gates, *weights)
        cfg = self.config
        specs = {k: v or PartitionSpec() for k, v in cfg.input_dim_to_partition_spec.items()}
        tokens = PartitionSpec(*(*specs["bsm"], None, None, None)[:2], None)
        hidden = _axes(specs["emh"], 2)
        of_experts = _axes(specs["emh"], 0)
        of_tokens = _axes(tokens, 0) + _axes(tokens, 1)

        def on_device(*args: Tensor) -> tuple[Tensor, Tensor]:
            y, num_dropped = self._apply_locally(*args, expert_axes=of_experts)
            total = jax.lax.psum(num_dropped, of_experts + of_tokens)
            return jax.lax.psum(y, hidden + of_experts), total

        y, num_dropped = jax.shard_map(
            on_device,
            in_specs=(
                tokens,
                tokens,
                tokens,
                *[specs["emh"]] * (len(weights) - 1),
                specs["ehm"],
            ),
            out_specs=(tokens, PartitionSpec()),
            check_vma=False,
        )(x, experts, gates, *weights)
        spec = cfg.output_dim_to_partition_spec.get("bsm")
        return (y if spec is None else jax.lax.with_sharding_constraint(y, spec)), num_dropped

    def _num_rows(self, num_choices: int, num_parts: int) -> int:
        """For how many choices a device has room.

        Args:
          num_choices: of its tokens.
          num_parts: how many devices share the experts.
        """
        return num_choices

    def _apply_locally(
        self,
        x: Tensor,
        experts: Tensor,
        gates: Tensor,
        *weights: Tensor,
        expert_axes: tuple[str, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Applies the experts of this device to its tokens."""
        k, num_experts = experts.shape[-1], weights[0].shape[0]
        tokens, flat = x.reshape(-1, x.shape[-1]), experts.reshape(-1, k)
        # Without mesh axes, this is device 0 of 1.
        part = jax.lax.axis_index(expert_axes) if expert_axes else 0
        parts = math.prod(jax.lax.axis_size(name) for name in expert_axes)
        first = part * num_experts
        rows = sort_by_expert(
            flat,
            first=first,
            num_experts=num_experts,
            num_rows=self._num_rows(flat.size, parts),
        )
        at = rows.choices // k
        inputs = jnp.where(rows.is_real[:, None], tokens[at], 0)
        hidden: Any = None
        for weight, activation in zip(weights[:-1], self._activations, strict=True):
            y = activation(self._grouped_product(inputs, weight, rows.sizes))
            hidden = y if hidden is None else hidden * y
        y = self._grouped_product(hidden, weights[-1], rows.sizes)
        # What no expert computed may be anything.
        y = jnp.where(rows.is_real[:, None], y, 0) * gates.reshape(-1)[rows.choices][:, None]
        mine = (flat >= first) & (flat < first + num_experts)
        num_dropped = jnp.sum(mine) - jnp.sum(rows.is_real)
        outputs = jnp.zeros(tokens.shape, y.dtype).at[at].add(y)
        return outputs.reshape(x.shape).astype(x.dtype), num_dropped.astype(jnp.float32)

    def _grouped_product(self, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        """Multiplies the rows of each expert with its weight."""
        cfg = self.config
        dtype = cfg.preferred_element_type or x.dtype
        weight = weight.astype(x.dtype)
        if cfg.gmm_backend is not GMMBackend.MEGABLOX:
            return jax.lax.ragged_dot(x, weight, sizes, preferred_element_type=dtype)
        # Importing Pallas takes a while, and most models do without.
        from jax.experimental.pallas.ops.tpu import megablox

        tiling = tuple(
            min(a, b) for a, b in zip(self._tiling, (*x.shape, weight.shape[-1]), strict=True)
        )
        padded = jnp.pad(x, ((0, -x.shape[0] % tiling[0]), (0, 0)))
        y = megablox.gmm(
            padded, weight, sizes.astype(jnp.int32), dtype, tiling, interpret=cfg.interpret
        )
        return y[: x.shape[0]]


def _axes(spec: PartitionSpec, at: int) -> tuple[str, ...]:
    """The mesh axes that an axis is laid over."""
    entry = spec[at] if at < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


class ApproximateTokenDropFreeMoE(TransformerFeedForwardDropFreeMoE):
    """Experts over a mesh axis, with room for more choices on each device than its equal share.

    A device of `n` along the mesh axis of experts has room for `expert_parallel_capacity / n` of
    the choices of tokens; only what is more than that is dropped. On one device nothing is.
    """

    @config_class
    class Config(TransformerFeedForwardDropFreeMoE.Config):
        """Configures an ApproximateTokenDropFreeMoE.

        Attributes:
          expert_parallel_capacity: for how many times its equal share of choices a device has
            room, at least 1.
        """

        expert_parallel_capacity: float = 1.25

    @classmethod
    def default_config(cls) -> Any:
        """A config with experts over the mesh axis "expert", hidden dimensions over "model"."""
        cfg = super().default_config()
        weights = {
            "emh": PartitionSpec("expert", None, "model"),
            "ehm": PartitionSpec("expert", "model", None),
        }
        return cfg.set(
            input_dim_to_partition_spec={**cfg.input_dim_to_partition_spec, **weights},
            dim_to_mesh_axis_map={**cfg.dim_to_mesh_axis_map, **weights},
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.expert_parallel_capacity < 1:
            raise LayerConfigError(
                f"{self.path()}: expert_parallel_capacity={cfg.expert_parallel_capacity} leaves "
                "less than an equal share of room for each device; expected at least 1."
            )

    def _num_rows(self, num_choices: int, num_parts: int) -> int:
        share = math.ceil(self.config.expert_parallel_capacity * num_choices / num_parts)
        return min(num_choices, share)

    def _report_dropped(self, share: Tensor) -> None:
        self.add_summary("over_capacity", share)


def set_interpret_in_moe_config_recursively(
    cfg: Any, preferred_element_type: DType | None = jnp.bfloat16
) -> None:
    """Lets the mixtures of experts of a model run their kernels without a TPU.

    Args:
      cfg: a config, changed in place.
      preferred_element_type: the dtype of their products.
    """

    def set_interpret(config: Any) -> None:
        if isinstance(config, TransformerFeedForwardDropFreeMoE.Config):
            config.set(interpret=True, preferred_element_type=preferred_element_type)

    for_each_config(cfg, set_interpret)
