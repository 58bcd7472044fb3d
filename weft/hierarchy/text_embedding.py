"""Embeddings of token ids, and their use as output weights."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from weft.config import REQUIRED, InstantiableConfig, Required, config_class, maybe_set_config
from weft.functional import cap_logits
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.dropout import Dropout
from weft.hierarchy.embedding import Embedding
from weft.hierarchy.module import Module
from weft.typing import DType, NestedTensor, Tensor


class BaseEmbedding(BaseLayer):
    """Base of embeddings of token ids. A subclass defines `forward` and `attend`.

    An embedding that depends on more than a token and its position also defines `init_states` and
    `extend_step`, for decoding.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a BaseEmbedding."""

        dim: Required[int] = REQUIRED

    def forward(self, input_batch: Mapping[str, Any]) -> Tensor:
        """Embeds tokens; returns `Float[Array, "batch time dim"]`.

        Args:
          input_batch: a dict with `inputs`, token ids, `Int[Array, "batch time"]`, and optionally
            `positions` (default: counted from 0) and `token_type_ids` of the same shape.
        """
        raise NotImplementedError(type(self))

    def attend(self, x: Tensor) -> Tensor:
        """Returns inner products of `x`, `Float[Array, "batch time dim"]`, with all embeddings."""
        raise NotImplementedError(type(self))

    def init_states(self, *, batch_size: int, dtype: DType) -> NestedTensor:
        """Returns the initial state of decoding; empty by default."""
        del batch_size, dtype
        return {}

    def extend_step(
        self,
        *,
        cached_states: Mapping[str, Any],
        input_batch: Mapping[str, Any],
        is_prefill: bool = False,
    ) -> tuple[Mapping[str, Any], Tensor]:
        """Embeds the next tokens; returns the state for the next step, and the embeddings.

        Args:
          cached_states: from `init_states` or the previous step.
          input_batch: as for `forward`, for the tokens of this step, with their `positions`.
          is_prefill: whether these are the first tokens.
        """
        del is_prefill
        return cached_states, self.forward(input_batch)


class TransformerTextEmbeddings(BaseEmbedding):
    """Sum of the embeddings of token ids, and optionally of types and positions."""

    @config_class
    class Config(BaseEmbedding.Config):
        """Configures a TransformerTextEmbeddings.

        Attributes:
          type_emb: embeds token types, such as "question" and "answer".
          pos_emb: embeds positions; None if attention encodes them.
          norm: norm of the sum.
          dropout: dropout of the sum, after the norm.
          soft_cap_logits: bound c of the logits c * tanh(logits / c) of `attend`; None for none.
        """

        vocab_size: Required[int] = REQUIRED
        token_emb: InstantiableConfig = Embedding.default_config()
        type_emb: InstantiableConfig | None = None
        pos_emb: InstantiableConfig | None = None
        norm: InstantiableConfig | None = None
        dropout: InstantiableConfig = Dropout.default_config()
        soft_cap_logits: float | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("token_emb", cfg.token_emb.set(dim=cfg.dim, num_embeddings=cfg.vocab_size))
        if cfg.type_emb is not None:
            self._add_child("type_emb", cfg.type_emb.set(dim=cfg.dim))
        if cfg.pos_emb is not None:
            self._add_child("pos_emb", cfg.pos_emb.set(dim=cfg.dim))
        if cfg.norm is not None:
            self._add_child("norm", maybe_set_config(cfg.norm, input_dim=cfg.dim))
        self._add_child("dropout", cfg.dropout)

    def forward(self, input_batch: Mapping[str, Any]) -> Tensor:
        batch: dict[str, Any] = dict(input_batch)
        ids = batch["inputs"]
        x = self.token_emb(ids)
        if "type_emb" in self.children:
            types = batch.get("token_type_ids")
            x = x + self.type_emb(jnp.zeros_like(ids) if types is None else types)
        if "pos_emb" in self.children:
            positions = batch.get("positions")
            x = x + self.pos_emb(jnp.arange(ids.shape[1])[None] if positions is None else positions)
        if "norm" in self.children:
            x = self.norm(x)
        return self.dropout(x)

    def attend(self, x: Tensor) -> Tensor:
        logits = self.token_emb.attend(x)
        cap = self.config.soft_cap_logits
        return logits if not cap else cap_logits(logits, cap)
