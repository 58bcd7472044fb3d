"""From token ids to the first vectors of a model, and back to logits."""

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
    """Embeds a batch of token ids. A subclass defines `forward` and `attend`.

    In decoding it sees the tokens of one step after the other. One that needs more than a token and
    its position keeps that as a state, and defines `init_states` and `extend_step` as well.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a BaseEmbedding.

        Attributes:
          dim: the size of an embedding.
        """

        dim: Required[int] = REQUIRED

    def forward(self, input_batch: Mapping[str, Any]) -> Tensor:
        """Embeds.

        Args:
          input_batch: a dict with `inputs`, the token ids, `Int[Array, "batch time"]`, and
            optionally `positions`, by default counted from 0, and `token_type_ids`, both likewise.

        Returns:
          `Float[Array, "batch time dim"]`.
        """
        raise NotImplementedError(type(self))

    def attend(self, x: Tensor) -> Tensor:
        """The inner products of vectors with the embeddings of all tokens.

        Args:
          x: `Float[Array, "batch time dim"]`.

        Returns:
          `Float[Array, "batch time vocab"]`.
        """
        raise NotImplementedError(type(self))

    def init_states(self, *, batch_size: int, dtype: DType) -> NestedTensor:
        """The state before the first step of decoding; none by default.

        Args:
          batch_size: the number of sequences.
          dtype: of what is kept.
        """
        del batch_size, dtype
        return {}

    def extend_step(
        self,
        *,
        cached_states: Mapping[str, Any],
        input_batch: Mapping[str, Any],
        is_prefill: bool = False,
    ) -> tuple[Mapping[str, Any], Tensor]:
        """Embeds the next tokens.

        Args:
          cached_states: from `init_states` or the step before.
          input_batch: as for `forward`, of the step's tokens only, with their `positions`.
          is_prefill: whether these are the first tokens.

        Returns:
          The state for the next step, and the embeddings.
        """
        del is_prefill
        return cached_states, self.forward(input_batch)


class TransformerTextEmbeddings(BaseEmbedding):
    """The sum of what is known of each token: its id, and optionally its type and its position."""

    @config_class
    class Config(BaseEmbedding.Config):
        """Configures a TransformerTextEmbeddings.

        Attributes:
          vocab_size: the number of token ids.
          token_emb: embeds the ids.
          type_emb: embeds the types, such as "question" and "answer".
          pos_emb: embeds the positions; None where attention knows of them.
          norm: of the sum.
          dropout: of the sum, after the norm.
          soft_cap_logits: the logits that `attend` gives are squashed to ± this.
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
