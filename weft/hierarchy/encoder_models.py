"""Models of an encoder that are trained: of hidden words, and of classes of texts and images.

    batch ── encoder ── hidden_states, pooled ── head ── logits ── cross entropy

Targets below 0, or beyond the number of classes, do not count.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from weft import functional
from weft.config import REQUIRED, Required
from weft.errors import LayerConfigError
from weft.functional import attend, to_ndim, weighted_mean
from weft.hierarchy.base_layer import BaseLayer, BaseModel, ParameterSpec
from weft.hierarchy.context import child_context
from weft.hierarchy.encoders import Encoder
from weft.hierarchy.layers.linear import Dropout, Linear
from weft.hierarchy.layers.normalization import LayerNorm
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module
from weft.hierarchy.param_init import DefaultInitializer, normal_weights
from weft.hierarchy.parameter_spec import constant_spec
from weft.typing import ActivationName, Tensor


class BaseEncoderModel(BaseModel):
    """Base of models of an encoder's outputs. A subclass defines `_compute_logits`."""

    class Config(BaseModel.Config):
        encoder: Encoder.Config = Encoder.default_config()
        param_init: DefaultInitializer.Config | None = normal_weights(
            None, 0.02
        )

    _target: ClassVar[str] = "label"  # the field of a batch

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("encoder", cfg.encoder)

    def forward(
        self, input_batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean cross entropy of the targets, and what `predict` returns.

        Reports the summaries `loss` and `accuracy`.
        """
        predictions = self.predict(input_batch)
        logits = predictions["logits"]
        targets = input_batch[self._target]
        is_class = (targets >= 0) & (targets < logits.shape[-1])
        mask = is_class.astype(jnp.float32)
        loss, _ = functional.cross_entropy(logits, targets, live_targets=mask)
        accuracy, _ = weighted_mean(
            jnp.argmax(logits, axis=-1) == targets, mask
        )
        num_targets = mask.sum()
        self.add_summary("loss", WeightedScalar(loss, num_targets))
        self.add_summary("accuracy", WeightedScalar(accuracy, num_targets))
        return loss, predictions

    def predict(self, input_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the encoder's outputs, and the `logits` of the classes.

        Args:
          input_batch: as for `Encoder.forward`; targets are ignored.
        """
        outputs = self.encoder(input_batch)
        return {**outputs, "logits": self._compute_logits(outputs)}

    def _compute_logits(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Returns logits, `Float[Array, "*batch classes"]`, from the encoder's outputs."""
        raise NotImplementedError(type(self))


class EncoderClassifier(BaseEncoderModel):
    """Classifier of texts or images, by the pooled vector or else the first hidden state.

    A batch has the fields of `Encoder.forward`, and `label`, `Int[Array, "batch"]`.
    """

    class Config(BaseEncoderModel.Config):
        """Configures an EncoderClassifier."""

        num_classes: Required[int] = REQUIRED
        class_names: Sequence[str] | None = None
        """The names of the classes, for export; None if there are none."""
        dropout: Dropout.Config = Dropout.default_config()
        """Dropout before the output layer."""
        output_layer: Linear.Config = Linear.default_config()
        """Linear map to the logits."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        names = cfg.class_names
        if names is not None and len(names) != cfg.num_classes:
            raise LayerConfigError(
                f"{self.path()}: class_names has {len(names)} names, and num_classes="
                f"{cfg.num_classes}; name each class once."
            )
        self._add_child("dropout", cfg.dropout)
        pooler = cfg.encoder.pooler
        input_dim = cfg.encoder.dim
        if pooler is not None:
            input_dim = pooler.output_dim
        self._add_child(
            "output_layer",
            cfg.output_layer.set(
                input_dim=input_dim, output_dim=cfg.num_classes
            ),
        )

    def _compute_logits(self, outputs: Mapping[str, Tensor]) -> Tensor:
        if "pooled" in outputs:
            x = outputs["pooled"]
        else:
            x = outputs["hidden_states"][:, 0]
        return self.output_layer(self.dropout(x))


class MaskedLmHead(BaseLayer):
    """Output layer of a masked language model, whose weight is the table of token embeddings.

    Parameter: `bias` of shape (vocab_size,).
    """

    class Config(BaseLayer.Config):
        """Configures a MaskedLmHead: `norm(activation(linear(x)))`, then the logits."""

        dim: Required[int] = REQUIRED
        vocab_size: Required[int] = REQUIRED
        linear: Linear.Config = Linear.default_config()
        activation: ActivationName = "exact_gelu"
        norm: LayerNorm.Config = LayerNorm.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child(
            "linear", cfg.linear.set(input_dim=cfg.dim, output_dim=cfg.dim)
        )
        self._add_child("norm", cfg.norm.set(input_dim=cfg.dim))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape = (self.config.vocab_size,)
        return {"bias": constant_spec(shape, mesh_axes=("model",))}

    def forward(self, x: Tensor, token_embeddings: Tensor) -> Tensor:
        """Returns logits, `Float[Array, "batch time vocab_size"]`.

        Args:
          x: `Float[Array, "batch time dim"]`.
          token_embeddings: `Float[Array, "vocab_size dim"]`.
        """
        activation = functional.get_activation_fn(self.config.activation)
        x = self.norm(activation(self.linear(x)))
        logits = attend(token_embeddings, x)
        bias = to_ndim(self.parameters["bias"], logits.ndim)
        return logits + bias.astype(logits.dtype)


class MaskedLanguageModel(BaseEncoderModel):
    """Model of hidden words of a text, each from the words before and after it.

    A batch has the fields of `Encoder.forward`, and `target_labels`, `Int[Array, "batch time"]`:
    the token where it is hidden, and a negative number elsewhere.
    """

    class Config(BaseEncoderModel.Config):
        """Configures a MaskedLanguageModel; its encoder embeds tokens."""

        head: MaskedLmHead.Config = MaskedLmHead.default_config()

    _target = "target_labels"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        embedding: Any = cfg.encoder.emb
        head = cfg.head.set(
            dim=cfg.encoder.dim, vocab_size=embedding.vocab_size
        )
        self._add_child("head", head)

    def _compute_logits(self, outputs: Mapping[str, Tensor]) -> Tensor:
        with child_context("token_embeddings", module=self.encoder):
            table = self.encoder.token_embeddings()
        return self.head(outputs["hidden_states"], table)
