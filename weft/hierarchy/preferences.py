"""Causal language models that learn from preferences, and from rewards of their answers.

Both compare the model with a reference, the model before the training:

    with adapters       the reference is the same parameters without the adapters
    without adapters    it is a frozen copy, the child "reference"

    cfg = PreferenceModel.from_model(base_cfg)    # of pairs of answers: DPO or IPO
    cfg = PolicyModel.from_model(base_cfg)        # of answers with advantages: GRPO

Other parameters are those of the base, under the same paths. A learner leaves a copy as it is with
`update_rules = [("reference/.*", UpdateType.NO_UPDATE), (".*", UpdateType.ALL_UPDATES)]`.
`without_reference` returns the model alone.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from weft import functional
from weft.errors import LayerConfigError
from weft.hierarchy.causal_lm import (
    BaseLossMetrics,
    Metrics,
    Model,
    target_statistics,
)
from weft.hierarchy.lora import base_state, without_lora
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.module import functional as invoke
from weft.typing import PyTree, Tensor

REFERENCE = "reference"
"""Name of the child that is a frozen copy."""


class ModelWithReference(Model):
    """Causal language model with a reference, whose parameters are not trained."""

    class Config(Model.Config):
        """Configures a ModelWithReference."""

        has_reference: bool = True
        """Whether there is a reference. Without one, the loss has no term for it."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._reference: Model | None = None
        if not cfg.has_reference:
            return
        model = _model_config(cfg)
        base = without_lora(model)
        self._is_copy = base == model
        if self._is_copy:
            self._reference = cast(Model, self._add_child(REFERENCE, base))
        else:
            self._reference = cast(
                Model, base.set(name=REFERENCE).instantiate(parent=None)
            )

    @classmethod
    @nowrap
    def from_model(cls, model: Model.Config, **fields: Any) -> Any:
        """Returns the config of this class with the decoder and other fields of a model.

        Args:
            model: with adapters or without.
            **fields: of this class.
        """
        cfg: Any = cls.default_config()
        for name, value in _fields(model).items():
            if name != "metrics":
                setattr(cfg, name, value)
        return cfg.set(**fields)

    def _with_reference(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a batch with the reference's log probability of each target, if there is one."""
        if self._reference is None:
            return dict(batch)
        state: PyTree = self.state
        if self._is_copy:
            state = state[REFERENCE]
        else:
            state = base_state(dict(state))
        scores, _ = invoke(
            self._reference,
            None,
            jax.lax.stop_gradient(state),
            [batch],
            method="score",
            is_training=False,
        )
        return {**batch, "reference_log_probs": -scores["per_token_loss"]}


def _fields(cfg: Model.Config) -> dict[str, Any]:
    """Returns the values of the fields that every model has."""
    names = Model.default_config().keys()
    return {name: getattr(cfg, name) for name in names if name != "klass"}


def _model_config(cfg: Model.Config) -> Model.Config:
    """Returns the config of the model alone, with the metrics of a language model."""
    model = Model.default_config()
    for name, value in _fields(cfg).items():
        if name != "metrics":
            setattr(model, name, value)
    return model.clone()


def without_reference(
    cfg: Model.Config, params: PyTree
) -> tuple[Model.Config, PyTree]:
    """Returns the config and the parameters of a model without its reference.

    Models of other classes are returned unchanged.

    >>> cfg = PreferenceModel.from_model(Model.default_config())
    >>> model, params = without_reference(cfg, {"decoder": {}, "reference": {}})
    >>> model == Model.default_config(), params
    (True, {'decoder': {}})
    """
    if not isinstance(cfg, ModelWithReference.Config):
        return cfg, params
    model_params = {
        name: value for name, value in params.items() if name != REFERENCE
    }
    return _model_config(cfg), model_params


def _token_log_probs(
    input_batch: Mapping[str, Tensor], predict_outputs: Mapping[str, Any]
) -> Tensor:
    """Returns the log probability of each target, 0 where it does not count."""
    statistics = predict_outputs.get("target_statistics")
    if statistics is None:
        statistics = target_statistics(
            predict_outputs["logits"],
            input_batch["target_labels"],
            input_batch["live_targets"],
        )
    return -statistics["nll"]


class PreferenceLossMetrics(BaseLossMetrics):
    """Loss of pairs of a chosen and a rejected answer.

    The metrics are means over pairs: `margin`, how much larger the reward of the chosen
    answer is, where the reward is `beta` times the log ratio to the reference; `accuracy`, the
    share of pairs where it is larger; and `chosen_length` and `rejected_length` in tokens.
    """

    class Config(BaseLossMetrics.Config):
        """Configures a PreferenceLossMetrics."""

        loss: Literal["dpo", "ipo"] = "dpo"
        """See `dpo_loss` and `ipo_loss` of `weft.functional`."""
        beta: float = 0.1
        """The larger, the closer the model stays to the reference."""
        label_smoothing: float = 0.0
        """The probability of wrong labels, for the loss "dpo"."""
        rpo_alpha: float = 0.0
        """Weight of the mean loss of a token of the chosen answer, which keeps it likely."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.loss == "ipo" and cfg.label_smoothing:
            raise LayerConfigError(
                f"{self.path()}: label_smoothing={cfg.label_smoothing} is for loss='dpo'; "
                "loss='ipo' has none. Set it to 0."
            )

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `BaseLossMetrics.forward`.

        Args:
          input_batch: a dict with rows of two answers of each pair, the chosen one first:
            `target_labels`, `Int[Array, "2*pairs time"]`, `live_targets`, and optionally
            `reference_log_probs`, `Float[Array, "2*pairs time"]`, of the targets.
        """
        cfg = self.config
        is_answer = input_batch["live_targets"]
        token_log_probs = _token_log_probs(input_batch, predict_outputs)
        log_probs = functional.answer_log_probs(token_log_probs, is_answer)
        chosen, rejected = _halves(log_probs)
        reference: tuple[Tensor, ...] = ()
        if "reference_log_probs" in input_batch:
            reference = _halves(
                functional.answer_log_probs(
                    input_batch["reference_log_probs"], is_answer
                )
            )
        margins = functional.preference_margins(chosen, rejected, *reference)
        if cfg.loss == "ipo":
            losses = functional.ipo_loss(margins, beta=cfg.beta)
        else:
            losses = functional.dpo_loss(
                margins, beta=cfg.beta, label_smoothing=cfg.label_smoothing
            )
        lengths = jnp.sum(is_answer, axis=-1, dtype=jnp.float32)
        chosen_lengths, rejected_lengths = _halves(lengths)
        if cfg.rpo_alpha:
            chosen_losses = -chosen / jnp.maximum(chosen_lengths, 1)
            losses = losses + cfg.rpo_alpha * chosen_losses
        # Rows that only fill a batch have no answers.
        is_pair = (chosen_lengths > 0) & (rejected_lengths > 0)
        values = {
            "margin": cfg.beta * margins,
            "accuracy": (margins > 0).astype(jnp.float32),
            "chosen_length": chosen_lengths,
            "rejected_length": rejected_lengths,
        }
        metrics: Metrics = {
            name: _mean(value, is_pair) for name, value in values.items()
        }
        return _mean(losses, is_pair), metrics


def _halves(of_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what belongs to chosen and to rejected answers."""
    pairs = of_rows.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _mean(values: Tensor, weights: Tensor) -> WeightedScalar:
    return WeightedScalar(*functional.weighted_mean(values, weights))


class PreferenceModel(ModelWithReference):
    """Causal language model that learns which of two answers is preferred.

    A batch is a dict of arrays with an axis of the two answers, the chosen one first:
      input_ids: `Int[Array, "pairs 2 time"]`, the prompt and the answer.
      target_labels: `Int[Array, "pairs 2 time"]`, the token after each input.
      live_targets: `Bool[Array, "pairs 2 time"]`, which targets are tokens of the answer.

    >>> cfg = PreferenceModel.from_model(Model.default_config())
    >>> cfg.metrics.beta
    0.1
    """

    class Config(ModelWithReference.Config):
        """Configures a PreferenceModel."""

        metrics: BaseLossMetrics.Config = PreferenceLossMetrics.default_config()

    def forward(
        self, input_batch: Mapping[str, Tensor], return_aux: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes the loss, and reports it and the metrics; see `Model.forward`."""
        rows: dict[str, Tensor] = {}
        for name, x in input_batch.items():
            # Both answers of a pair stay on one device.
            rows[name] = x.reshape(-1, *x.shape[2:])
        return super().forward(self._with_reference(rows), return_aux)


class PolicyLossMetrics(BaseLossMetrics):
    """Loss of answers by their advantages over other answers to the same prompt.

    The metrics are means over answers: `reward`, `kl`, the estimated divergence from the
    reference per token, `response_length` in tokens, and, if another model has drawn the answers,
    `clipped`, the share of tokens whose ratio is clipped.
    """

    class Config(BaseLossMetrics.Config):
        """Configures a PolicyLossMetrics; see `weft.functional.grpo_loss`."""

        clip: float = 0.2
        """How far ratios to the model that has drawn the answers may be from 1."""
        beta: float = 0.04
        """The weight of the divergence from the reference."""

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `BaseLossMetrics.forward`.

        Args:
          input_batch: see `PolicyModel`, with `reference_log_probs`,
            `Float[Array, "answers time"]`, of the targets if there is a reference.
        """
        cfg = self.config
        is_answer = input_batch["live_targets"]
        losses, aux = functional.grpo_loss(
            _token_log_probs(input_batch, predict_outputs),
            input_batch["advantages"],
            is_answer,
            old_log_probs=input_batch.get("old_log_probs"),
            reference_log_probs=input_batch.get("reference_log_probs"),
            clip=cfg.clip,
            beta=cfg.beta,
        )
        lengths = jnp.sum(is_answer, axis=-1, dtype=jnp.float32)
        has_answer = lengths > 0
        metrics: Metrics = {
            "reward": _mean(input_batch["rewards"], has_answer),
            "kl": _mean(aux["divergence"], has_answer),
            "response_length": _mean(lengths, has_answer),
        }
        if "old_log_probs" in input_batch:
            metrics["clipped"] = _mean(aux["clipped"], has_answer)
        return _mean(losses, has_answer), metrics


class PolicyModel(ModelWithReference):
    """Causal language model that learns from rewards of its own answers.

    A batch is a dict of
      input_ids, target_labels, live_targets: `[Array, "answers time"]`, as of a `PreferenceModel`.
      advantages, rewards: `Float[Array, "answers"]`, see `weft.functional.group_advantages`.
      old_log_probs: optional, `Float[Array, "answers time"]`: those of the targets by the model
        that has drawn the answers, if it was another one.
    """

    class Config(ModelWithReference.Config):
        """Configures a PolicyModel."""

        metrics: BaseLossMetrics.Config = PolicyLossMetrics.default_config()

    def forward(
        self, input_batch: Mapping[str, Tensor], return_aux: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes the loss, and reports it and the metrics; see `Model.forward`."""
        return super().forward(self._with_reference(input_batch), return_aux)
