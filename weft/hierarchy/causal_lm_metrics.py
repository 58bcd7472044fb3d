"""Losses and metrics of a language model.

A loss is a `WeightedScalar`, a mean with its number of targets, so that losses of parts of a batch
add up. Metrics are a dict of `WeightedScalar`s, which are reported as summaries, and arrays of one
number per target, which are returned to the caller.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.errors import MetricsError
from weft.functional import cross_entropy
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module
from weft.typing import Tensor

Metrics = dict[str, Any]


class Perplexity(WeightedScalar):
    """Exponential of a mean; two add up to the exponential of the mean over both.

    Example:
      >>> total = Perplexity(4.0, 1.0) + Perplexity(1.0, 1.0)
      >>> float(total.mean), float(total.weight)
      (2.0, 2.0)
    """

    def accumulate(self, other: Self) -> Self:
        total = WeightedScalar(jnp.log(self.mean), self.weight)
        total += WeightedScalar(jnp.log(other.mean), other.weight)
        return type(self)(jnp.exp(total.mean), total.weight)


class BaseLossMetrics(BaseLayer):
    """Layer that computes a loss and metrics. A subclass defines `forward`."""

    def forward(
        self,
        input_batch: Mapping[str, Any],
        *,
        predict_outputs: Mapping[str, Any],
        module_outputs: Mapping[str, Any],
    ) -> tuple[WeightedScalar, Metrics]:
        """Returns a loss and a dict of metrics.

        Args:
          input_batch: the model's input.
          predict_outputs: a dict with `logits`, `Float[Array, "batch time vocab"]`.
          module_outputs: outputs added by `add_module_output`, nested as the modules.
        """
        raise NotImplementedError(type(self))


def target_statistics(
    logits: Tensor, target_labels: Tensor, live_targets: Tensor
) -> dict[str, Tensor]:
    """Computes the per-target numbers that metrics need from the logits.

    Args:
      logits: `Float[Array, "batch time vocab"]`.
      target_labels: `Int[Array, "batch time"]`.
      live_targets: `Bool[Array, "batch time"]`: which targets count.

    Returns:
      A dict of arrays `Float[Array, "batch time"]`, 0 where a target does not count: `nll`, the
      negative log probability of the target, `log_normalizer`, the logarithm of the softmax's
      denominator, and `correct`, whether no token is likelier than the target.
    """
    _, aux = cross_entropy(logits, target_labels, live_targets=live_targets)
    log_normalizer = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    correct = jnp.argmax(logits, axis=-1) == target_labels
    return {
        "nll": aux["per_target_loss"],
        "log_normalizer": jnp.where(live_targets, log_normalizer, 0.0),
        "correct": jnp.where(live_targets & correct, 1.0, 0.0),
    }


class CrossEntropyLossMetrics(BaseLossMetrics):
    """Cross entropy of the targets, and metrics derived from it."""

    @config_class
    class Config(BaseLossMetrics.Config):
        """Configures a CrossEntropyLossMetrics.

        Attributes:
          z_loss_scale: factor of the squared `log_normalizer`, which keeps logits from drifting
            (Chowdhery et al., 2022). Added to the loss and `per_label_loss`, not to cross entropy,
            perplexity and bits per byte.
        """

        z_loss_scale: float | None = None

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `BaseLossMetrics.forward`.

        Args:
          input_batch: a dict with `target_labels`, `Int[Array, "batch time"]`, and optionally
            `live_targets`, `Bool[Array, "batch time"]`, by default all but negative ones, and
            `target_num_bytes`, `Int[Array, "batch"]`, the bytes of each example's targets.
          predict_outputs: a dict with `logits` or their `target_statistics`.
        """
        del module_outputs
        labels = input_batch["target_labels"]
        live = input_batch.get("live_targets", labels >= 0)
        stats = predict_outputs.get("target_statistics")
        if stats is None:
            stats = target_statistics(predict_outputs["logits"], labels, live)
        per_label_loss, scale = stats["nll"], self.config.z_loss_scale
        if scale:
            per_label_loss = per_label_loss + scale * jnp.square(stats["log_normalizer"])
        num_targets = jnp.sum(live, dtype=jnp.float32)

        def mean(per_target: Tensor) -> WeightedScalar:
            return WeightedScalar(jnp.sum(per_target) / jnp.maximum(1, num_targets), num_targets)

        nats = mean(stats["nll"])
        metrics: Metrics = {
            "cross_entropy_loss": nats,
            "perplexity": Perplexity(jnp.exp(nats.mean), num_targets),
            "accuracy": mean(stats["correct"]),
            "train_live_targets": WeightedScalar(num_targets / len(labels), len(labels)),
            "per_label_loss": per_label_loss,
            "live_targets": live,
        }
        if scale:
            metrics["z_loss"] = mean(jnp.square(stats["log_normalizer"]))
        if "target_num_bytes" in input_batch:
            num_bytes = jnp.sum(input_batch["target_num_bytes"]).astype(jnp.float32)
            bits = jnp.sum(stats["nll"]) / math.log(2)
            metrics["bits_per_byte"] = WeightedScalar(bits / jnp.maximum(1, num_bytes), num_bytes)
        return mean(per_label_loss), metrics


class AuxLossMetrics(BaseLossMetrics):
    """Sum of losses computed inside modules, such as a router's load balance."""

    @config_class
    class Config(BaseLossMetrics.Config):
        """Configures an AuxLossMetrics.

        Attributes:
          aux_loss_regex: full match for the paths of module outputs that are losses, such as
            "decoder/transformer/layer0/feed_forward/aux_loss"; None for none.
        """

        aux_loss_regex: str | None = None

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `BaseLossMetrics.forward`.

        Raises:
          MetricsError: if no output has a path that matches.
        """
        regex = self.config.aux_loss_regex
        if regex is None:
            return WeightedScalar(jnp.float32(0), jnp.float32(1)), {}
        by_path = {
            "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): value
            for path, value in jax.tree_util.tree_leaves_with_path(module_outputs)
        }
        losses = [jnp.sum(value) for path, value in by_path.items() if re.fullmatch(regex, path)]
        if not losses:
            raise MetricsError(
                f"aux_loss_regex={regex!r} of {self.path()} matches none of the module outputs "
                f"{sorted(by_path)}; a repeated layer outputs only those that `drop_output` lets "
                "through."
            )
        loss = WeightedScalar(jnp.sum(jnp.stack(losses)).astype(jnp.float32), jnp.float32(1))
        return loss, {"aux_loss": loss}


class CompositeLossWeights(Module):
    """Weights of the losses of several metrics, all 1. A subclass may return others."""

    def forward(
        self, child_metrics: dict[str, tuple[WeightedScalar, Metrics]]
    ) -> dict[str, Tensor | float]:
        """Returns the factor of each child's loss by name, from its loss and metrics."""
        return dict.fromkeys(child_metrics, 1.0)


class CompositeLossMetrics(BaseLossMetrics):
    """Sum of several losses, with the metrics of all."""

    @config_class
    class Config(BaseLossMetrics.Config):
        """Configures a CompositeLossMetrics.

        Attributes:
          metrics: the parts by name. The first part's number of targets is that of the sum.
          loss_weights: the factors of the losses; all 1 if None.
          flatten_metrics: whether to merge the metrics of all parts into one dict, instead of
            nesting them by part.
        """

        metrics: Required[dict[str, BaseLossMetrics.Config]] = REQUIRED
        loss_weights: CompositeLossWeights.Config | None = None
        flatten_metrics: bool | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not cfg.metrics:
            raise MetricsError(
                f"metrics of {self.path()} is empty; expected at least one, such as "
                "{'lm': CrossEntropyLossMetrics.default_config()}."
            )
        for name, metrics in cfg.metrics.items():
            self._add_child(name, metrics)
        if cfg.loss_weights is not None:
            self._add_child("loss_weights", cfg.loss_weights)

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `BaseLossMetrics.forward`.

        Raises:
          MetricsError: if flattened metrics of two parts have the same name.
        """
        cfg = self.config
        parts = {
            name: getattr(self, name)(
                input_batch, predict_outputs=predict_outputs, module_outputs=module_outputs
            )
            for name in cfg.metrics
        }
        weights = dict.fromkeys(parts, 1.0)
        if cfg.loss_weights is not None:
            weights = self.loss_weights(parts)
        mean = sum(weights[name] * loss.mean for name, (loss, _) in parts.items())
        first = next(iter(parts.values()))[0]
        return WeightedScalar(mean, first.weight), self._collect(parts)

    def _collect(self, parts: dict[str, tuple[WeightedScalar, Metrics]]) -> Metrics:
        if not self.config.flatten_metrics:
            return {name: metrics for name, (_, metrics) in parts.items()}
        collected: Metrics = {}
        for part, (_, metrics) in parts.items():
            if both := sorted(collected.keys() & metrics.keys()):
                raise MetricsError(
                    f"{part!r} of {self.path()} has the metrics {both}, which another part also "
                    "has; set flatten_metrics=False."
                )
            collected |= metrics
        return collected


def metrics_config(
    *, z_loss_scale: float | None = None, aux_loss_regex: str | None = None
) -> CompositeLossMetrics.Config:
    """Returns a config of a language model's metrics: cross entropy "lm", auxiliary losses "aux".

    Args:
      z_loss_scale: see `CrossEntropyLossMetrics`.
      aux_loss_regex: see `AuxLossMetrics`.
    """
    return CompositeLossMetrics.default_config().set(
        metrics={
            "lm": CrossEntropyLossMetrics.default_config().set(z_loss_scale=z_loss_scale),
            "aux": AuxLossMetrics.default_config().set(aux_loss_regex=aux_loss_regex),
        },
        flatten_metrics=True,
    )
