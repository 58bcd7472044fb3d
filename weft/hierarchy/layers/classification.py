"""Classification: losses, metrics and heads.

Labels outside `[0, num_classes)` count neither in losses nor in metrics. All means are reported as
`WeightedScalar` with the number of labels that count.
"""

import jax
import jax.numpy as jnp

from weft import config, functional
from weft.functional import weighted_mean
from weft.functional.arrays import counted
from weft.hierarchy import base_layer, metrics
from weft.hierarchy.module import Module
from weft.typing import NestedTensor, Tensor


class BaseClassificationMetric(base_layer.BaseLayer):
    """Base of the layers that compute a loss from logits and report metrics."""

    class Config(base_layer.BaseLayer.Config):
        num_classes: config.Required[int] = config.REQUIRED

    def forward(
        self,
        logits: Tensor,
        *,
        labels: Tensor,
        soft_labels: Tensor | None = None,
    ) -> Tensor:
        """Reports metrics and returns the loss, `Float[Array, ""]`.

        Args:
            logits: `Float[Array, "*batch num_classes"]`.
            labels: `Int[Array, "*batch"]`, the right class.
            soft_labels: `Float[Array, "*batch num_classes"]`, the probability of each class, for
                the loss in place of the labels.
        """
        raise NotImplementedError(type(self))

    def _label_mask(self, labels: Tensor) -> Tensor:
        return ((labels >= 0) & (labels < self.config.num_classes)).astype(
            jnp.float32
        )

    def _report(self, mask: Tensor, **means: Tensor) -> None:
        for name, mean in means.items():
            self.add_summary(name, metrics.WeightedScalar(mean, mask.sum()))


class ClassificationMetric(BaseClassificationMetric):
    """Cross entropy; reports `loss`, `perplexity` and `accuracy`."""

    class Config(BaseClassificationMetric.Config):
        """Configures a ClassificationMetric; `label_smoothing` is shared by all classes."""

        label_smoothing: float = 0.0

    def forward(
        self,
        logits: Tensor,
        *,
        labels: Tensor,
        soft_labels: Tensor | None = None,
    ) -> Tensor:
        mask = self._label_mask(labels)
        loss, _ = functional.cross_entropy(
            logits,
            labels,
            live_targets=mask,
            label_smoothing=self.config.label_smoothing,
            soft_target_labels=soft_labels,
        )
        accuracy, _ = weighted_mean(jnp.argmax(logits, axis=-1) == labels, mask)
        self._report(mask, loss=loss, accuracy=accuracy)
        self.add_summary(
            "perplexity", metrics.Perplexity(jnp.exp(loss), mask.sum())
        )
        return loss


class BinaryClassificationMetric(BaseClassificationMetric):
    """Cross entropy of one logit against true or false.

    Reports `loss`, `accuracy`, and for the class "true" `precision`, `recall` and `f_score`.
    """

    class Config(BaseClassificationMetric.Config):
        """Configures a BinaryClassificationMetric.

        `prediction_threshold` is the lowest probability of a prediction "true".
        """

        num_classes: int = 2
        prediction_threshold: float = 0.5

    def forward(
        self,
        logits: Tensor,
        *,
        labels: Tensor,
        soft_labels: Tensor | None = None,
    ) -> Tensor:
        """Reports metrics and returns the loss, `Float[Array, ""]`.

        Args:
            logits: `Float[Array, "*batch"]` or `Float[Array, "*batch 1"]`, of being true.
            labels: `Int[Array, "*batch"]`, 1 for true and 0 for false.
            soft_labels: `Float[Array, "*batch"]`, probabilities of being true, for the loss alone.
        """
        logits = logits.reshape(labels.shape)
        mask = self._label_mask(labels)
        targets = (
            labels if soft_labels is None else soft_labels.reshape(labels.shape)
        )
        loss, _ = functional.binary_cross_entropy(
            logits, target_labels=targets, live_targets=mask
        )
        predicted = (
            jax.nn.sigmoid(logits.astype(jnp.float32))
            >= self.config.prediction_threshold
        )
        true = labels == 1
        accuracy, _ = weighted_mean(predicted == true, mask)
        # Each is a mean over another set, so each has its own weight.
        precision, num_predicted = weighted_mean(true, mask * predicted)
        recall, num_true = weighted_mean(predicted, mask * true)
        f_score, weight = weighted_mean(
            predicted & true, mask * (predicted * 0.5 + true * 0.5)
        )
        self._report(mask, loss=loss, accuracy=accuracy)
        self.add_summary(
            "precision", metrics.WeightedScalar(precision, num_predicted)
        )
        self.add_summary("recall", metrics.WeightedScalar(recall, num_true))
        self.add_summary("f_score", metrics.WeightedScalar(f_score, weight))
        return loss


class CategoricalHingeLossMetric(BaseClassificationMetric):
    """Hinge loss; reports `loss` and `accuracy`."""

    def forward(
        self,
        logits: Tensor,
        *,
        labels: Tensor,
        soft_labels: Tensor | None = None,
    ) -> Tensor:
        mask = self._label_mask(labels)
        if soft_labels is None:
            soft_labels = jax.nn.one_hot(labels, self.config.num_classes)
        losses = functional.categorical_hinge_loss(
            counted(logits, mask[..., None]),
            counted(soft_labels, mask[..., None]),
        )
        loss, _ = weighted_mean(losses, mask)
        accuracy, _ = weighted_mean(jnp.argmax(logits, axis=-1) == labels, mask)
        self._report(mask, loss=loss, accuracy=accuracy)
        return loss


class BaseClassificationHead(base_layer.BaseLayer):
    """Base of the layers that map a backbone's features to logits. A subclass defines `forward`."""

    class Config(base_layer.BaseLayer.Config):
        """Configures a BaseClassificationHead; `metric` computes the loss."""

        input_dim: config.Required[int] = config.REQUIRED
        num_classes: config.Required[int] = config.REQUIRED
        metric: config.InstantiableConfig = (
            ClassificationMetric.default_config()
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("metric", cfg.metric.clone(num_classes=cfg.num_classes))

    def forward(self, input_batch: NestedTensor) -> Tensor:
        """Returns logits, `Float[Array, "*batch num_classes"]`, from a dict of features."""
        raise NotImplementedError(type(self))

    def loss(
        self,
        *,
        logits: Tensor,
        target_labels: Tensor,
        soft_labels: Tensor | None = None,
    ) -> Tensor:
        """Reports metrics and returns the loss; see `BaseClassificationMetric.forward`."""
        return self.metric(
            logits, labels=target_labels, soft_labels=soft_labels
        )
