"""Encoders: transformers that read a whole text or image at once.

    token ids ─┐
               ├─ emb ── transformer ── output_norm ─┬─ hidden_states
    image ─────┘                                     └─ first position ── pooler ── pooled

Each position attends to all others. `BERT` (Devlin et al., 2019) embeds tokens, with a norm of the
sum, and has norms after the branches of its layers; `ViT` (Dosovitskiy et al., 2021) embeds patches
of an image, and has norms before the branches and after the last layer. `Encoder` is both, by its
config; `weft.hierarchy.encoder_models` has the models that are trained.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from weft import functional
from weft.config import REQUIRED, InstantiableConfig, Required, maybe_set_config
from weft.errors import ArgumentShapeError, LayerConfigError
from weft.functional import arrays
from weft.hierarchy.attention.bias import BoolTensorAttentionBias
from weft.hierarchy.attention.stack import (
    BaseStackedTransformerLayer,
    RepeatedTransformerLayer,
)
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.convolution import Conv2D
from weft.hierarchy.layers.embedding import (
    LearnedPositionalEmbedding,
    TransformerTextEmbeddings,
)
from weft.hierarchy.layers.linear import Dropout
from weft.hierarchy.module import Module
from weft.hierarchy.param_init import DefaultInitializer, normal_weights
from weft.hierarchy.poolings import PoolingWithProjection
from weft.typing import ActivationName, Tensor


class PatchEmbedding(BaseLayer):
    """Embedding of an image: a class token, and a vector for each patch from left to right.

    Parameter: `class_token_weight` of shape (1, dim).
    """

    class Config(BaseLayer.Config):
        """Configures a PatchEmbedding; sizes are those of height and width in pixels."""

        dim: Required[int] = REQUIRED
        image_size: Required[tuple[int, int]] = REQUIRED
        patch_size: Required[tuple[int, int]] = REQUIRED
        num_channels: int = 3
        patch: Conv2D.Config = Conv2D.default_config()
        """Linear map of each patch to a vector."""
        pos_emb: LearnedPositionalEmbedding.Config = (
            LearnedPositionalEmbedding.default_config()
        )
        """Added to the class token, which is the first position, and to the patches."""
        dropout: Dropout.Config = Dropout.default_config()
        """Dropout of the sum."""
        param_init: DefaultInitializer.Config | None = normal_weights(
            None, 0.02
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        num_patches = 1
        for size, patch in zip(cfg.image_size, cfg.patch_size, strict=True):
            if size % patch:
                raise LayerConfigError(
                    f"{self.path()}: patch_size={cfg.patch_size} does not divide image_size="
                    f"{cfg.image_size}; change one of them."
                )
            num_patches *= size // patch
        self._add_child(
            "patch",
            cfg.patch.set(
                input_dim=cfg.num_channels,
                output_dim=cfg.dim,
                window=cfg.patch_size,
                strides=cfg.patch_size,
            ),
        )
        self._add_child(
            "pos_emb", cfg.pos_emb.set(dim=cfg.dim, shape=(1 + num_patches,))
        )
        self._add_child("dropout", cfg.dropout)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape = (1, self.config.dim)
        spec = ParameterSpec(shape, mesh_axes=(None, "model"))
        return {"class_token_weight": spec}

    def forward(self, input_batch: Mapping[str, Any]) -> Tensor:
        """Embeds images; returns `Float[Array, "batch 1+patches dim"]`.

        Args:
          input_batch: a dict with `image`, `Float[Array, "batch height width channels"]`.

        Raises:
          ArgumentShapeError: if images have another size than that of the config.
        """
        cfg = self.config
        image = input_batch["image"]
        shape = (*cfg.image_size, cfg.num_channels)
        if image.shape[1:] != shape:
            raise ArgumentShapeError(
                f"{self.path()}: image has shape {image.shape}; expected (batch, height, width, "
                f"channels) with sizes {shape}. Resize the images, and put channels last."
            )
        patches = self.patch(image)
        batch, rows, columns, dim = patches.shape
        patches = arrays.gathered(patches, 1, 2)
        patches = arrays.reshaped(
            patches,
            (batch, rows * columns, dim),
            arrays.explicit_spec(patches)[:1],
        )
        # The class token is the same in each image, as positions are.
        class_token = self.parameters["class_token_weight"]
        table = self.pos_emb.embeddings()
        table = table + jnp.pad(class_token, ((0, len(table) - 1), (0, 0)))
        x = jnp.pad(patches, ((0, 0), (1, 0), (0, 0)))
        return self.dropout(x + table[None].astype(x.dtype))


class Encoder(BaseLayer):
    """Transformer that reads a whole text or image.

    >>> cfg = Encoder.default_config().set(dim=8, emb=PatchEmbedding.default_config())
    >>> cfg.transformer.num_layers = 12
    """

    class Config(BaseLayer.Config):
        """Configures an Encoder; its layers have no mask of their own."""

        dim: Required[int] = REQUIRED
        emb: InstantiableConfig = TransformerTextEmbeddings.default_config()
        """Embeds a batch: a `TransformerTextEmbeddings` or a `PatchEmbedding`."""
        transformer: BaseStackedTransformerLayer.Config = (
            RepeatedTransformerLayer.default_config()
        )
        output_norm: InstantiableConfig | None = None
        """Norm after the last layer; None for none."""
        pooler: PoolingWithProjection.Config | None = None
        """Pools the hidden states to one vector; None for none."""
        pooler_activation: ActivationName = "nn.tanh"
        """Applied to what `pooler` returns."""
        param_init: DefaultInitializer.Config | None = normal_weights(
            None, 0.02
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("emb", maybe_set_config(cfg.emb, dim=cfg.dim))
        self._add_child("transformer", cfg.transformer.set(input_dim=cfg.dim))
        if cfg.output_norm is not None:
            self._add_child(
                "output_norm",
                maybe_set_config(cfg.output_norm, input_dim=cfg.dim),
            )
        self._maybe_add_child("pooler", cfg.pooler, input_dim=cfg.dim)

    def forward(self, input_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Encodes a batch.

        Args:
          input_batch: a dict with the `image` of a `PatchEmbedding`; or with `input_ids`,
            `Int[Array, "batch time"]`, and optionally, of the same shape, `attention_mask` (0 where
            no position attends to: padding), `input_segment_ids` (positions attend within their own
            segment), `input_positions` (by default counted from 0) and `token_type_ids` (by default
            0).

        Returns a dict of `hidden_states`, `Float[Array, "batch time dim"]`, and with a pooler
        `pooled`, `Float[Array, "batch output_dim"]`.
        """
        outputs = self.transformer(
            self.emb(_embedding_inputs(input_batch)),
            self_attention_logit_biases=_mask_bias(
                input_batch.get("attention_mask")
            ),
            target_segment_ids=input_batch.get("input_segment_ids"),
        )
        x = outputs.data
        if "output_norm" in self.children:
            x = self.output_norm(x)
        predictions = {"hidden_states": x}
        if "pooler" in self.children:
            activation = functional.get_activation_fn(
                self.config.pooler_activation
            )
            predictions["pooled"] = activation(self.pooler(x)[:, 0])
        return predictions

    def token_embeddings(self) -> Tensor:
        """Returns the table of token embeddings, `Float[Array, "vocab_size dim"]`."""
        return self.emb.token_emb.embeddings()


def _embedding_inputs(input_batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a batch under the names that embeddings have for them."""
    names = {
        "image": "image",
        "input_ids": "inputs",
        "input_positions": "positions",
        "token_type_ids": "token_type_ids",
    }
    inputs: dict[str, Any] = {}
    for name, embedding_name in names.items():
        if input_batch.get(name) is not None:
            inputs[embedding_name] = input_batch[name]
    return inputs


def _mask_bias(attention_mask: Tensor | None) -> BoolTensorAttentionBias | None:
    """Returns the bias that hides the positions at which a mask is 0 from all others."""
    if attention_mask is None:
        return None
    is_visible = attention_mask[:, None, None, :] != 0
    batch, length = attention_mask.shape
    return BoolTensorAttentionBias.from_tensor(
        jnp.broadcast_to(is_visible, (batch, 1, length, length))
    )
