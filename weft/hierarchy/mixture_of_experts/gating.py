"""Gating: assignment of tokens to experts from a router's logits.

`Top2Gating` and `TopKGating` limit the number of tokens per group and expert, its capacity, and
drop tokens beyond it; `TopKDropFreeGating` and `TopKBiasGating` drop nothing. See
`weft.functional.routing` for the formulas.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from weft.config import REQUIRED, ConfigOr, Required, maybe_instantiate
from weft.errors import LayerConfigError
from weft.functional import cap_logits, routing, to_ndim
from weft.functional.arrays import finite_or_counted, gathered
from weft.hierarchy import base_layer, metrics
from weft.hierarchy.layers.normalization import MovingAverage
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.parameter_spec import constant_spec, maybe_shard
from weft.typing import DType, PartitionSpec, Tensor

ScoreFn = Callable[[Tensor], Tensor]
"""Function from the logits of a router to scores, along the last axis."""

TopKFn = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Function from scores and k to the k largest scores and their indices, along the last axis."""


def sigmoid() -> ScoreFn:
    """Scores each expert separately, instead of by a softmax (DeepSeek-AI, 2024)."""
    return jax.nn.sigmoid


def approx_max_k(
    *,
    reduction_dimension: int = -1,
    recall_target: float = 0.95,
    reduction_input_size_override: int = -1,
    aggregate_to_topk: bool = True,
) -> TopKFn:
    """Finds most of the largest scores, faster on a TPU; see `jax.lax.approx_max_k`.

    Args:
      recall_target: the fraction of the largest to find.
      reduction_input_size_override: size for which to reach the target; -1 for that of the axis.
      aggregate_to_topk: whether to return exactly k scores.
    """
    return functools.partial(
        jax.lax.approx_max_k,
        reduction_dimension=reduction_dimension,
        recall_target=recall_target,
        reduction_input_size_override=reduction_input_size_override,
        aggregate_to_topk=aggregate_to_topk,
    )


class GateNoise(enum.Enum):
    """Noise to add to logits in training before choosing experts."""

    NONE = "none"
    """Nothing."""
    GUMBEL = "gumbel"
    """Gumbel noise: draws experts with the router's probabilities, without replacement."""


class AdaptiveLoadBalanceLoss(base_layer.BaseLayer):
    """Factor of the load-balancing loss that grows while too many tokens are dropped.

    Its logarithm rises by `log_step` in each step while the moving average of the dropped fraction
    of choices is above `max_value`, and falls by as much while it is below `min_value`.
    """

    class Config(base_layer.BaseLayer.Config):
        """Configures an AdaptiveLoadBalanceLoss."""

        moving_average: MovingAverage.Config = MovingAverage.default_config()
        """Moving average of the dropped fraction; set its `min_weight`."""
        max_value: Required[float] = REQUIRED
        """The fraction above which the factor grows."""
        min_value: float = 1e-3
        """The fraction below which it shrinks."""
        log_step: float = 0.01
        """The change of its logarithm per step."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not 0 <= cfg.min_value <= cfg.max_value:
            raise LayerConfigError(
                f"{self.path()}: min_value={cfg.min_value} and max_value={cfg.max_value} must be "
                "fractions of tokens, the first not above the second."
            )
        self._add_child("value_average", cfg.moving_average)

    def _create_layer_parameter_specs(
        self,
    ) -> dict[str, base_layer.ParameterSpec]:
        return {"log_scale": constant_spec((), dtype=jnp.float32)}

    def forward(self, value: Tensor) -> Tensor:
        """Returns the factor from the dropped fraction of choices, and in training updates it."""
        cfg = self.config
        average, log_scale = (
            self.value_average(value),
            self.parameters["log_scale"],
        )
        if self.is_training:
            step = jnp.where(
                average > cfg.max_value,
                1.0,
                jnp.where(average < cfg.min_value, -1, 0),
            )
            self.add_state_update("log_scale", log_scale + cfg.log_step * step)
        self.add_summary("average", average)
        factor = jax.lax.stop_gradient(jnp.exp(log_scale))
        self.add_summary("scale", factor)
        return factor


class BaseGating(base_layer.BaseLayer):
    """Layer that chooses experts. A subclass defines `forward`.

    Summaries: `load_balance_loss`, `router_z_loss`, `expert_load`, each expert's share of choices,
    and `dispatch_entropy`, the entropy of these shares, `log(num_experts)` if they are equal. With
    capacities, also `over_capacity_1`, `over_capacity_2` and so on, the shares of first, second and
    later choices that were dropped, `expert_over_capacity`, the share of each expert's choices that
    were dropped, and `dropped_tokens`, the share of tokens without an expert.
    """

    class Config(base_layer.BaseLayer.Config):
        """Configures a BaseGating; the surrounding layer sets `num_experts`."""

        num_experts: Required[int] = REQUIRED

    class Output(NamedTuple):
        """Choice of experts.

        Attributes:
          combine_tensor: `Float[Array, "outer group token expert capacity"]`, the weight of each
            expert's slot in a token's output.
          dispatch_tensor: `Bool[Array, "outer group token expert capacity"]`, each slot's token.
          load_balance_loss: a scalar, small if experts are equally loaded.
          router_z_loss: a scalar, small if logits are.
          seq_load_balance_loss: a scalar, the weighted mean loss per sequence, if requested.
        """

        combine_tensor: Tensor
        dispatch_tensor: Tensor
        load_balance_loss: Tensor
        router_z_loss: Tensor
        seq_load_balance_loss: Tensor | None = None

    def forward(self, logits: Tensor, live: Tensor | None = None) -> Output:
        """Chooses experts.

        Args:
          logits: `Float[Array, "outer group token expert"]`, of the router.
          live: `Bool[Array, "outer group token"]`: which tokens to route; all by default.
        """
        raise NotImplementedError(type(self))

    @nowrap
    def dispatch(
        self,
        inputs: Tensor,
        *,
        dispatch_tensor: Tensor,
        dtype: DType = jnp.bfloat16,
        partition_spec: PartitionSpec | None = None,
        combine_tensor: Tensor | None = None,
    ) -> Tensor:
        """Sends tokens, `Float[Array, "outer group token dim"]`, to the slots of experts.

        Returns `Float[Array, "outer expert group capacity dim"]`, computed in `dtype` and sharded
        by `partition_spec`. `combine_tensor` is not used here.
        """
        x = jnp.einsum(
            "ogsec,ogsm->oegcm",
            dispatch_tensor.astype(dtype),
            inputs.astype(dtype),
        )
        return maybe_shard(x, partition_spec)

    @nowrap
    def combine(
        self,
        inputs: Tensor,
        *,
        combine_tensor: Tensor,
        dtype: DType = jnp.bfloat16,
        partition_spec: PartitionSpec | None = None,
    ) -> Tensor:
        """Adds up outputs, `Float[Array, "outer expert group capacity dim"]`, per token.

        Returns `Float[Array, "outer group token dim"]`; see `dispatch` for the other arguments.
        """
        y = jnp.einsum(
            "ogsec,oegcm->ogsm",
            combine_tensor.astype(dtype),
            inputs.astype(dtype),
        )
        return maybe_shard(y, partition_spec)

    def _report(
        self,
        output: Output,
        experts: Tensor,
        live: Tensor | None,
        routed: Any = None,
    ) -> None:
        """Adds summaries about the choices `experts`, and about those dropped in `routed`."""
        self.add_summary("load_balance_loss", output.load_balance_loss)
        self.add_summary("router_z_loss", output.router_z_loss)
        num_experts = self.config.num_experts
        where = (
            None
            if live is None
            else jnp.broadcast_to(live[..., None], experts.shape)
        )
        choices = routing.choices_per_expert(
            experts, num_experts=num_experts, where=where
        )
        total = jnp.sum(choices)
        load = choices / jnp.maximum(1, total)
        # One weight for each value, so that a pipeline can stack them by stages.
        weight = jnp.full_like(load, total)
        self.add_summary("expert_load", metrics.WeightedSummary(load, weight))
        self.add_summary(
            "dispatch_entropy", jnp.sum(jax.scipy.special.entr(load))
        )
        if routed is None:
            return
        for i, share in enumerate(routing.over_capacity(routed, live)):
            self.add_summary(f"over_capacity_{i + 1}", share)
        served_choices = routing.choices_per_expert(
            experts, num_experts=num_experts, where=routed.kept
        )
        over_capacity = (choices - served_choices) / jnp.maximum(1, choices)
        self.add_summary(
            "expert_over_capacity",
            metrics.WeightedSummary(over_capacity, choices),
        )
        self.add_summary("dropped_tokens", routing.dropped_tokens(routed, live))


class CapacityGating(BaseGating):
    """Gating with a maximum number of tokens per expert."""

    class Config(BaseGating.Config):
        """Configures a gating with capacities."""

        gating_logit_cap: float = 0.0
        """Bound of the logits, by a tanh; 0 for none."""
        expert_capacity: int | None = None
        """The minimum capacity: number of tokens of a group per expert; 0 is None."""
        train_capacity_factor: float | None = None
        """Capacity in training as a multiple of the equal share `group_size / num_experts`. With
        None or 0, only `expert_capacity` counts; with neither, nothing is dropped."""
        eval_capacity_factor: float | None = None
        """The same outside of training."""
        adaptive_load_balance_loss: AdaptiveLoadBalanceLoss.Config | None = None
        """Computes a factor of the load-balancing loss; 1 if None."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name in (
            "expert_capacity",
            "train_capacity_factor",
            "eval_capacity_factor",
        ):
            value = getattr(cfg, name)
            if value is not None and value < 0:
                raise LayerConfigError(
                    f"{self.path()}: {name}={value} leaves no room for a token; expected more "
                    "than 0, or None."
                )
        if not 1 <= self.num_choices() <= cfg.num_experts:
            raise LayerConfigError(
                f"{self.path()}: a token chooses {self.num_choices()} of num_experts="
                f"{cfg.num_experts} experts; expected at least 1, and at most num_experts."
            )
        self._maybe_add_child(
            "adaptive_load_balance_loss", cfg.adaptive_load_balance_loss
        )

    @nowrap
    def num_choices(self) -> int:
        """Returns the number of experts per token."""
        raise NotImplementedError(type(self))

    def _cap_logits(self, logits: Tensor, live: Tensor | None) -> Tensor:
        logits = finite_or_counted(
            logits, None if live is None else live[..., None]
        )
        # Tokens of a group compete for the slots of an expert, and experts for a token.
        logits = gathered(logits, -2, -1)
        logits = logits.astype(jnp.float32)
        cap = self.config.gating_logit_cap
        return cap_logits(logits, cap) if cap else logits

    def _capacity(self, group_size: int) -> int:
        cfg = self.config
        factor = (
            cfg.train_capacity_factor
            if self.is_training
            else cfg.eval_capacity_factor
        )
        return routing.expert_capacity(
            group_size,
            cfg.num_experts,
            factor=factor or None,
            minimum=cfg.expert_capacity or None,
        )

    def _scale_load_balance_loss(
        self, load_balance_loss: Tensor, over_capacity: Tensor
    ) -> Tensor:
        loss = jnp.mean(load_balance_loss)
        if self.config.adaptive_load_balance_loss is None:
            return loss
        return loss * self.adaptive_load_balance_loss(jnp.mean(over_capacity))

    def _route(
        self,
        logits: Tensor,
        experts: Tensor,
        gates: Tensor,
        loss: Tensor,
        live: Tensor | None,
    ) -> BaseGating.Output:
        capacity = self._capacity(logits.shape[-2])
        sizes = {"num_experts": self.config.num_experts, "capacity": capacity}
        routed = routing.route(experts, gates, live=live, **sizes)
        over_capacity = routing.over_capacity(routed, live)
        combine = self._remat_name(
            routing.combine_tensor(routed, **sizes), "gate_weights"
        )
        dispatch = self._remat_name(
            routing.dispatch_tensor(routed, **sizes), "gate_assignment"
        )
        loss = self._scale_load_balance_loss(loss, over_capacity)
        output = self.Output(
            combine, dispatch, loss, routing.router_z_loss(logits, live)
        )
        self._report(output, experts, live, routed)
        return output


class Top2Gating(CapacityGating):
    """Gating by the two likeliest experts, weighted by probabilities (Lepikhin et al., 2021)."""

    class Config(CapacityGating.Config):
        """Configures a Top2Gating."""

        train_capacity_factor: float = 2.0
        """The default 2 leaves room for all choices if equally spread."""
        eval_capacity_factor: float = 2.0
        mask_dtype: DType = jnp.int32

    def num_choices(self) -> int:
        return 2

    def forward(
        self, logits: Tensor, live: Tensor | None = None
    ) -> BaseGating.Output:
        logits = self._cap_logits(logits, live)
        probs = jax.nn.softmax(logits, axis=-1)
        values, experts = routing.top_k(probs, 2)
        gates = values / jnp.sum(values, axis=-1, keepdims=True)
        # The load is that of first choices.
        loss = routing.load_balance_loss(probs, experts[..., :1], live)
        output = self._route(logits, experts, gates, loss, live)
        return output._replace(
            dispatch_tensor=output.dispatch_tensor.astype(
                self.config.mask_dtype
            )
        )


class TopKGating(CapacityGating):
    """Gating by the `k` experts with the highest scores.

    Weights are the scores, normalized to sum to 1 for several choices unless `normalize_gates` is
    False; a single choice keeps its score as weight, so that the router learns from it (Fedus et
    al., 2022).
    """

    class Config(CapacityGating.Config):
        """Configures a TopKGating."""

        num_experts_per_token: int = 2
        score_fn: ConfigOr[ScoreFn] | None = None
        """From logits to scores; a softmax by default."""
        topk_fn: ConfigOr[TopKFn] | None = None
        """Finds the highest scores; exactly by default."""
        normalize_gates: bool = True
        """Whether the weights of a token's choices sum to 1."""
        noisy_gating: GateNoise | None = None
        """Noise to add to logits in training before choosing experts."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._score_fn: Any = maybe_instantiate(cfg.score_fn) or jax.nn.softmax
        self._topk_fn: Any = maybe_instantiate(cfg.topk_fn) or routing.top_k

    def num_choices(self) -> int:
        return self.config.num_experts_per_token

    _axes: ClassVar[str] = "ogsec"  # of `combine_tensor` and `dispatch_tensor`

    @classmethod
    def combine_tensor_shape(cls) -> str:
        """Returns the axes of `combine_tensor`, one letter per axis."""
        return cls._axes

    @classmethod
    def dispatch_tensor_shape(cls) -> str:
        """Returns the axes of `dispatch_tensor`, one letter per axis."""
        return cls._axes

    def forward(
        self, logits: Tensor, live: Tensor | None = None
    ) -> BaseGating.Output:
        logits = self._cap_logits(logits, live)
        scores, experts, gates = self._choose(logits, live)
        loss = routing.load_balance_loss(_as_probs(scores), experts, live)
        return self._route(logits, experts, gates, loss, live)

    def _choose(
        self, logits: Tensor, live: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scores of all experts, the chosen experts and their weights."""
        k = self.config.num_experts_per_token
        scores = chosen_by = self._score_fn(logits)
        if self.config.noisy_gating is GateNoise.GUMBEL and self.is_training:
            key = self.require_prng_key("the noise")
            # The order of a softmax's scores is that of the logits.
            chosen_by = self._score_fn(
                logits + jax.random.gumbel(key, logits.shape)
            )
        _, experts = self._topk_fn(
            jax.lax.stop_gradient(self._preference(chosen_by)), k
        )
        gates = jnp.take_along_axis(scores, experts, axis=-1)
        if k > 1 and self.config.normalize_gates:
            gates = _as_probs(gates)
        return scores, experts, gates

    def _preference(self, scores: Tensor) -> Tensor:
        """Returns values whose largest are those of the experts to choose."""
        return scores


def _as_probs(scores: Tensor) -> Tensor:
    return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-9)


class TopKDropFreeGating(TopKGating):
    """Gating by the `k` experts with the highest scores, without capacity.

    Inputs are `(batch, token)`. In the output, `combine_tensor` and `dispatch_tensor` are the
    weights and the indices of each token's experts, `[Array, "batch token k"]`.
    """

    _axes = "bsk"

    def forward(
        self,
        logits: Tensor,
        seq_load_balance_loss_weight: float | None = None,
        live: Tensor | None = None,
    ) -> BaseGating.Output:
        """Chooses experts.

        Args:
          logits: `Float[Array, "batch token expert"]`, of the router.
          seq_load_balance_loss_weight: the weight of a load-balancing loss per sequence
            (DeepSeek-AI, 2024, equation 17); None for none.
          live: `Bool[Array, "batch token"]`: which tokens count in losses; all by default.
        """
        logits = self._cap_logits(logits, live)
        scores, experts, gates = self._choose(logits, live)
        probs = _as_probs(scores)
        # The load is balanced over all tokens, and with a weight also within each sequence.
        loss = routing.load_balance_loss(
            probs.reshape(-1, *probs.shape[2:]),
            experts.reshape(-1, *experts.shape[2:]),
            None if live is None else live.reshape(-1),
        )
        seq_loss = None
        if seq_load_balance_loss_weight is not None:
            seq_losses = routing.load_balance_loss(probs, experts, live)
            seq_loss = seq_load_balance_loss_weight * jnp.mean(seq_losses)
            self.add_summary("seq_load_balance_loss", seq_loss)
        if live is not None:
            gates = jnp.where(live[..., None], gates, 0.0)
        combine = self._remat_name(gates, "gate_weights")
        dispatch = self._remat_name(experts, "gate_assignment")
        loss = self._scale_load_balance_loss(loss, jnp.zeros(()))
        z_loss = routing.router_z_loss(logits, live)
        output = self.Output(combine, dispatch, loss, z_loss, seq_loss)
        self._report(output, experts, live)
        return output


class TopKBiasGating(TopKDropFreeGating):
    """Gating that balances the load by a bias per expert, without a loss (Wang et al., 2024).

    Experts are chosen by score plus bias, and weighted by the score. After each training step the
    bias of experts above the mean load falls by `gating_update_rate`, that of others rises.
    """

    class Config(TopKDropFreeGating.Config):
        """Configures a TopKBiasGating."""

        gating_update_rate: float = 0.001
        """The change of a bias per step."""
        routed_scaling_factor: float = 2.5
        num_group_of_experts: int = 1
        """Number of groups of adjacent experts."""
        topk_group: int = 1
        """Number of these groups that a token may choose from."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        num_groups, topk_group = cfg.num_group_of_experts, cfg.topk_group
        if num_groups < 1 or cfg.num_experts % num_groups:
            raise LayerConfigError(
                f"{self.path()}: num_experts={cfg.num_experts} is not divisible by "
                f"num_group_of_experts={num_groups}; set a divisor."
            )
        group_size = cfg.num_experts // num_groups
        if (
            not 1 <= topk_group <= num_groups
            or topk_group * group_size < self.num_choices()
        ):
            raise LayerConfigError(
                f"{self.path()}: topk_group={topk_group} of num_group_of_experts={num_groups} "
                f"groups of {group_size} experts leave too few for num_experts_per_token="
                f"{self.num_choices()}; expected 1 to {num_groups} groups with as many experts."
            )

    def _create_layer_parameter_specs(
        self,
    ) -> dict[str, base_layer.ParameterSpec]:
        return {
            "gating_bias": constant_spec(
                (self.config.num_experts,), dtype=jnp.float32
            )
        }

    def _preference(self, scores: Tensor) -> Tensor:
        cfg = self.config
        biased_scores = scores + to_ndim(
            self.parameters["gating_bias"], scores.ndim
        )
        if cfg.num_group_of_experts == 1:
            return biased_scores
        return routing.limit_to_groups(
            biased_scores,
            num_groups=cfg.num_group_of_experts,
            num_kept=cfg.topk_group,
        )

    def _choose(
        self, logits: Tensor, live: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        cfg, bias = self.config, self.parameters["gating_bias"]
        scores, experts, gates = super()._choose(logits, live)
        if self.is_training:
            where = (
                None
                if live is None
                else jnp.broadcast_to(live[..., None], experts.shape)
            )
            load = routing.choices_per_expert(
                experts, num_experts=cfg.num_experts, where=where
            )
            step = cfg.gating_update_rate * jnp.sign(jnp.mean(load) - load)
            self.add_state_update(
                "gating_bias", jax.lax.stop_gradient(bias + step)
            )
        return scores, experts, gates * cfg.routed_scaling_factor
