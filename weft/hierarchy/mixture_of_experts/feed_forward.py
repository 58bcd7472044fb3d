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
sorts its own tokens.
"""

import enum
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from weft import config, errors
from weft._door import EnumTypeWithHints
from weft.core.spmd import axes_of, constrain, constrain_like_jit, get_global_mesh
from weft.functional import get_activation_fn, project, routing
from weft.functional.arrays import explicit_spec, finite_or_counted, gathered, reshaped, sharded_as
from weft.hierarchy import base_layer, param_init, parameter_spec
from weft.hierarchy.attention.feed_forward import ResidualLayer, hidden_dim_of
from weft.hierarchy.config_setters import for_each_config
from weft.hierarchy.mixture_of_experts.gating import BaseGating, Top2Gating, TopKDropFreeGating
from weft.hierarchy.module import Module
from weft.typing import DType, PartitionSpec, Tensor

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


def get_outer_batch_from_mesh(
    *, mesh_axis_names: Sequence[str], outer_batch_axis_names: Sequence[str], mesh_shape: Any
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
    parts = [mesh_shape]
    if hasattr(mesh_shape, "ici_mesh_shape"):
        parts = [mesh_shape.ici_mesh_shape, mesh_shape.dcn_mesh_shape]
    number = 1
    for part in parts:
        sizes = dict(zip(mesh_axis_names, part, strict=True))
        for name in outer_batch_axis_names:
            if sizes.get(name, 0) < 1:
                raise errors.ArgumentValueError(
                    f"the outer batch is sharded over the mesh axis {name!r}, whose size in "
                    f"{sizes} is not known; expected a mesh axis with a positive size."
                )
            number *= sizes[name]
    return number


class TransformerFeedForwardMoE(ResidualLayer):
    """Mixture of feed-forward layers with a skip connection.

    Parameters: `gate_weight` (input_dim, num_experts) of the router, `wi_weight` (num_experts,
    input_dim, hidden_dim), or `wi_0_weight` and `wi_1_weight` of a gated layer, and `wo_weight`
    (num_experts, hidden_dim, input_dim). Experts have no biases.

    The module output "aux_loss" is the weighted sum of its losses. A language model adds it to its
    own loss with `metrics_config(aux_loss_regex=".*/aux_loss")`.
    """

    class Config(ResidualLayer.Config):
        """Configures a TransformerFeedForwardMoE.

        Attributes:
          hidden_dim, activation: of an expert, as for `TransformerFeedForwardLayer`.
          num_groups: groups per outer batch. More need less memory, but may drop more tokens.
          outer_batch: number of parts of a batch that each use all experts; see
            `get_outer_batch_from_mesh`.
          router_z_loss_weight: weight of the gating's loss on the size of logits.
          corr_loss_weight: weight of the mean squared cosine between two experts' router weights.
          dim_to_mesh_axis_map: sharding of weights and activations by the letters of their axes, as
            in the module docstring. With one outer batch, groups take its mesh axes as well.
        """

        input_dim: config.Required[int] = config.REQUIRED
        hidden_dim: config.Required[int | config.FunctionConfigBase] = config.REQUIRED
        activation: str | tuple[str, str] = "nn.relu"
        num_experts: config.Required[int] = config.REQUIRED
        num_groups: config.Required[int] = config.REQUIRED
        outer_batch: int = 1
        gating: BaseGating.Config = Top2Gating.default_config()
        load_balance_loss_weight: float = 0.01
        router_z_loss_weight: float = 0.0
        corr_loss_weight: float = 0.0
        residual_weight: float = 1.0
        dim_to_mesh_axis_map: dict[str, PartitionSpec | None] = {**DIM_TO_MESH_AXES}

    _drops_hidden: ClassVar[bool] = True

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name in ("num_experts", "num_groups", "outer_batch"):
            if getattr(cfg, name) < 1:
                raise errors.LayerConfigError(
                    f"{self.path()}: {name}={getattr(cfg, name)}; expected at least 1."
                )
        if unknown := sorted(cfg.dim_to_mesh_axis_map.keys() - DIM_TO_MESH_AXES.keys()):
            raise errors.LayerConfigError(
                f"{self.path()}: dim_to_mesh_axis_map has {unknown}; expected keys "
                f"among {', '.join(DIM_TO_MESH_AXES)}."
            )
        self._hidden_dim = hidden_dim_of(cfg)
        names = (cfg.activation,) if isinstance(cfg.activation, str) else cfg.activation
        self._activations = [get_activation_fn(name) for name in names]
        self._add_norms(cfg.input_dim)
        self._add_child("gating", cfg.gating.set(num_experts=cfg.num_experts))
        # With the norm after the sum, dropout applies only to the branch's output.
        whole = cfg.structure == "postnorm" or not self._drops_hidden
        self._add_dropouts(None if whole else cfg.dropout)

    def _wi_names(self) -> list[str]:
        n = len(self._activations)
        return ["wi_weight"] if n == 1 else [f"wi_{i}_weight" for i in range(n)]

    def _create_layer_parameter_specs(self) -> dict[str, base_layer.ParameterSpec]:
        cfg = self.config
        m, e, h = cfg.input_dim, cfg.num_experts, self._hidden_dim

        def spec(
            shape: tuple[int, ...], dims: str, fan_axes: param_init.FanAxes
        ) -> base_layer.ParameterSpec:
            mesh_axes = cfg.dim_to_mesh_axis_map.get(dims)
            factors = parameter_spec.FactorizationSpec((None,) * (len(shape) - 2) + ("row", "col"))
            return base_layer.ParameterSpec(
                shape, mesh_axes=mesh_axes, factorization=factors, fan_axes=fan_axes
            )

        of_expert = param_init.FanAxes(in_axis=1, out_axis=2, batch_axis=0)
        return {
            **super()._create_layer_parameter_specs(),
            "gate_weight": spec((m, e), "me", param_init.FanAxes(in_axis=0, out_axis=1)),
            **{name: spec((e, m, h), "emh", of_expert) for name in self._wi_names()},
            "wo_weight": spec((e, h, m), "ehm", of_expert),
        }

    def forward(self, inputs: Tensor, paddings: Tensor | None = None) -> Tensor:
        """Applies the layer; the output has the shape of `inputs`.

        Args:
          inputs: `Float[Array, "batch time input_dim"]`. Earlier tokens get slots first.
          paddings: `Bool[Array, "batch time"]`, True for tokens without experts and loss, whose
            NaN and infinities are taken for 0.

        Raises ArgumentShapeError if the tokens do not divide into the groups in training. Outside
        of training, the number of groups is reduced.
        """
        live = None if paddings is None else jnp.logical_not(paddings)
        if live is not None:
            inputs = finite_or_counted(inputs, live[..., None])
        skipped, x = self._enter_branch(self._add_tensor_stats("inputs", inputs))
        x = self._remat_name(self._apply_experts(x, live), "linear2_0")
        outputs = self._leave_branch(skipped, x, weight=self.config.residual_weight)
        return self._add_tensor_stats("outputs", outputs)

    def _group_sizes(self, num_tokens: int) -> tuple[int, int]:
        cfg = self.config
        outer, groups = cfg.outer_batch, cfg.num_groups
        if num_tokens % (outer * groups) == 0:
            return outer, groups
        if self.is_training:
            raise errors.ArgumentShapeError(
                f"{self.path()}: {num_tokens} tokens do not divide into outer_batch={outer} times "
                f"num_groups={groups} groups; set num_groups to a divisor of "
                f"{num_tokens // math.gcd(num_tokens, outer)}."
            )
        outer = math.gcd(num_tokens, outer)
        return outer, math.gcd(num_tokens // outer, groups)

    def _apply_experts(self, x: Tensor, live: Tensor | None) -> Tensor:
        sizes = self._group_sizes(math.prod(x.shape[:-1]))
        tokens = self._shard(_as_groups(x, sizes), "ogsm")
        output = self.gating(
            self._shard(self._router_logits(tokens), "ogse"),
            **({} if live is None else {"live": _as_groups(live[..., None], sizes)[..., 0]}),
        )
        self._add_losses(output)
        specs = {dims: self._partition_spec(dims, sizes[0]) for dims in ("oegcm", "ogsm")}
        slots = self.gating.dispatch(
            tokens,
            dispatch_tensor=self._shard(output.dispatch_tensor, "ogsec"),
            combine_tensor=output.combine_tensor,
            dtype=x.dtype,
            partition_spec=specs["oegcm"],
        )
        combined = self.gating.combine(
            self._shard(self._experts(slots), "oegcm"),
            combine_tensor=self._shard(output.combine_tensor, "ogsec"),
            dtype=x.dtype,
            partition_spec=specs["ogsm"],
        )
        return reshaped(combined, x.shape, explicit_spec(x))

    def _router_logits(self, tokens: Tensor) -> Tensor:
        """Computes logits in float32, for stability (Fedus et al., 2022, section 2.4)."""
        return tokens.astype(jnp.float32) @ self.parameters["gate_weight"].astype(jnp.float32)

    def _experts(self, slots: Tensor) -> Tensor:
        """Applies each expert to its slots, `(o e g c m)`."""
        hidden: Any = None
        named = zip(self._wi_names(), self._activations, strict=True)
        for i, (name, activation) in enumerate(named):
            weight = self.parameters[name].astype(slots.dtype)
            y = project("oegcm,emh->oegch", slots, weight, dot_general=self.dot_general())
            y = self._shard(y, "oegch")
            y = activation(self._remat_name(y, f"linear1_{i}"))
            hidden = y if hidden is None else hidden * y
        if "dropout1" in self._children:
            hidden = self.dropout1(hidden)
        weight = self.parameters["wo_weight"].astype(slots.dtype)
        return project("oegch,ehm->oegcm", hidden, weight, dot_general=self.dot_general())

    def _add_losses(self, output: BaseGating.Output) -> None:
        cfg = self.config
        loss = cfg.load_balance_loss_weight * output.load_balance_loss
        if cfg.router_z_loss_weight:
            loss = loss + cfg.router_z_loss_weight * output.router_z_loss
        if cfg.corr_loss_weight:
            corr_loss = routing.decorrelation_loss(self.parameters["gate_weight"])
            self.add_summary("corr_loss", corr_loss)
            loss = loss + cfg.corr_loss_weight * corr_loss
        if output.seq_load_balance_loss is not None:
            loss = loss + output.seq_load_balance_loss
        self.add_module_output("aux_loss", loss)

    def _partition_spec(self, dims: str, outer_batch: int) -> PartitionSpec | None:
        spec = self.config.dim_to_mesh_axis_map.get(dims)
        if spec is None or outer_batch > 1:
            return spec
        axes = [axes_of(entry) for entry in spec]
        group = dims.index("g")
        axes[group], axes[0] = axes[0] + axes[group], ()
        return PartitionSpec(*(a or None for a in axes))

    def _shard(self, x: Tensor, dims: str) -> Tensor:
        return parameter_spec.maybe_shard(x, self._partition_spec(dims, x.shape[0]))


def _as_groups(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Returns tokens, `(*batch, dim)`, as `(outer, group, token, dim)`.

    Over Explicit axes of a mesh, groups are sharded as the batch was, if they divide evenly.
    """
    outer, groups = sizes
    num_tokens = math.prod(x.shape[:-1]) // (outer * groups)
    of_batch, *_, of_dim = explicit_spec(x)
    x = gathered(x, *range(1, x.ndim - 1))
    return reshaped(x, (outer, groups, num_tokens, x.shape[-1]), (None, of_batch, None, of_dim))


class GMMBackend(enum.Enum, metaclass=EnumTypeWithHints):
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
        tiling: config.InstantiableConfig | tuple[int, int, int] | None = None
        preferred_element_type: DType | None = None
        interpret: bool = False

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
        self._tiling: Any = config.maybe_instantiate(cast(Any, cfg.tiling))
        if cfg.gmm_backend is GMMBackend.MEGABLOX and self._tiling is None:
            raise errors.LayerConfigError(
                f"{self.path()}: gmm_backend={cfg.gmm_backend} needs a tiling: block sizes "
                "of rows, contracted and other columns, such as (128, 128, 128)."
            )

    def _apply_experts(self, x: Tensor, live: Tensor | None) -> Tensor:
        if x.ndim != 3:
            raise errors.ArgumentShapeError(
                f"{self.path()}: inputs of shape {x.shape}; expected (batch, time, "
                f"{self.config.input_dim})."
            )
        inputs, x = x, gathered(x, 1)
        live = None if live is None else gathered(live, 1)
        seq_weight = self.config.seq_load_balance_loss_weight
        output = self.gating(
            self._router_logits(x), seq_load_balance_loss_weight=seq_weight, live=live
        )
        self._add_losses(output)
        weights = [self.parameters[name] for name in (*self._wi_names(), "wo_weight")]
        experts, gates = output.dispatch_tensor, output.combine_tensor
        y, num_dropped = self._apply_sharded(x, experts, gates, weights)
        self._report_dropped(num_dropped / experts.size)
        return sharded_as(y, inputs)

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

        operands = [x, experts, gates, *weights]
        in_specs = (*[tokens] * 3, *[specs["emh"]] * (len(weights) - 1), specs["ehm"])
        if AxisType.Explicit in mesh.axis_types:
            # Over these, JAX takes operands only as they are in the specs.
            operands = list(map(constrain, operands, in_specs))
        y, num_dropped = jax.shard_map(
            on_device,
            mesh=mesh if isinstance(mesh, jax.sharding.Mesh) else None,
            in_specs=in_specs,
            out_specs=(tokens, PartitionSpec()),
            check_vma=False,
        )(*operands)
        spec = cfg.output_dim_to_partition_spec.get("bsm")
        return (y if spec is None else constrain_like_jit(y, spec)), num_dropped

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
        rows = routing.sort_by_expert(flat, first=first, num_experts=num_experts, num_rows=num_rows)
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
            raise errors.LayerConfigError(
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

    def set_interpret(cfg: Any) -> None:
        if isinstance(cfg, TransformerFeedForwardDropFreeMoE.Config):
            cfg.set(interpret=True, preferred_element_type=preferred_element_type)

    for_each_config(cfg, set_interpret)


def convert_dense_to_moe_parameters(
    source_parameters: Mapping[str, Any], *, target_parameter_specs: Mapping[str, Any]
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


def _convert(source: Any, target: Mapping[str, Any], path: str) -> Any:
    if _stacking(source) and _stacking(target) and _stacking(source) != _stacking(target):
        source = _restacked(source, target, path)
    is_moe = "wo_weight" in target
    used = set()
    # Keeps a VDict, which marks a stack.
    new: dict[str, Any] = type(target)() if isinstance(target, dict) else {}
    for name, spec in target.items():
        at = f"{path}/{name}" if path else name
        if is_moe and name in _DENSE_NAMES:
            dense = _DENSE_NAMES[name]
            used.add(dense)
            new[name] = _repeat_for_experts(_source_entry(source, dense, at), spec, at)
        elif is_moe and name in _INITIALIZED:
            new[name] = jax.tree.map(lambda _: None, spec)
        else:
            used.add(name)
            if isinstance(spec, Mapping):
                new[name] = _convert(source.get(name, {}), spec, at)
            else:
                new[name] = _check_shape(_source_entry(source, name, at), spec, at)
    unused = [name for name in source if name not in used and jax.tree.leaves(source[name])]
    if unused:
        raise errors.ParameterSpecError(
            f"{path or 'the source'} has the parameters {sorted(map(str, unused))}, which the "
            f"target lacks; it has {sorted(map(str, target))}."
        )
    return new


def _source_entry(source: Mapping[str, Any], name: str, at: str) -> Any:
    if name not in source:
        raise errors.ParameterSpecError(
            f"{at} is copied from {name!r} of the source, which has {sorted(map(str, source))}. "
            f"{errors.did_you_mean(name, source)}"
        )
    return source[name]


def _repeat_for_experts(linear: Mapping[str, Tensor], spec: Any, at: str) -> Tensor:
    if unused := sorted(set(linear) - {"weight"}):
        raise errors.ParameterSpecError(
            f"{at} is copied from a linear layer with {unused}, but experts have only weights; "
            "expected a dense layer with bias=False."
        )
    # Experts are the third axis from the end; axes of a stack may precede it.
    one = linear["weight"][..., None, :, :]
    return _check_shape(jnp.repeat(one, spec.shape[-3], axis=-3), spec, at)


def _check_shape(value: Tensor, spec: Any, at: str) -> Tensor:
    if tuple(value.shape) != tuple(spec.shape):
        raise errors.ParameterSpecError(
            f"{at} has shape {tuple(spec.shape)} in the target, but the source has "
            f"{tuple(value.shape)}."
        )
    return value


def _restacked(source: Mapping[str, Any], target: Any, path: str) -> dict[str, Any]:
    """Returns the parameters of a stack with its layers nested as in the stack `target`."""
    numbers = _num_layers(source), _num_layers(target)
    if numbers[0] != numbers[1]:
        raise errors.ParameterSpecError(
            f"{path or 'the target'} has {numbers[1]} layers, but the source has {numbers[0]}; set "
            "num_layers of stacks, so that the numbers of layers are equal."
        )
    others = {k: x for k, x in source.items() if not re.fullmatch(r"repeat|layer\d+", k)}
    return {**others, **_nested_as(target, _layers_of(source))}


def _stacking(tree: Any) -> tuple[Any, ...]:
    """Returns how the layers of a stack are nested: `(n, layer)` or `(layer0, layer1, ...)`."""
    if _is_repeated(tree):
        return (_num_repeats(tree), _stacking(tree["repeat"]["layer"]))
    return tuple(_stacking(child) for child in _children(tree))


def _is_repeated(tree: Any) -> bool:
    return isinstance(tree, Mapping) and "layer" in tree.get("repeat", ())


def _num_repeats(tree: Any) -> int:
    return jax.tree.leaves(tree["repeat"]["layer"])[0].shape[0]


def _children(tree: Any) -> list[Any]:
    if not isinstance(tree, Mapping):
        return []
    names = (f"layer{i}" for i in itertools.count())
    return [tree[name] for name in itertools.takewhile(lambda name: name in tree, names)]


def _num_layers(tree: Any) -> int:
    if _is_repeated(tree):
        return _num_repeats(tree) * _num_layers(tree["repeat"]["layer"])
    return sum(map(_num_layers, _children(tree))) or 1


def _layers_of(tree: Any) -> Iterator[Any]:
    """Yields the parameters of each layer of a stack, in order."""
    parts = _children(tree)
    if _is_repeated(tree):
        repeated = tree["repeat"]["layer"]
        parts = [jax.tree.map(lambda x, i=i: x[i], repeated) for i in range(_num_repeats(tree))]
    if not parts:
        yield tree
    for part in parts:
        yield from _layers_of(part)


def _nested_as(target: Any, layers: Iterator[Any]) -> Any:
    if _is_repeated(target):
        block = target["repeat"]["layer"]
        parts = [_nested_as(block, layers) for _ in range(_num_repeats(target))]
        return {"repeat": {"layer": jax.tree.map(lambda *xs: jnp.stack(xs), *parts)}}
    children = {f"layer{i}": _nested_as(x, layers) for i, x in enumerate(_children(target))}
    return children or next(layers)
