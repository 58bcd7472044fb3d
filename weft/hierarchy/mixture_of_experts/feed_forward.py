"""Mixture-of-experts feed-forward layers of a transformer, and conversion from a dense one.

A router sends each token to a few of many feed-forward layers, the experts, which adds parameters
without adding computation per token:

    tokens (o g s m) --router--> logits (o g s e) --gating--> slots (o g s e c)
    dispatch: (o g s m) -> (o e g c m) --experts--> (o e g c m) --combine--> (o g s m)

Axes: outer batch, group, token of a group ("sequence"), model dimension, expert, slot
("capacity"), hidden dimension. Tokens compete for slots within their group. Groups are sharded over
"data" and "expert" before the dispatch and experts over "expert" after it; the compiler inserts the
exchange of tokens (Lepikhin et al., 2021).

Layers that drop no tokens sort the choices of all tokens by expert, and one grouped matrix product
applies each expert's weight to its rows (MegaBlocks: Gale et al., 2023). On a mesh, each device
sorts its own tokens, and sends them to the devices of their experts if both tokens and experts are
split over an axis.
"""

import dataclasses
import enum
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from weft import config, errors
from weft._door import EnumTypeWithHints
from weft.core.spmd import (
    AnyMesh,
    axes_of,
    constrain,
    constrain_like_jit,
    fitting_spec,
    get_global_mesh,
    is_as_on_one_device,
)
from weft.functional import (
    get_activation_fn,
    grouped_matmul,
    project,
    routing,
)
from weft.functional.arrays import (
    explicit_spec,
    finite_or_counted,
    gathered,
    reshaped,
    sharded_as,
)
from weft.functional.expert_parallelism import dispatch_and_combine
from weft.hierarchy import base_layer, param_init, parameter_spec
from weft.hierarchy.attention.feed_forward import (
    ResidualLayer,
    TransformerFeedForwardLayer,
    hidden_dim_of,
)
from weft.hierarchy.config_setters import for_each_config
from weft.hierarchy.mixture_of_experts.gating import (
    BaseGating,
    Top2Gating,
    TopKDropFreeGating,
)
from weft.hierarchy.module import Module, nowrap
from weft.typing import ActivationName, DType, PartitionSpec, PyTree, Tensor

T = TypeVar("T")

# Default sharding of arrays, by the letters of their axes.
DIM_TO_MESH_AXES: dict[str, PartitionSpec] = {
    "me": PartitionSpec(None, None),
    "emh": PartitionSpec("expert", None, "model"),
    "ehm": PartitionSpec("expert", "model", None),
    "ogsm": PartitionSpec("data", "expert", None, None),
    "ogse": PartitionSpec("data", "expert", None, None),
    "ogsec": PartitionSpec("data", "expert", None, None, None),
    "oegcm": PartitionSpec("data", "expert", None, None, None),
    "oegch": PartitionSpec("data", "expert", None, None, "model"),
}


@runtime_checkable
class HybridShape(Protocol):
    """Sizes of the axes of a mesh within slices of TPUs, and between them."""

    ici_mesh_shape: Sequence[int]
    dcn_mesh_shape: Sequence[int]


def get_outer_batch_from_mesh(
    *,
    mesh_axis_names: Sequence[str],
    outer_batch_axis_names: Sequence[str],
    mesh_shape: Sequence[int] | HybridShape | None,
) -> int | None:
    """Returns the number of outer batches: one for each part of a mesh that holds all experts.

    Args:
      outer_batch_axis_names: axes over which experts are not sharded, such as "data".
      mesh_shape: sizes of the axes, or a hybrid mesh shape with `ici_mesh_shape` and
        `dcn_mesh_shape`. If None, the result is None.

    Raises ArgumentValueError if the mesh has no such axis, or its size is not known.

    >>> axes = {"mesh_axis_names": ("data", "expert"), "outer_batch_axis_names": ("data",)}
    >>> get_outer_batch_from_mesh(**axes, mesh_shape=(4, 2))
    4
    """
    if mesh_shape is None:
        return None
    if isinstance(mesh_shape, HybridShape):
        shapes = [mesh_shape.ici_mesh_shape, mesh_shape.dcn_mesh_shape]
    else:
        shapes = [mesh_shape]
    outer_batch = 1
    for shape in shapes:
        axis_sizes = dict(zip(mesh_axis_names, shape, strict=True))
        for name in outer_batch_axis_names:
            if axis_sizes.get(name, 0) < 1:
                raise errors.ArgumentValueError(
                    f"the outer batch is sharded over the mesh axis {name!r}, whose size in "
                    f"{axis_sizes} is not known; expected a mesh axis with a positive size."
                )
            outer_batch *= axis_sizes[name]
    return outer_batch


class ExpertWeight(NamedTuple):
    """Weight of each expert, and the factors of a low-rank term to add to it, if any.

    Attributes:
        weight: `Float[Array, "experts inputs outputs"]`.
        down: `Float[Array, "experts inputs rank"]`.
        up: `Float[Array, "experts rank outputs"]`.
    """

    weight: Tensor
    down: Tensor | None = None
    up: Tensor | None = None

    def product(
        self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Returns the product of inputs and the sum of both, which is never computed."""
        y = multiply(x, self.weight)
        if self.down is None or self.up is None:
            return y
        return y + multiply(multiply(x, self.down), self.up)


class _GroupSizes(NamedTuple):
    """Numbers into which the tokens of a batch are divided."""

    outer_batch: int
    num_groups: int  # of an outer batch


class TransformerFeedForwardMoE(ResidualLayer):
    """Mixture of feed-forward layers with a skip connection.

    Parameters: `gate_weight` (input_dim, num_experts) of the router, `wi_weight` (num_experts,
    input_dim, hidden_dim), or `wi_0_weight` and `wi_1_weight` of a gated layer, and `wo_weight`
    (num_experts, hidden_dim, input_dim). Experts have no biases. With `shared_expert_gate`, there
    is a `shared_expert_gate_weight` (input_dim, 1).

    The module output "aux_loss" is the weighted sum of its losses. A language model adds it to its
    own loss with `metrics_config(aux_loss_regex=".*/aux_loss")`.
    """

    class Config(ResidualLayer.Config):
        """Configures a TransformerFeedForwardMoE."""

        input_dim: config.Required[int] = config.REQUIRED
        hidden_dim: config.Required[int | config.FunctionConfigBase] = (
            config.REQUIRED
        )
        """Size between the linear maps of an expert, as for `TransformerFeedForwardLayer`."""
        activation: ActivationName | tuple[ActivationName, ActivationName] = (
            "nn.relu"
        )
        """Name of an expert's activation, or two, as for `TransformerFeedForwardLayer`."""
        num_experts: config.Required[int] = config.REQUIRED
        num_groups: config.Required[int] = config.REQUIRED
        """Groups per outer batch. More need less memory, but may drop more tokens."""
        outer_batch: int = 1
        """Number of parts of a batch that each use all experts; see `get_outer_batch_from_mesh`."""
        gating: BaseGating.Config = Top2Gating.default_config()
        load_balance_loss_weight: float = 0.01
        router_z_loss_weight: float = 0.0
        """Weight of the gating's loss on the size of logits."""
        corr_loss_weight: float = 0.0
        """Weight of the mean squared cosine between two experts' router weights."""
        residual_weight: float = 1.0
        shared_expert: TransformerFeedForwardLayer.Config | None = None
        """Layer with structure="nonorm" that all tokens pass, in addition to their experts; None
        for none."""
        shared_expert_gate: bool = False
        """Whether a sigmoid of each token weighs the output of the shared expert."""
        dim_to_mesh_axis_map: dict[str, PartitionSpec | None] = {
            **DIM_TO_MESH_AXES
        }
        """Sharding of weights and activations by the letters of their axes: outer batch (o), group
        (g), token of a group (s), model dimension (m), expert (e), slot of an expert (c) and hidden
        dimension (h). With one outer batch, groups take its mesh axes as well."""

    _drops_hidden: ClassVar[bool] = True

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name in ("num_experts", "num_groups", "outer_batch"):
            if getattr(cfg, name) < 1:
                raise errors.LayerConfigError(
                    f"{self.path()}: {name}={getattr(cfg, name)}; expected at least 1."
                )
        unknown_keys = sorted(
            cfg.dim_to_mesh_axis_map.keys() - DIM_TO_MESH_AXES.keys()
        )
        if unknown_keys:
            raise errors.LayerConfigError(
                f"{self.path()}: dim_to_mesh_axis_map has {unknown_keys}; expected keys "
                f"among {', '.join(DIM_TO_MESH_AXES)}."
            )
        self._hidden_dim = hidden_dim_of(cfg)
        activations = cfg.activation
        if isinstance(activations, str):
            activations = (activations,)
        self._activations = [get_activation_fn(name) for name in activations]
        self._add_norms(cfg.input_dim)
        self._add_child("gating", cfg.gating.set(num_experts=cfg.num_experts))
        hidden_dropout: config.InstantiableConfig | None = cfg.dropout
        # With the norm after the sum, dropout applies only to the branch's output.
        if cfg.structure == "postnorm" or not self._drops_hidden:
            hidden_dropout = None
        self._add_dropouts(hidden_dropout)
        if cfg.shared_expert_gate and cfg.shared_expert is None:
            raise errors.LayerConfigError(
                f"{self.path()}: shared_expert_gate=True, but there is no shared_expert to weigh; "
                "set one, or no gate."
            )
        self._maybe_add_child(
            "shared_expert", cfg.shared_expert, input_dim=cfg.input_dim
        )

    def _wi_names(self) -> list[str]:
        """Returns the names of the weights before the activations; a gated layer has two."""
        if len(self._activations) == 1:
            return ["wi_weight"]
        return [f"wi_{i}_weight" for i in range(len(self._activations))]

    @nowrap
    def expert_weight_specs(self) -> dict[str, base_layer.ParameterSpec]:
        """Returns the specs of the weights of experts, `(experts, inputs, outputs)`."""
        specs = self._create_layer_parameter_specs()
        return {name: specs[name] for name in (*self._wi_names(), "wo_weight")}

    def _create_layer_parameter_specs(
        self,
    ) -> dict[str, base_layer.ParameterSpec]:
        cfg = self.config
        m, e, h = cfg.input_dim, cfg.num_experts, self._hidden_dim
        expert_fan_axes = param_init.FanAxes(
            in_axis=1, out_axis=2, batch_axis=0
        )
        specs = super()._create_layer_parameter_specs()
        specs["gate_weight"] = base_layer.ParameterSpec(
            (m, e),
            mesh_axes=cfg.dim_to_mesh_axis_map.get("me"),
            factorization=parameter_spec.FactorizationSpec(("row", "col")),
            fan_axes=param_init.FanAxes(in_axis=0, out_axis=1),
        )
        wi_weight = base_layer.ParameterSpec(
            (e, m, h),
            mesh_axes=cfg.dim_to_mesh_axis_map.get("emh"),
            factorization=parameter_spec.FactorizationSpec(
                (None, "row", "col")
            ),
            fan_axes=expert_fan_axes,
        )
        for name in self._wi_names():
            specs[name] = wi_weight
        specs["wo_weight"] = dataclasses.replace(
            wi_weight,
            shape=(e, h, m),
            mesh_axes=cfg.dim_to_mesh_axis_map.get("ehm"),
        )
        if cfg.shared_expert_gate:
            specs["shared_expert_gate_weight"] = base_layer.ParameterSpec(
                (m, 1),
                mesh_axes=(None, None),
                fan_axes=param_init.FanAxes(in_axis=0, out_axis=1),
            )
        return specs

    def forward(
        self,
        inputs: Tensor,
        paddings: Tensor | None = None,
        *,
        low_rank_factors: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Applies the layer; the output has the shape of `inputs`.

        Args:
          inputs: `Float[Array, "batch time input_dim"]`. Earlier tokens get slots first.
          paddings: `Bool[Array, "batch time"]`, True for tokens without experts and loss, whose
            NaN and infinities are taken for 0.
          low_rank_factors: of terms to add to the weights of experts, by name; see `ExpertWeight`.

        Raises ArgumentShapeError if the tokens do not divide into the groups in training. Outside
        of training, the number of groups is reduced.
        """
        live = None
        if paddings is not None:
            live = jnp.logical_not(paddings)
            inputs = finite_or_counted(inputs, live[..., None])
        inputs = self._add_tensor_stats("inputs", inputs)
        skipped, x = self._enter_branch(inputs)
        weights = self._expert_weights(low_rank_factors or {})
        y = self._apply_experts(x, live, weights)
        if self.config.shared_expert is not None:
            y = y + self._shared_expert_output(x)
        x = self._remat_name(y, "linear2_0")
        outputs = self._leave_branch(
            skipped, x, weight=self.config.residual_weight
        )
        return self._add_tensor_stats("outputs", outputs)

    def _expert_weights(
        self, low_rank_factors: Mapping[str, tuple[Tensor, Tensor]]
    ) -> list[ExpertWeight]:
        """Returns the weights before the activations, and that of the output."""
        weights: list[ExpertWeight] = []
        for name in (*self._wi_names(), "wo_weight"):
            factors = low_rank_factors.get(name, ())
            weights.append(ExpertWeight(self.parameters[name], *factors))
        return weights

    def _shared_expert_output(self, x: Tensor) -> Tensor:
        y = self.shared_expert(x)
        if not self.config.shared_expert_gate:
            return y
        weight = self.parameters["shared_expert_gate_weight"].astype(x.dtype)
        return y * jax.nn.sigmoid(x @ weight)

    def _group_sizes(self, num_tokens: int) -> _GroupSizes:
        cfg = self.config
        if num_tokens % (cfg.outer_batch * cfg.num_groups) == 0:
            return _GroupSizes(cfg.outer_batch, cfg.num_groups)
        outer_batch = math.gcd(num_tokens, cfg.outer_batch)
        tokens_per_outer_batch = num_tokens // outer_batch
        if self.is_training:
            raise errors.ArgumentShapeError(
                f"{self.path()}: {num_tokens} tokens do not divide into outer_batch="
                f"{cfg.outer_batch} times num_groups={cfg.num_groups} groups; set num_groups to a "
                f"divisor of {tokens_per_outer_batch}."
            )
        return _GroupSizes(
            outer_batch, math.gcd(tokens_per_outer_batch, cfg.num_groups)
        )

    def _apply_experts(
        self, x: Tensor, live: Tensor | None, weights: list[ExpertWeight]
    ) -> Tensor:
        sizes = self._group_sizes(math.prod(x.shape[:-1]))
        tokens = self._shard(_as_groups(x, sizes), "ogsm")
        logits = self._shard(self._router_logits(tokens), "ogse")
        gating_kwargs: dict[str, Tensor] = {}
        if live is not None:
            gating_kwargs["live"] = _as_groups(live[..., None], sizes)[..., 0]
        output = self.gating(logits, **gating_kwargs)
        self._add_losses(output)
        slots = self.gating.dispatch(
            tokens,
            dispatch_tensor=self._shard(output.dispatch_tensor, "ogsec"),
            combine_tensor=output.combine_tensor,
            dtype=x.dtype,
            partition_spec=self._partition_spec("oegcm", sizes.outer_batch),
        )
        combined = self.gating.combine(
            self._shard(self._experts(slots, weights), "oegcm"),
            combine_tensor=self._shard(output.combine_tensor, "ogsec"),
            dtype=x.dtype,
            partition_spec=self._partition_spec("ogsm", sizes.outer_batch),
        )
        return reshaped(combined, x.shape, explicit_spec(x))

    def _router_logits(self, tokens: Tensor) -> Tensor:
        """Computes logits in float32, for stability (Fedus et al., 2022, section 2.4)."""
        return tokens.astype(jnp.float32) @ self.parameters[
            "gate_weight"
        ].astype(jnp.float32)

    def _experts(self, slots: Tensor, weights: list[ExpertWeight]) -> Tensor:
        """Applies each expert to its slots, `(o e g c m)`."""

        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            return project(
                "oegci,eij->oegcj",
                x,
                weight.astype(x.dtype),
                dot_general=self.dot_general(),
            )

        factors: list[Tensor] = []
        *input_weights, output_weight = weights
        for i, weight in enumerate(input_weights):
            y = self._shard(weight.product(slots, multiply), "oegch")
            y = self._remat_name(y, f"linear1_{i}")
            factors.append(self._activations[i](y))
        # One factor, or the two of a gated layer.
        hidden = math.prod(factors[1:], start=factors[0])
        if "dropout1" in self._children:
            hidden = self.dropout1(hidden)
        return output_weight.product(hidden, multiply)

    def _add_losses(self, output: BaseGating.Output) -> None:
        cfg = self.config
        loss = cfg.load_balance_loss_weight * output.load_balance_loss
        if cfg.router_z_loss_weight:
            loss = loss + cfg.router_z_loss_weight * output.router_z_loss
        if cfg.corr_loss_weight:
            corr_loss = routing.decorrelation_loss(
                self.parameters["gate_weight"]
            )
            self.add_summary("corr_loss", corr_loss)
            loss = loss + cfg.corr_loss_weight * corr_loss
        if output.seq_load_balance_loss is not None:
            loss = loss + output.seq_load_balance_loss
        self.add_module_output("aux_loss", loss)

    def _partition_spec(
        self, dims: str, outer_batch: int
    ) -> PartitionSpec | None:
        spec = self.config.dim_to_mesh_axis_map.get(dims)
        if spec is None or outer_batch > 1:
            return spec
        # An axis of size 1 cannot be sharded: groups take the mesh axes of the outer batch.
        mesh_axes = [axes_of(entry) for entry in spec]
        group = dims.index("g")
        mesh_axes[group] = mesh_axes[0] + mesh_axes[group]
        mesh_axes[0] = ()
        return PartitionSpec(*(axes or None for axes in mesh_axes))

    def _shard(self, x: Tensor, dims: str) -> Tensor:
        return parameter_spec.maybe_shard(
            x, self._partition_spec(dims, x.shape[0])
        )


def _as_groups(x: Tensor, sizes: _GroupSizes) -> Tensor:
    """Returns tokens, `(*batch, dim)`, as `(outer, group, token, dim)`.

    Over Explicit axes of a mesh, groups are sharded as the batch was, if they divide evenly.
    """
    *batch, dim = x.shape
    group_size = math.prod(batch) // math.prod(sizes)
    batch_axes, *_, dim_axes = explicit_spec(x)
    x = gathered(x, *range(1, x.ndim - 1))
    return reshaped(
        x, (*sizes, group_size, dim), (None, batch_axes, None, dim_axes)
    )


class GMMBackend(enum.Enum, metaclass=EnumTypeWithHints):
    """Implementation of the grouped matrix product."""

    RAGGED_DOT = "ragged_dot"
    """`weft.functional.grouped_matmul`, which is `jax.lax.ragged_dot` on accelerators."""
    MEGABLOX = "megablox"
    """JAX's Pallas kernel for TPUs."""


_TOKENS = {"bsm": PartitionSpec("data", None, None)}
# Weights with the hidden dimensions over "model", of experts on all devices or over "expert".
_UNSPLIT = {
    "emh": PartitionSpec(None, None, "model"),
    "ehm": PartitionSpec(None, "model", None),
}
_SPLIT = {dims: DIM_TO_MESH_AXES[dims] for dims in _UNSPLIT}


class TransformerFeedForwardDropFreeMoE(TransformerFeedForwardMoE):
    """Mixture of experts in which each token reaches every expert it chose."""

    class Config(TransformerFeedForwardMoE.Config):
        """Configures a TransformerFeedForwardDropFreeMoE."""

        gating: BaseGating.Config = TopKDropFreeGating.default_config()
        """A `TopKDropFreeGating` or a subclass."""
        num_groups: int = 1
        dim_to_mesh_axis_map: dict[str, PartitionSpec | None] = {
            **DIM_TO_MESH_AXES,
            **_UNSPLIT,
        }
        seq_load_balance_loss_weight: float | None = None
        """Weight of a load-balancing loss per sequence; None for none."""
        input_dim_to_partition_spec: dict[str, PartitionSpec | None] = {
            **_TOKENS,
            **_UNSPLIT,
        }
        """Sharding of tokens ("bsm") and weights ("emh", "ehm") where experts are applied; axis m
        is never sharded there. If the mesh axes of experts shard tokens as well, devices exchange
        tokens; else those along these axes have the same tokens."""
        output_dim_to_partition_spec: dict[str, PartitionSpec | None] = {
            **_TOKENS
        }
        """Sharding of the result ("bsm")."""
        gmm_backend: GMMBackend | None = None
        """Implementation of grouped products; None for `RAGGED_DOT`."""
        tiling: config.InstantiableConfig | tuple[int, int, int] | None = None
        """Block sizes of rows, contracted and other columns, or a config that returns them;
        required by `GMMBackend.MEGABLOX`."""
        preferred_element_type: DType | None = None
        """Dtype of products; None for that of the tokens."""
        interpret: bool = False
        """Whether to interpret the kernel, slowly, for tests without a TPU."""

    # Dropout of hidden dimensions would need a key per device.
    _drops_hidden = False

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not isinstance(self.gating, TopKDropFreeGating):
            raise errors.LayerConfigError(
                f"{self.path()}: gating is a {type(self.gating).__name__}, which drops tokens; "
                "use a TopKDropFreeGating or a TopKBiasGating, or change the layer to a "
                "TransformerFeedForwardMoE."
            )
        self._tiling: tuple[int, int, int] | None = config.maybe_instantiate(
            cfg.tiling
        )
        if cfg.gmm_backend is GMMBackend.MEGABLOX and self._tiling is None:
            raise errors.LayerConfigError(
                f"{self.path()}: gmm_backend={cfg.gmm_backend} needs a tiling: block sizes "
                "of rows, contracted and other columns, such as (128, 128, 128)."
            )

    def _apply_experts(
        self, x: Tensor, live: Tensor | None, weights: list[ExpertWeight]
    ) -> Tensor:
        if x.ndim != 3:
            raise errors.ArgumentShapeError(
                f"{self.path()}: inputs of shape {x.shape}; expected (batch, time, "
                f"{self.config.input_dim})."
            )
        tokens = gathered(x, 1)
        if live is not None:
            live = gathered(live, 1)
        output = self.gating(
            self._router_logits(tokens),
            seq_load_balance_loss_weight=self.config.seq_load_balance_loss_weight,
            live=live,
        )
        self._add_losses(output)
        # Of each token, the experts that it chose, and their weights in the result.
        experts, gates = output.dispatch_tensor, output.combine_tensor
        if live is not None:
            # Others are rows of no expert.
            experts = jnp.where(
                live[..., None], experts, self.config.num_experts
            )
        y, num_dropped = self._apply_sharded(tokens, experts, gates, weights)
        self._report_dropped(num_dropped / experts.size)
        return sharded_as(y, x)

    def _report_dropped(self, share: Tensor) -> None:
        """Reports the fraction of dropped choices; nothing is dropped here."""

    def _apply_sharded(
        self,
        x: Tensor,
        experts: Tensor,
        gates: Tensor,
        weights: list[ExpertWeight],
    ) -> tuple[Tensor, Tensor]:
        """Applies experts to the tokens of each device; also counts dropped choices."""
        mesh = get_global_mesh()
        if mesh is None:
            return self._apply_locally(x, experts, gates, weights)
        if is_as_on_one_device():
            apply: Any = self._apply_locally
            if AxisType.Explicit in mesh.axis_types:
                # JAX derives no sharding of grouped products.
                apply = jax.sharding.auto_axes(
                    apply, out_sharding=PartitionSpec()
                )
            return apply(x, experts, gates, weights)
        cfg = self.config
        token_entries = _padded_spec(cfg.input_dim_to_partition_spec["bsm"])
        # Each device needs all of a token, to multiply it by its part of the weights.
        token_spec = PartitionSpec(
            *fitting_spec(
                PartitionSpec(token_entries[0], token_entries[1], None),
                x.shape,
                mesh,
            )
        )
        wi_spec = _padded_spec(cfg.input_dim_to_partition_spec["emh"])
        wo_spec = _padded_spec(cfg.input_dim_to_partition_spec["ehm"])
        expert_axes = axes_of(wi_spec[0])
        hidden_axes = axes_of(wi_spec[2])
        token_axes = axes_of(token_spec[0]) + axes_of(token_spec[1])
        has_exchange = self._has_exchange(mesh, expert_axes, token_axes)
        # Devices along these have the same tokens.
        shared_axes = () if has_exchange else expert_axes

        def apply_on_device(
            x: Tensor,
            experts: Tensor,
            gates: Tensor,
            weights: list[ExpertWeight],
        ) -> tuple[Tensor, Tensor]:
            if has_exchange:
                y = self._apply_by_exchange(
                    x, experts, gates, weights, expert_axes, token_axes
                )
                num_dropped = jnp.zeros(())
            else:
                y, num_dropped = self._apply_locally(
                    x, experts, gates, weights, expert_axes=expert_axes
                )
            # Sums over the experts of other devices, and over their hidden dimensions.
            y = jax.lax.psum(y, hidden_axes + shared_axes)
            return y, jax.lax.psum(num_dropped, shared_axes + token_axes)

        weight_specs = [_specs_of_factors(wi_spec, weights[0])] * (
            len(weights) - 1
        )
        weight_specs.append(_specs_of_factors(wo_spec, weights[-1]))
        operands: Any = (x, experts, gates, weights)
        in_specs: Any = (token_spec, token_spec, token_spec, weight_specs)
        if AxisType.Explicit in mesh.axis_types:
            # Over these, JAX takes operands only as they are in the specs.
            operands = jax.tree.map(constrain, operands, in_specs)
        sharded_fn = jax.shard_map(
            apply_on_device,
            mesh=mesh if isinstance(mesh, jax.sharding.Mesh) else None,
            in_specs=in_specs,
            out_specs=(token_spec, PartitionSpec()),
            check_vma=False,
        )
        y, num_dropped = sharded_fn(*operands)
        output_spec = cfg.output_dim_to_partition_spec.get("bsm")
        if output_spec is not None:
            y = constrain_like_jit(y, output_spec)
        return y, num_dropped

    def _has_exchange(
        self,
        mesh: AnyMesh,
        expert_axes: tuple[str, ...],
        token_axes: tuple[str, ...],
    ) -> bool:
        """Returns whether devices have different experts and different tokens."""
        common_axes = [name for name in expert_axes if name in token_axes]
        if common_axes and len(common_axes) < len(expert_axes):
            raise errors.LayerConfigError(
                f"{self.path()}: input_dim_to_partition_spec splits experts over {expert_axes}, "
                f"and tokens over {token_axes}, which are some of these axes only; split tokens "
                "over all of them, to exchange tokens, or over none."
            )
        return math.prod(mesh.shape[name] for name in common_axes) > 1

    def _apply_by_exchange(
        self,
        x: Tensor,
        experts: Tensor,
        gates: Tensor,
        weights: list[ExpertWeight],
        expert_axes: tuple[str, ...],
        token_axes: tuple[str, ...],
    ) -> Tensor:
        """Applies experts to the tokens of one device, on the devices that have the experts."""

        def apply(
            rows: Tensor, experts: Tensor, gates: Tensor, weights: PyTree
        ) -> Tensor:
            y, _ = self._apply_locally(
                rows, experts[:, None], gates[:, None], weights
            )
            return y

        num_choices_per_token = experts.shape[-1]
        y = dispatch_and_combine(
            apply,
            x.reshape(-1, x.shape[-1]),
            experts.reshape(-1, num_choices_per_token),
            gates.reshape(-1, num_choices_per_token),
            weights,
            num_experts=weights[0].weight.shape[0],
            axis_names=expert_axes,
            token_axis_names=token_axes,
        )
        return y.reshape(x.shape)

    def _num_rows(self, num_choices: int, num_parts: int) -> int:
        """Returns how many choices fit on each of `num_parts` devices that share the experts."""
        return num_choices

    def _apply_locally(
        self,
        x: Tensor,
        experts: Tensor,
        gates: Tensor,
        weights: list[ExpertWeight],
        *,
        expert_axes: tuple[str, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Applies one device's experts to its tokens; also counts dropped choices.

        A choice is one of the k experts of a token. Sorted by expert, the choices are the rows of
        a matrix, and each expert multiplies its own:

            choices (token, k) --sort--> rows --experts--> rows --add to their tokens--> tokens

        `expert_axes` are the mesh axes over which experts are divided.
        """
        num_choices_per_token = experts.shape[-1]
        num_experts = weights[0].weight.shape[0]
        tokens = x.reshape(-1, x.shape[-1])
        choices = experts.reshape(-1, num_choices_per_token)
        # Without mesh axes, this is device 0 of 1.
        device = jax.lax.axis_index(expert_axes) if expert_axes else 0
        num_devices = math.prod(jax.lax.axis_size(name) for name in expert_axes)
        first = device * num_experts
        num_rows = self._num_rows(choices.size, num_devices)
        rows = routing.sort_by_expert(
            choices, first=first, num_experts=num_experts, num_rows=num_rows
        )
        token_of_row = rows.choices // num_choices_per_token
        is_real = rows.is_real[:, None]
        inputs = jnp.where(is_real, tokens[token_of_row], 0)

        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            return self._grouped_product(x, weight, rows.sizes)

        factors: list[Tensor] = []
        *input_weights, output_weight = weights
        for weight, activation in zip(
            input_weights, self._activations, strict=True
        ):
            factors.append(activation(weight.product(inputs, multiply)))
        hidden = math.prod(factors[1:], start=factors[0])
        y = output_weight.product(hidden, multiply)
        # Rows that no expert computed hold arbitrary values.
        y = jnp.where(is_real, y, 0) * gates.reshape(-1)[rows.choices][:, None]
        outputs = jnp.zeros(tokens.shape, y.dtype).at[token_of_row].add(y)
        is_of_device = (choices >= first) & (choices < first + num_experts)
        num_dropped = jnp.sum(is_of_device) - jnp.sum(rows.is_real)
        return outputs.reshape(x.shape).astype(x.dtype), num_dropped.astype(
            jnp.float32
        )

    def _grouped_product(
        self, x: Tensor, weight: Tensor, sizes: Tensor
    ) -> Tensor:
        """Multiplies the first `sizes[0]` rows of `x` by `weight[0]`, and so on."""
        cfg = self.config
        dtype = cfg.preferred_element_type or x.dtype
        weight = weight.astype(x.dtype)
        if cfg.gmm_backend is not GMMBackend.MEGABLOX:
            return grouped_matmul(
                x, weight, sizes, preferred_element_type=dtype
            )
        # Importing Pallas is slow, and most models do not need it.
        from jax.experimental.pallas.ops.tpu import megablox

        assert self._tiling is not None, "checked in __init__"
        product_shape = (*x.shape, weight.shape[-1])
        tiling = tuple(map(min, self._tiling, product_shape))
        num_rows = x.shape[0]
        # The kernel takes whole blocks of rows.
        x = jnp.pad(x, ((0, -num_rows % tiling[0]), (0, 0)))
        sizes = sizes.astype(jnp.int32)
        y = megablox.gmm(
            x, weight, sizes, dtype, tiling, interpret=cfg.interpret
        )
        return y[:num_rows]


def _specs_of_factors(spec: PartitionSpec, weight: ExpertWeight) -> Any:
    """Returns the sharding of a weight of experts and of its factors, by that of the weight."""
    experts, inputs, outputs = spec
    if weight.down is None:
        return ExpertWeight(spec)  # pyright: ignore[reportArgumentType]
    down = PartitionSpec(experts, inputs, None)
    up = PartitionSpec(experts, None, outputs)
    return ExpertWeight(spec, down, up)  # pyright: ignore[reportArgumentType]


def _padded_spec(spec: PartitionSpec | None) -> PartitionSpec:
    """Returns the spec of an array with three axes with an entry for each."""
    entries = tuple(spec or ())
    return PartitionSpec(*entries, *[None] * (3 - len(entries)))


class ApproximateTokenDropFreeMoE(TransformerFeedForwardDropFreeMoE):
    """Mixture of experts over a mesh axis with spare capacity on each device.

    Each of `n` devices along the mesh axis of experts processes at most the fraction
    `expert_parallel_capacity / n` of the choices and drops the excess; one device drops nothing.
    """

    class Config(TransformerFeedForwardDropFreeMoE.Config):
        """Configures an ApproximateTokenDropFreeMoE; `expert_parallel_capacity` is at least 1."""

        expert_parallel_capacity: float = 1.25
        dim_to_mesh_axis_map: dict[str, PartitionSpec | None] = {
            **DIM_TO_MESH_AXES
        }
        input_dim_to_partition_spec: dict[str, PartitionSpec | None] = {
            **_TOKENS,
            **_SPLIT,
        }

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.expert_parallel_capacity < 1:
            raise errors.LayerConfigError(
                f"{self.path()}: expert_parallel_capacity={cfg.expert_parallel_capacity} leaves "
                "each device less than an equal share; expected at least 1."
            )

    def _num_rows(self, num_choices: int, num_parts: int) -> int:
        capacity = math.ceil(
            self.config.expert_parallel_capacity * num_choices / num_parts
        )
        return min(num_choices, capacity)

    def _report_dropped(self, share: Tensor) -> None:
        self.add_summary("over_capacity", share)


def set_interpret_in_moe_config_recursively(
    cfg: config.ConfigBase, preferred_element_type: DType | None = jnp.bfloat16
) -> None:
    """Makes mixtures of experts in a config interpret their kernels, for runs without a TPU.

    `preferred_element_type` becomes the dtype of their products.
    """

    def set_interpret(cfg: config.ConfigBase) -> None:
        if isinstance(cfg, TransformerFeedForwardDropFreeMoE.Config):
            cfg.set(
                interpret=True, preferred_element_type=preferred_element_type
            )

    for_each_config(cfg, set_interpret)


def convert_dense_to_moe_parameters(
    source_parameters: Mapping[str, Any],
    *,
    target_parameter_specs: Mapping[str, Any],
) -> dict[str, Any]:
    """Copies dense layers into every expert (sparse upcycling: Komatsuzaki et al., 2023).

    Args:
      source_parameters: of a model with bias-free `TransformerFeedForwardLayer`s.
      target_parameter_specs: of the same model with some of them `TransformerFeedForwardMoE`s. Its
        layers may be stacked in another way, such as a `RepeatedTransformerLayer` of
        `StackedTransformerLayer`s in which the feed-forward layer of every second one has experts.

    Returns parameters for `initialize_parameters_recursively(..., prebuilt=...)` of the target.
    Those that the source lacks, such as router weights, are None and will be initialized.

    Raises ParameterSpecError if a parameter has no counterpart or another shape, naming it.
    """
    return _convert(source_parameters, target_parameter_specs, "")


# Parameters of an expert layer, and the dense layers that they come from.
_DENSE_NAMES = {
    "wi_weight": "linear1",
    "wi_0_weight": "linear1_0",
    "wi_1_weight": "linear1_1",
    "wo_weight": "linear2",
}
_INITIALIZED = ("gate_weight", "gating")


def _convert(
    source: Mapping[str, Any], specs: Mapping[str, Any], path: str
) -> dict[str, Any]:
    source_stack, target_stack = _Stack.of(source), _Stack.of(specs)
    if source_stack and target_stack and source_stack != target_stack:
        source = _restacked(source, source_stack, target_stack, path)
    has_experts = "wo_weight" in specs
    copied_names: set[str] = set()
    # Of the same class, since a VDict marks a stack.
    parameters: dict[str, Any] = (
        type(specs)() if isinstance(specs, dict) else {}
    )
    for name, spec in specs.items():
        entry_path = f"{path}/{name}" if path else name
        if has_experts and name in _INITIALIZED:
            parameters[name] = jax.tree.map(lambda _: None, spec)
        elif has_experts and name in _DENSE_NAMES:
            dense_name = _DENSE_NAMES[name]
            copied_names.add(dense_name)
            dense_layer = _source_entry(source, dense_name, entry_path)
            parameters[name] = _repeat_for_experts(
                dense_layer, spec, entry_path
            )
        elif isinstance(spec, Mapping):
            copied_names.add(name)
            parameters[name] = _convert(source.get(name, {}), spec, entry_path)
        else:
            copied_names.add(name)
            value = _source_entry(source, name, entry_path)
            parameters[name] = _check_shape(value, spec, entry_path)
    unused_names: list[str] = []
    for name, value in source.items():
        if name not in copied_names and jax.tree.leaves(value):
            unused_names.append(str(name))
    if unused_names:
        raise errors.ParameterSpecError(
            f"{path or 'the source'} has the parameters {sorted(unused_names)}, which the "
            f"target lacks; it has {sorted(map(str, specs))}."
        )
    return parameters


def _source_entry(source: Mapping[str, T], name: str, entry_path: str) -> T:
    if name not in source:
        raise errors.ParameterSpecError(
            f"{entry_path} is copied from {name!r} of the source, which has "
            f"{sorted(map(str, source))}. {errors.did_you_mean(name, source)}"
        )
    return source[name]


def _repeat_for_experts(
    dense_layer: Mapping[str, Tensor],
    spec: base_layer.ParameterSpec,
    entry_path: str,
) -> Tensor:
    names_without_counterpart = sorted(set(dense_layer) - {"weight"})
    if names_without_counterpart:
        raise errors.ParameterSpecError(
            f"{entry_path} is copied from a linear layer with {names_without_counterpart}, but "
            "experts have only weights; expected a dense layer with bias=False."
        )
    # Experts are the third axis from the end; axes of a stack may precede it.
    weight = jnp.expand_dims(dense_layer["weight"], -3)
    num_experts = spec.shape[-3]
    return _check_shape(
        jnp.repeat(weight, num_experts, axis=-3), spec, entry_path
    )


def _check_shape(
    value: Tensor, spec: base_layer.ParameterSpec, entry_path: str
) -> Tensor:
    if tuple(value.shape) != tuple(spec.shape):
        raise errors.ParameterSpecError(
            f"{entry_path} has shape {tuple(spec.shape)} in the target, but the source has "
            f"{tuple(value.shape)}."
        )
    return value


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Nesting of the parameters of a stack of layers.

    Attributes:
      num_repeats: leading axis of the parameters of `repeat/layer`; None for a stack of `layer0`,
        `layer1` and so on.
      blocks: the nesting of each of these, or of the one that is repeated; None for a layer.
    """

    num_repeats: int | None
    blocks: tuple["_Stack | None", ...]

    @classmethod
    def of(cls, tree: PyTree, axis: int = 0) -> "_Stack | None":
        """Returns the nesting of parameters or specs of a stack; None if they are of no stack.

        `axis` is the number of axes of stacks around this one.
        """
        if not isinstance(tree, Mapping):
            return None
        if "layer" in tree.get("repeat", ()):
            block = tree["repeat"]["layer"]
            num_repeats = jax.tree.leaves(block)[0].shape[axis]
            return cls(num_repeats, (cls.of(block, axis + 1),))
        blocks: list[_Stack | None] = []
        while f"layer{len(blocks)}" in tree:
            blocks.append(cls.of(tree[f"layer{len(blocks)}"], axis))
        return cls(None, tuple(blocks)) if blocks else None


def _restacked(
    source: Mapping[str, Any],
    source_stack: _Stack,
    target_stack: _Stack,
    path: str,
) -> dict[str, Any]:
    """Returns the parameters of a stack with its layers nested as in another stack."""
    num_source_layers = _num_layers(source_stack)
    num_target_layers = _num_layers(target_stack)
    if num_source_layers != num_target_layers:
        raise errors.ParameterSpecError(
            f"{path or 'the target'} has {num_target_layers} layers, but the source has "
            f"{num_source_layers}; set num_layers of stacks, so that the numbers of layers are "
            "equal."
        )
    parameters = _nest(_layers_of(source, source_stack), target_stack)
    for name, value in source.items():
        if not re.fullmatch(r"repeat|layer\d+", name):
            parameters[name] = value
    return parameters


def _num_layers(stack: _Stack | None) -> int:
    if stack is None:
        return 1
    return sum(map(_num_layers, stack.blocks)) * (stack.num_repeats or 1)


def _layers_of(tree: PyTree, stack: _Stack | None) -> Iterator[PyTree]:
    """Yields the parameters of each layer of a stack, in order."""
    if stack is None:
        yield tree
    elif stack.num_repeats is None:
        for i, block in enumerate(stack.blocks):
            yield from _layers_of(tree[f"layer{i}"], block)
    else:
        for i in range(stack.num_repeats):
            block_tree = jax.tree.map(
                operator.itemgetter(i), tree["repeat"]["layer"]
            )
            yield from _layers_of(block_tree, stack.blocks[0])


def _nest(layers: Iterator[PyTree], stack: _Stack | None) -> PyTree:
    """Returns the parameters of a stack from those of its layers, which it takes in order."""
    if stack is None:
        return next(layers)
    if stack.num_repeats is None:
        return {
            f"layer{i}": _nest(layers, block)
            for i, block in enumerate(stack.blocks)
        }
    block_trees = [
        _nest(layers, stack.blocks[0]) for _ in range(stack.num_repeats)
    ]
    return {
        "repeat": {
            "layer": jax.tree.map(lambda *xs: jnp.stack(xs), *block_trees)
        }
    }
