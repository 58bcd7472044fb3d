"""Causal language models: a decoder, its losses and metrics, and decoding.

A loss is a `WeightedScalar`, a mean with its number of targets, so that losses of parts of a batch
add up. Metrics are a dict of `WeightedScalar`s, which are reported as summaries, and arrays of one
number per target, which are returned to the caller.
"""

import functools
import logging
import operator
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from weft import config, functional
from weft.errors import LayerConfigError, MetricsError, did_you_mean
from weft.functional.arrays import counted
from weft.functional.loss import LogitStatistics, logit_statistics
from weft.hierarchy import (
    base_layer,
    config_setters,
    context,
    decoding,
    transforms,
)
from weft.hierarchy.attention.bias import CausalAttentionBias
from weft.hierarchy.attention.stack import (
    RepeatedTransformerLayer,
    StackedTransformerLayer,
)
from weft.hierarchy.decoder import Decoder, warn_if_padding_is_end
from weft.hierarchy.layers.embedding import (
    LearnedPositionalEmbedding,
    ModalityVocabInfo,
)
from weft.hierarchy.layers.normalization import LayerNorm
from weft.hierarchy.metrics import Perplexity, WeightedScalar, bits_per_byte
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.param_init import DefaultInitializer, normal_weights
from weft.hierarchy.parameter_spec import maybe_shard
from weft.typing import ActivationName, PartitionSpec, T, Tensor

Metrics = dict[str, Any]

logger = logging.getLogger(__name__)


class BaseLossMetrics(base_layer.BaseLayer):
    """Layer that computes a loss and metrics. A subclass defines `forward`."""

    @nowrap
    def filter_module_outputs(self, path: str) -> bool:
        """Returns whether `forward` gets the module output of a path, such as "decoder/x"."""
        return True

    def forward(
        self,
        input_batch: Mapping[str, Any],
        *,
        predict_outputs: Mapping[str, Any],
        module_outputs: Mapping[str, Any],
    ) -> tuple[WeightedScalar, Metrics]:
        """Returns a loss and a dict of metrics.

        Args:
          predict_outputs: a dict with `logits`, `Float[Array, "batch time vocab"]`.
          module_outputs: outputs added by `add_module_output` that `filter_module_outputs` keeps,
            nested as the modules.
        """
        raise NotImplementedError(type(self))


def target_statistics(
    logits: Tensor, target_labels: Tensor, live_targets: Tensor
) -> dict[str, Tensor]:
    """Computes the per-target numbers that metrics need from the logits.

    Args:
      logits: `Float[Array, "batch time vocab"]`.
      target_labels: `Int[Array, "batch time"]`.
      live_targets: `Num[Array, "batch time"]`: the weight of each target. Where it is 0, logits may
        be anything, including NaN, and have gradient 0.

    Returns:
      A dict of arrays `Float[Array, "batch time"]`, 0 where a target does not count: `nll`, the
      negative log probability of the target, `log_normalizer`, the logarithm of the softmax's
      denominator, and `correct`, whether no token is likelier than the target.
    """
    logits = counted(logits, live_targets[..., None])
    return _live_statistics(
        logit_statistics(logits, target_labels), target_labels, live_targets
    )


def _live_statistics(
    statistics: LogitStatistics, target_labels: Tensor, live_targets: Tensor
) -> dict[str, Tensor]:
    """Returns `target_statistics` of logits that have these statistics."""
    log_normalizer, expected, likeliest = statistics
    live = live_targets.astype(jnp.float32)
    return {
        "nll": jnp.where(live > 0, log_normalizer - expected, 0.0) * live,
        "log_normalizer": jnp.where(live_targets, log_normalizer, 0.0),
        "correct": jnp.where(live_targets, likeliest == target_labels, 0.0),
    }


def _live_targets(input_batch: Mapping[str, Any]) -> Tensor:
    live_targets = input_batch.get("live_targets")
    if live_targets is None:
        return input_batch["target_labels"] >= 0
    return live_targets


def _num_targets(input_batch: Mapping[str, Any]) -> Tensor:
    # One expression for all metrics, so that XLA adds it up over devices once.
    return jnp.sum(_live_targets(input_batch), dtype=jnp.float32)


class CrossEntropyLossMetrics(BaseLossMetrics):
    """Cross entropy of the targets, and metrics derived from it."""

    class Config(BaseLossMetrics.Config):
        """Configures a CrossEntropyLossMetrics.

        `z_loss_scale` is the factor of the squared `log_normalizer`, which keeps logits from
        drifting (Chowdhery et al., 2022). Added to the loss and `per_token_loss`, not to cross
        entropy, perplexity and bits per byte.
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
        labels = input_batch["target_labels"]
        mask = _live_targets(input_batch)
        stats = predict_outputs.get("target_statistics")
        if stats is None:
            stats = target_statistics(predict_outputs["logits"], labels, mask)
        per_token_loss, scale = stats["nll"], self.config.z_loss_scale
        if scale:
            per_token_loss = per_token_loss + scale * jnp.square(
                stats["log_normalizer"]
            )
        num_targets = _num_targets(input_batch)

        def mean(per_target: Tensor) -> WeightedScalar:
            return WeightedScalar(
                jnp.sum(per_target) / jnp.maximum(1, num_targets), num_targets
            )

        nats = mean(stats["nll"])
        metrics: Metrics = {
            "cross_entropy_loss": nats,
            "cross_entropy": nats,
            "perplexity": Perplexity(jnp.exp(nats.mean), num_targets),
            "accuracy": mean(stats["correct"]),
            "train_live_targets": WeightedScalar(
                num_targets / len(labels), len(labels)
            ),
            "per_token_loss": per_token_loss,
            "live_targets": mask,
            "num_targets": num_targets,
        }
        if scale:
            metrics["z_loss"] = mean(jnp.square(stats["log_normalizer"]))
        if "target_num_bytes" in input_batch:
            metrics["bits_per_byte"] = bits_per_byte(
                stats["nll"], input_batch["target_num_bytes"]
            )
        return mean(per_token_loss), metrics


class ModalityLossMetrics(CrossEntropyLossMetrics):
    """Cross entropy and metrics of all targets, and of those of each modality, nested by its name.

    The loss is the mean over the targets of the modalities, each times the weight of its modality.
    A target of two modalities counts in both; one of none does not count.

    >>> text = ModalityVocabInfo("text", 0, 0, vocab_start=0, vocab_end=256)
    >>> image = ModalityVocabInfo("image", 0, 0, vocab_start=256, vocab_end=512)
    >>> cfg = ModalityLossMetrics.default_config().set(
    ...     modalities={"text": text, "image": image}, loss_weights={"image": 0.5})
    """

    class Config(CrossEntropyLossMetrics.Config):
        """Configures a ModalityLossMetrics."""

        modalities: config.Required[dict[str, ModalityVocabInfo | str]] = (
            config.REQUIRED
        )
        """The targets of each modality by name: the range of ids of a `ModalityVocabInfo`, or the
        name of a mask in the batch, `Bool[Array, "batch time"]`."""
        loss_weights: dict[str, float] = {}
        """Factors of the losses by name; 1 for others."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not cfg.modalities:
            raise MetricsError(
                f"modalities of {self.path()} is empty; expected at least one."
            )
        for name in cfg.loss_weights:
            if name not in cfg.modalities:
                raise MetricsError(
                    f"loss_weights of {self.path()} names {name!r}, which is not one of the "
                    f"modalities. {did_you_mean(name, cfg.modalities)}"
                )

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `CrossEntropyLossMetrics.forward`.

        The metrics of a modality also have its `loss`.

        Raises:
          MetricsError: if the batch has no mask of that name, or a modality has the name of a
            metric.
        """
        cfg, live = self.config, _live_targets(input_batch)
        statistics = predict_outputs.get("target_statistics")
        if statistics is None:
            labels = input_batch["target_labels"]
            statistics = target_statistics(
                predict_outputs["logits"], labels, live
            )
        _, metrics = super().forward(
            input_batch,
            predict_outputs={"target_statistics": statistics},
            module_outputs=module_outputs,
        )
        batch = {
            name: x
            for name, x in input_batch.items()
            if name != "target_num_bytes"
        }
        losses = []
        for name in cfg.modalities:
            if name in metrics:
                raise MetricsError(
                    f"a modality of {self.path()} has the name {name!r} of a metric of all "
                    "targets; rename it."
                )
            mask = self._mask(name, input_batch)
            part = {key: jnp.where(mask, x, 0) for key, x in statistics.items()}
            loss, metrics[name] = super().forward(
                {
                    **batch,
                    "live_targets": jnp.where(mask, live, jnp.zeros_like(live)),
                },
                predict_outputs={"target_statistics": part},
                module_outputs=module_outputs,
            )
            metrics[name]["loss"] = loss
            losses.append(
                WeightedScalar(
                    cfg.loss_weights.get(name, 1.0) * loss.mean, loss.weight
                )
            )
        return functools.reduce(operator.add, losses), metrics

    def _mask(self, name: str, input_batch: Mapping[str, Any]) -> Tensor:
        """Returns the targets of a modality, `Bool[Array, "batch time"]`."""
        modality, labels = (
            self.config.modalities[name],
            input_batch["target_labels"],
        )
        if isinstance(modality, ModalityVocabInfo):
            return (labels >= modality.vocab_start) & (
                labels < modality.vocab_end
            )
        if modality not in input_batch:
            raise MetricsError(
                f"modality {name!r} of {self.path()} has the mask {modality!r}, which the batch "
                f"does not have. {did_you_mean(modality, input_batch)}"
            )
        return input_batch[modality].astype(bool)


class AuxLossMetrics(BaseLossMetrics):
    """Mean of losses computed inside modules, such as a router's load balance."""

    class Config(BaseLossMetrics.Config):
        """Configures an AuxLossMetrics.

        `aux_loss_regex` fully matches the paths of module outputs that are losses, such as
        "decoder/transformer/layer0/feed_forward/aux_loss"; None for none.
        """

        aux_loss_regex: str | None = None

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `BaseLossMetrics.forward`.

        Each output counts by its mean, which of a repeated layer is that over its layers. The
        weight is the number of targets, as of the cross entropy. If no output matches, the loss is
        0, and a warning is logged.
        """
        regex, weight = self.config.aux_loss_regex, _num_targets(input_batch)
        if regex is None:
            return WeightedScalar(jnp.float32(0), weight), {}
        by_path = {
            jax.tree_util.keystr(path, simple=True, separator="/"): value
            for path, value in jax.tree_util.tree_leaves_with_path(
                module_outputs
            )
        }
        losses = [
            jnp.mean(value)
            for path, value in by_path.items()
            if re.fullmatch(regex, path)
        ]
        if not losses:
            logger.warning(
                "aux_loss_regex=%r of %s matches none of the module outputs %s; a repeated layer "
                "outputs only those that `drop_output` lets through.",
                regex,
                self.path(),
                sorted(by_path),
            )
        mean = jnp.mean(jnp.stack(losses or [jnp.float32(0)])).astype(
            jnp.float32
        )
        loss = WeightedScalar(mean, weight)
        return loss, {"aux_loss": loss}


class CompositeLossWeights(Module):
    """Weights of the losses of several metrics, all 1. A subclass may return others."""

    def forward(
        self, child_metrics: dict[str, tuple[WeightedScalar, Metrics]]
    ) -> dict[str, Tensor | float]:
        """Returns the factor of each child's loss by name, from its loss and metrics."""
        return dict.fromkeys(child_metrics, 1.0)


class CompositeLossMetrics(BaseLossMetrics):
    """Several losses in one, with the metrics of all.

    Losses of the same class of metrics are parts of a whole: they count by their weighted mean. The
    means of different classes, and each `AuxLossMetrics`, are added.
    """

    class Config(BaseLossMetrics.Config):
        """Configures a CompositeLossMetrics."""

        metrics: config.Required[dict[str, BaseLossMetrics.Config]] = (
            config.REQUIRED
        )
        """The parts by name. The loss of each is a metric `loss_{name}`. The number of targets is
        that of the first class of metrics."""
        loss_weights: CompositeLossWeights.Config | None = None
        """The factors of the losses; all 1 if None."""
        flatten_metrics: bool | None = None
        """Whether to merge the metrics of all parts into one dict, the default, instead of nesting
        them by part."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not cfg.metrics:
            raise MetricsError(
                f"metrics of {self.path()} is empty; expected at least one, such as "
                "{'lm': CrossEntropyLossMetrics.default_config()}."
            )
        for name, metrics in cfg.metrics.items():
            self._add_child(name, metrics)
        self._maybe_add_child("loss_weights", cfg.loss_weights)

    def forward(self, input_batch, *, predict_outputs, module_outputs):
        """Returns the loss and metrics; see `BaseLossMetrics.forward`.

        Raises:
          MetricsError: if flattened metrics of two parts have the same name.
        """
        cfg = self.config
        parts = {}
        for name in cfg.metrics:
            part: BaseLossMetrics = getattr(self, name)
            parts[name] = part(
                input_batch,
                predict_outputs=predict_outputs,
                module_outputs=context.filter_outputs(
                    module_outputs, part.filter_module_outputs
                ),
            )
        weights = dict.fromkeys(parts, 1.0)
        if cfg.loss_weights is not None:
            weights = self.loss_weights(parts)
        # Losses of one class are one mean over all their targets; those of classes add up.
        losses_by_kind: dict[str | type, WeightedScalar] = {}
        for name, (loss, _) in parts.items():
            part = getattr(self, name)
            kind = name if isinstance(part, AuxLossMetrics) else type(part)
            loss = WeightedScalar(weights[name] * loss.mean, loss.weight)
            if kind in losses_by_kind:
                loss = losses_by_kind[kind] + loss
            losses_by_kind[kind] = loss
        first_loss, *further_losses = losses_by_kind.values()
        mean = first_loss.mean + sum(loss.mean for loss in further_losses)
        loss = WeightedScalar(mean, first_loss.weight)
        return loss, self._collect(parts)

    def _collect(
        self, parts: dict[str, tuple[WeightedScalar, Metrics]]
    ) -> Metrics:
        collected: Metrics = {}
        for part, (loss, _) in parts.items():
            collected[f"loss_{part}"] = loss
        for part, (_, metrics) in parts.items():
            if self.config.flatten_metrics is False:
                collected[part] = metrics
                continue
            if both := sorted(collected.keys() & metrics.keys()):
                raise MetricsError(
                    f"{part!r} of {self.path()} has the metrics {both}, which another part also "
                    "has; set flatten_metrics=False."
                )
            collected |= metrics
        return collected


def _loss_value(name: str, metric: T) -> T | Tensor:
    """Returns a part's loss without its weight, and other metrics unchanged."""
    if name.startswith("loss_") and isinstance(metric, WeightedScalar):
        return jnp.asarray(metric.mean)
    return metric


def metrics_config(
    *, z_loss_scale: float | None = None, aux_loss_regex: str | None = None
) -> CompositeLossMetrics.Config:
    """Returns a config of a language model's metrics: cross entropy "lm", auxiliary losses "aux".

    See `CrossEntropyLossMetrics` and `AuxLossMetrics` for the arguments.
    """
    return CompositeLossMetrics.default_config().set(
        metrics={
            "lm": CrossEntropyLossMetrics.default_config().set(
                z_loss_scale=z_loss_scale
            ),
            "aux": AuxLossMetrics.default_config().set(
                aux_loss_regex=aux_loss_regex
            ),
        },
        flatten_metrics=True,
    )


TransformerStackConfig = (
    StackedTransformerLayer.Config | RepeatedTransformerLayer.Config
)
"""Configs of a stack of transformer layers."""


class Model(base_layer.BaseModel):
    """Causal language model.

    A batch is a dict of
      input_ids: `Int[Array, "batch time"]`.
      target_labels: `Int[Array, "batch time"]`: the token after each input. Negative ones, those
        beyond the vocabulary, and the decoder's `pad_token_id` do not count.
      live_targets: optional, `Bool[Array, "batch time"]`: which targets count instead. Needed if
        `pad_token_id` is `eos_token_id`, so that ends of texts count; Weft's inputs have it.
      target_num_bytes: optional, `Int[Array, "batch"]`: number of bytes of each example's targets,
        for bits per byte; negative where it is not known.
      input_segment_ids: optional, `Int[Array, "batch time"]`: tokens attend to their own segment; 0
        is padding.
      input_positions: optional, `Int[Array, "batch time"]`, within the segments; by default counted
        from 0.
      token_type_ids: optional, `Int[Array, "batch time"]`, for an embedding of types.
    """

    class Config(base_layer.BaseModel.Config):
        """Configures a Model."""

        decoder: Decoder.Config = Decoder.default_config()
        metrics: BaseLossMetrics.Config = metrics_config()
        batch_axis_names: tuple[str, ...] | None = ("data",)
        """The mesh axes over which to shard examples; None to not shard inputs."""
        seq_axis_names: tuple[str, ...] | None = None
        scan_chunk: int | None = None
        """Number of positions whose logits are in memory at once; None for all. They are recomputed
        in the backward pass."""
        vocab_chunk_size: int | None = None
        """Number of tokens of the vocabulary, per device, whose logits are in memory at once for
        the loss (see `linear_cross_entropy`). By default chosen by size, if the vocabulary is
        large; set to `vocab_size` for all logits at once. Layers whose logits are not a product
        with a weight compute all at once. The outputs still have `logits`, which cost nothing if
        `jax.jit` finds them unused."""
        param_init: DefaultInitializer.Config | None = normal_weights(
            None, 0.02
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.scan_chunk is not None and cfg.vocab_chunk_size is not None:
            raise LayerConfigError(
                f"{self.path()} has both scan_chunk={cfg.scan_chunk} and "
                f"vocab_chunk_size={cfg.vocab_chunk_size}; set one of them, to compute logits in "
                "chunks of positions or of the vocabulary."
            )
        self._add_child("decoder", cfg.decoder)
        self._add_child("metrics", cfg.metrics)

    def forward(
        self, input_batch: Mapping[str, Any], return_aux: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes the loss, and reports it and the metrics as summaries.

        Returns:
          The loss, and a dict, empty unless `return_aux`: `logits` (unless `scan_chunk` is set) and
          `hidden_states`, `Float[Array, "batch time ..."]`, the `loss`, its weight `num_targets`,
          and `metrics`, a dict with the metrics, such as `cross_entropy`, `per_token_loss`,
          `live_targets` and, as scalars, the losses of parts, such as `loss_lm`.
        """
        batch = self._shard_batch(input_batch)
        batch["live_targets"] = self._target_mask(batch)
        predictions = self.predict(batch)
        loss, metrics = self._compute_metrics(batch, predictions)
        self.add_summary("loss", loss)
        for name, value in _summaries(metrics).items():
            self.add_summary(name, value)
        mean = jnp.asarray(loss.mean)
        if not return_aux:
            return mean, {}
        metrics = {
            name: _loss_value(name, value) for name, value in metrics.items()
        }
        return mean, {
            **predictions,
            "metrics": metrics,
            "loss": mean,
            "num_targets": loss.weight,
        }

    def _shard_batch(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        cfg = self.config
        axes = (cfg.batch_axis_names, cfg.seq_axis_names)
        batch = {name: x for name, x in input_batch.items() if x is not None}
        if axes == (None, None):
            return batch
        return {
            name: maybe_shard(x, PartitionSpec(*axes[: x.ndim]))
            for name, x in batch.items()
        }

    def _target_mask(self, input_batch: Mapping[str, Any]) -> Tensor:
        cfg, labels = self.decoder.config, input_batch["target_labels"]
        if input_batch.get("live_targets") is not None:
            return input_batch["live_targets"]
        warn_if_padding_is_end(cfg, "live_targets")
        return (
            (labels >= 0)
            & (labels < cfg.vocab_size)
            & (labels != cfg.pad_token_id)
        )

    def _compute_metrics(
        self, batch: dict[str, Any], predictions: dict[str, Any]
    ) -> tuple[WeightedScalar, dict[str, Any]]:
        statistics = self._statistics_in_chunks(
            batch, predictions.get("hidden_states")
        )
        outputs = predictions
        if statistics is not None:
            outputs = {**predictions, "target_statistics": statistics}
        keep = self.metrics.filter_module_outputs
        module_outputs = context.filter_outputs(self.get_module_outputs(), keep)
        return self.metrics(
            batch, predict_outputs=outputs, module_outputs=module_outputs
        )

    def _statistics_in_chunks(
        self, batch: Mapping[str, Any], hidden_states: Tensor | None
    ) -> dict[str, Tensor] | None:
        """Returns `target_statistics` without all logits in memory at once, unless there are few.

        None where they are to be computed from all logits.
        """
        if hidden_states is None:
            return None
        hidden_states = counted(hidden_states, batch["live_targets"][..., None])
        if self.config.scan_chunk is not None:
            return self._scan_positions(batch, hidden_states)
        if type(self).compute_logits is not Model.compute_logits:
            return None
        if self.decoder.compute_dtype() != self.compute_dtype():
            return None
        labels = batch["target_labels"]
        with context.child_context("vocab_chunks", module=self.decoder):
            statistics = self.decoder.target_statistics(
                hidden_states, labels, chunk_size=self.config.vocab_chunk_size
            )
        if statistics is None:
            return None
        return _live_statistics(statistics, labels, batch["live_targets"])

    def _scan_positions(
        self, batch: Mapping[str, Any], hidden_states: Tensor
    ) -> dict[str, Tensor]:
        """Returns `target_statistics`, computed from `scan_chunk` positions at a time."""
        chunk, length = self.config.scan_chunk, hidden_states.shape[1]

        def to_chunks(x: Tensor) -> Tensor:
            # Positions after the last one fill its chunk; their targets do not count.
            widths = [(0, 0), (0, -length % chunk), *[(0, 0)] * (x.ndim - 2)]
            padded = jnp.pad(x, widths)
            return jnp.moveaxis(
                padded.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0
            )

        def from_chunks(x: Tensor) -> Tensor:
            return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]

        def of_chunk(
            carry: None, xs: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[None, Any]:
            hidden_states, labels, mask = xs
            logits = self.compute_logits({"hidden_states": hidden_states})
            return carry, target_statistics(logits, labels, mask)

        xs = (hidden_states, batch["target_labels"], batch["live_targets"])
        with context.child_context("scan_chunk", module=self):
            _, statistics = transforms.scan_in_context(
                of_chunk,
                carry=None,
                xs=jax.tree.map(to_chunks, xs),
                remat_kwargs={},
            )
        return jax.tree.map(from_chunks, statistics)

    def predict(self, input_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Runs the decoder on a batch, ignoring targets.

        Returns:
          A dict of `logits`, `Float[Array, "batch time vocab"]`, unless `scan_chunk` is set, and
          `hidden_states`, `Float[Array, "batch time dim"]`, for `compute_logits`.
        """
        batch = self._shard_batch(input_batch)
        names = {
            k: k for k in ("input_ids", "input_segment_ids", "token_type_ids")
        }
        names["input_positions"] = "positions"
        outputs = self.decoder(
            {names[k]: x for k, x in batch.items() if k in names}
        )
        if self.config.scan_chunk is not None:
            del outputs["logits"]
        return outputs

    def compute_logits(self, predictions: Mapping[str, Any]) -> Tensor:
        """Returns logits, `Float[Array, "batch time vocab"]`, from the output of `predict`."""
        with context.child_context("compute_logits", module=self.decoder):
            return self.decoder.compute_logits(predictions)

    def extract_logits(self, input_batch: Mapping[str, Any]) -> Tensor:
        """Returns the logits of the token after each input, `Float[Array, "batch time vocab"]`."""
        predictions = self.predict(input_batch)
        logits = predictions.get("logits")
        if logits is None:
            return self.compute_logits(predictions)
        return logits

    def score(self, input_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns a dict of the loss of each target and which targets count.

        These are `per_token_loss`, `Float[Array, "batch time"]`, 0 where a target does not count,
        and `live_targets`, `Bool[Array, "batch time"]`.
        """
        mask = self._target_mask(input_batch)
        batch = {**input_batch, "live_targets": mask}
        predictions = self.predict(input_batch)
        statistics = self._statistics_in_chunks(
            batch, predictions.get("hidden_states")
        )
        if statistics is None:
            statistics = target_statistics(
                predictions["logits"], batch["target_labels"], mask
            )
        return {"per_token_loss": statistics["nll"], "live_targets": mask}

    def sample_decode(
        self,
        input_batch: Mapping[str, Any],
        *,
        num_decodes: int = 1,
        max_sequence_length: int | None = None,
        logits_modifier: config.ConfigOr[functional.LogitsToLogitsFn]
        | None = None,
        stop_decoding_condition: decoding.StopDecodingCondition | None = None,
    ) -> decoding.SampleOutputs:
        """Samples continuations of prompts; see `DecodingLayer.sample_decode`.

        Prompts are `input_batch["prefix"]`, padded on the right, with their lengths in
        `input_batch["prefix_len"]`, by default those without the decoder's `pad_token_id` at the
        end; results are as long if `max_sequence_length` is None.
        """
        with context.child_context("sample_decode", module=self.decoder):
            return self.decoder.sample_decode(
                input_batch=input_batch,
                max_sequence_length=max_sequence_length
                or input_batch["prefix"].shape[1],
                num_decodes=num_decodes,
                logits_modifier=logits_modifier,
                stop_decoding_condition=stop_decoding_condition,
            )

    def beam_search_decode(
        self,
        input_batch: Mapping[str, Any],
        num_decodes: int = 1,
        brevity_penalty: decoding.BrevityPenaltyFn | None = None,
        *,
        max_sequence_length: int | None = None,
    ) -> decoding.BeamSearchOutputs:
        """Searches for the likeliest continuations; see `DecodingLayer.beam_search_decode`.

        Prompts and lengths are as for `sample_decode`. By default the likeliest hypotheses win,
        which tend to be short; a `brevity_penalty_fn` corrects scores for lengths.
        """
        with context.child_context("beam_search_decode", module=self.decoder):
            return self.decoder.beam_search_decode(
                input_batch=input_batch,
                max_sequence_length=max_sequence_length
                or input_batch["prefix"].shape[1],
                num_decodes=num_decodes,
                brevity_penalty=brevity_penalty,
            )


def _summaries(metrics: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        k: _summaries(x) if isinstance(x, dict) else x
        for k, x in metrics.items()
    }
    return {
        k: x
        for k, x in nested.items()
        if isinstance(x, WeightedScalar | dict) and x != {}
    }


def layer_norm_config(eps: float = 1e-5) -> LayerNorm.Config:
    """Returns a config of a LayerNorm with `eps` added to the variance."""
    return LayerNorm.default_config().set(eps=eps)


def residual_initializer_cfg(
    num_layers: int, scale: float = 0.02
) -> DefaultInitializer.Config:
    """Returns an initializer of layers that add to the residual stream, to keep its variance.

    Weights are normal with the standard deviation `scale / sqrt(2 * num_layers)`, where `scale` is
    that of others, since each layer adds to the stream twice (Radford et al., 2019, section 2.3).

    >>> cfg = residual_initializer_cfg(num_layers=2)
    >>> cfg.init_by_param_name[".*weight$"].scale
    0.01
    """
    return normal_weights(None, scale / (2 * num_layers) ** 0.5)


def gpt_decoder_config(
    stack_cfg: TransformerStackConfig,
    num_layers: int,
    hidden_dim: int,
    num_heads: int,
    vocab_size: int,
    max_position_embeddings: int,
    activation_function: ActivationName
    | tuple[ActivationName, ActivationName] = "nn.relu",
    layer_norm_epsilon: float = 1e-8,
    dropout_rate: float = 0.0,
    layer_remat: base_layer.RematSpec | None = None,
) -> Decoder.Config:
    """Returns a config of a decoder as in GPT-2 (Radford et al., 2019), with tied embeddings.

    Args:
      hidden_dim: the model dimension; feed-forward layers have four times as many.
      activation_function: of the feed-forward layers; see `get_activation_fn`.
      layer_remat: what each layer recomputes in the backward pass; nothing if None.
    """
    stack = stack_cfg.clone()
    layer: Any = stack.layer
    attention = layer.self_attention.attention
    attention.set(
        num_heads=num_heads, mask=CausalAttentionBias.default_config()
    )
    layer.feed_forward.set(
        hidden_dim=4 * hidden_dim, activation=activation_function
    )
    residual = residual_initializer_cfg(num_layers)
    layer.feed_forward.linear2.param_init = (
        attention.output_linear.param_init
    ) = residual
    if layer_remat is not None:
        layer.remat_spec = layer_remat
    pos_emb = LearnedPositionalEmbedding.default_config().set(
        shape=(max_position_embeddings,), param_init=normal_weights("fan_out")
    )
    stack.set(num_layers=num_layers, layer=layer)
    cfg = Decoder.default_config().set(
        transformer=stack,
        dim=hidden_dim,
        vocab_size=vocab_size,
        dropout_rate=dropout_rate,
    )
    cfg.emb.pos_emb = pos_emb
    config_setters.set_layer_norm_eps_recursively(cfg, layer_norm_epsilon)
    return cfg
