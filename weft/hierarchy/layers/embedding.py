"""Embeddings of tokens, of positions in space and time, and of modalities.

The modalities that share a sequence of ids own two ranges of ids each: `[vocab_start, vocab_end)`
for the vocabulary, and `[placeholder_start, placeholder_end)` for positions that an encoder fills.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from weft.config import REQUIRED, InstantiableConfig, Required, maybe_set_config
from weft.errors import LayerConfigError
from weft.functional import (
    Int8Weight,
    attend,
    cap_logits,
    int8_lookup,
    int8_product,
    lookup,
    sinusoidal_positions,
)
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.layers.linear import Dropout
from weft.hierarchy.module import Module
from weft.hierarchy.param_init import DefaultInitializer, normal_weights
from weft.hierarchy.parameter_spec import maybe_shard, shard_weight
from weft.typing import DType, MeshAxes, NestedTensor, PartitionSpec, Tensor


class LinearHead(NamedTuple):
    """Output layer whose logits are `x @ weight.T`, bounded by `cap_logits` if there is a cap.

    From these, `linear_cross_entropy` computes a loss without all logits in memory.
    """

    weight: Tensor
    logit_cap: float | None = None


class Embedding(BaseLayer):
    """Table of vectors. Parameter: `weight` of shape (num_embeddings, dim)."""

    class Scale(enum.Enum):
        """Scale of embedding vectors.

        UNIT multiplies by the square root of the dimension, for a variance of about 1 per
        component; CONSTANT by `scale_constant`.
        """

        UNIT = "unit"
        CONSTANT = "constant"

    class Config(BaseLayer.Config):
        """Configures an Embedding; specs that are None leave layouts to the compiler."""

        num_embeddings: Required[int] = REQUIRED
        dim: Required[int] = REQUIRED
        scale: "Embedding.Scale | None" = None
        """None for unscaled vectors."""
        scale_constant: float | None = None
        param_init: DefaultInitializer.Config | None = normal_weights("fan_out")
        param_partition_spec: Any = (None, "model")
        input_partition_spec: PartitionSpec | MeshAxes | None = None
        output_partition_spec: PartitionSpec | MeshAxes | None = None
        embedding_partition_spec: PartitionSpec | MeshAxes | None = None
        """The mesh axes of the table in use."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if (cfg.scale is Embedding.Scale.CONSTANT) != (
            cfg.scale_constant is not None
        ):
            raise LayerConfigError(
                f"{self.path()}: scale={cfg.scale} and scale_constant={cfg.scale_constant} do not "
                "match; set both scale=Embedding.Scale.CONSTANT and scale_constant, or no "
                "scale_constant."
            )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (cfg.num_embeddings, cfg.dim)
        return {
            "weight": ParameterSpec(shape, mesh_axes=cfg.param_partition_spec)
        }

    def forward(self, x: Tensor) -> Tensor:
        """Returns vectors, `Float[Array, "*batch dim"]`, for `x`, `Int[Array, "*batch"]`.

        Ids outside of `[0, num_embeddings)` give NaN.
        """
        cfg = self.config
        ids = maybe_shard(x, cfg.input_partition_spec)
        weight: Any = self.parameters.get("weight")
        if isinstance(weight, Int8Weight):
            y = int8_lookup(weight, ids)
        else:
            y = lookup(self.embeddings(), ids)
        if cfg.scale is Embedding.Scale.UNIT:
            y = y * math.sqrt(cfg.dim)
        elif cfg.scale is Embedding.Scale.CONSTANT:
            y = y * cfg.scale_constant
        return maybe_shard(
            self._add_tensor_stats("outputs", y), cfg.output_partition_spec
        )

    def embeddings(self) -> Tensor:
        """Returns the table, `Float[Array, "num_embeddings dim"]`."""
        return shard_weight(
            self.parameters["weight"], self.config.embedding_partition_spec
        )

    def attend(self, x: Tensor) -> Tensor:
        """Returns the inner product with every vector of the table: logits of a tied output layer.

        Maps `Float[Array, "*batch dim"]` to `Float[Array, "*batch num_embeddings"]`.
        """
        weight: Any = self.parameters.get("weight")
        if isinstance(weight, Int8Weight):
            return int8_product(x, weight)
        return attend(self.embeddings(), x)


class SeparableSpaceTimePositionalEmbedding(BaseLayer):
    """Embedding of positions by the sum of a vector for time and a vector for space.

    Position `p` has the time `p // n` and the place `p % n`, with `n = num_spatial_embeddings`.
    """

    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED
        spatial_embeddings: InstantiableConfig = Embedding.default_config()
        temporal_embeddings: InstantiableConfig = Embedding.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child(
            "spatial_embeddings", cfg.spatial_embeddings.clone(dim=cfg.dim)
        )
        self._add_child(
            "temporal_embeddings", cfg.temporal_embeddings.clone(dim=cfg.dim)
        )

    @property
    def num_spatial_embeddings(self) -> int:
        """Number of places."""
        return self.spatial_embeddings.config.num_embeddings

    @property
    def num_temporal_embeddings(self) -> int:
        """Number of times."""
        return self.temporal_embeddings.config.num_embeddings

    @property
    def max_seq_len(self) -> int:
        """Number of positions."""
        return self.num_spatial_embeddings * self.num_temporal_embeddings

    def embeddings(self) -> Tensor:
        """Returns the embeddings of all positions, `Float[Array, "max_seq_len dim"]`."""
        return self.forward(jnp.arange(self.max_seq_len))

    def forward(self, positions: Tensor) -> Tensor:
        """Returns vectors, `Float[Array, "*batch dim"]`, of positions in `[0, max_seq_len)`."""
        time, place = jnp.divmod(positions, self.num_spatial_embeddings)
        return self.temporal_embeddings(time) + self.spatial_embeddings(place)


class SinusoidalPositionalEmbedding(BaseLayer):
    """Sines and cosines of positions at geometric timescales (Vaswani et al., 2017)."""

    class Config(BaseLayer.Config):
        """Configures a SinusoidalPositionalEmbedding; timescales are periods divided by 2π."""

        dim: Required[int] = REQUIRED
        min_timescale: float = 1
        max_timescale: float = 10000

    def forward(self, positions: Tensor) -> Tensor:
        """Embeds positions of any shape, as `functional.sinusoidal_positions` does."""
        cfg = self.config
        return sinusoidal_positions(
            positions,
            dim=cfg.dim,
            min_timescale=cfg.min_timescale,
            max_timescale=cfg.max_timescale,
        )


class LearnedPositionalEmbedding(BaseLayer):
    """Table with an embedding for each position."""

    class Config(BaseLayer.Config):
        """Configures a LearnedPositionalEmbedding; `shape` may have several axes of positions."""

        dim: Required[int] = REQUIRED
        shape: Required[Sequence[int]] = REQUIRED
        param_partition_spec: Any = (None, None, "model")

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (1, *cfg.shape, cfg.dim)
        mesh_axes = cfg.param_partition_spec
        if mesh_axes is not None:
            mesh_axes = (*[None] * (len(shape) - len(mesh_axes)), *mesh_axes)
        return {"weight": ParameterSpec(shape, mesh_axes=mesh_axes)}

    def embeddings(self) -> Tensor:
        """Returns the whole table, `Float[Array, "*shape dim"]`."""
        return jnp.squeeze(self.parameters["weight"], axis=0)

    def forward(self, positions: Tensor) -> Tensor:
        """Looks up positions, `Int[Array, "*batch"]`, along the first axis of the table.

        Returns `Float[Array, "*batch dim"]`, with further axes of the table before the last.
        """
        return lookup(self.embeddings(), positions)


class BaseEmbedding(BaseLayer):
    """Base of embeddings of token ids. A subclass defines `forward` and `attend`.

    An embedding that depends on more than a token and its position also defines `init_states` and
    `extend_step`, for decoding.
    """

    class Config(BaseLayer.Config):
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

    def linear_head(self) -> LinearHead | None:
        """Returns the parameters of `attend`; None, the default, if it does more than they say."""
        return None

    def init_states(self, *, batch_size: int, dtype: DType) -> NestedTensor:
        """Returns the initial state of decoding; empty by default."""
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
        """
        return cached_states, self.forward(input_batch)


class TransformerTextEmbeddings(BaseEmbedding):
    """Sum of the embeddings of token ids, and optionally of types and positions."""

    class Config(BaseEmbedding.Config):
        """Configures a TransformerTextEmbeddings."""

        vocab_size: Required[int] = REQUIRED
        token_emb: InstantiableConfig = Embedding.default_config()
        type_emb: InstantiableConfig | None = None
        """Embeds token types, such as "question" and "answer"."""
        pos_emb: InstantiableConfig | None = None
        """Embeds positions; None if attention encodes them."""
        norm: InstantiableConfig | None = None
        dropout: InstantiableConfig = Dropout.default_config()
        """Dropout of the sum, after the norm."""
        soft_cap_logits: float | None = None
        """Bound c of the logits c * tanh(logits / c) of `attend`; None for none."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child(
            "token_emb",
            cfg.token_emb.set(dim=cfg.dim, num_embeddings=cfg.vocab_size),
        )
        self._maybe_add_child("type_emb", cfg.type_emb, dim=cfg.dim)
        self._maybe_add_child("pos_emb", cfg.pos_emb, dim=cfg.dim)
        if cfg.norm is not None:
            self._add_child(
                "norm", maybe_set_config(cfg.norm, input_dim=cfg.dim)
            )
        self._add_child("dropout", cfg.dropout)

    def forward(self, input_batch: Mapping[str, Any]) -> Tensor:
        ids = input_batch["inputs"]
        x = self.token_emb(ids)
        if "type_emb" in self.children:
            types = input_batch.get("token_type_ids")
            if types is None:
                types = jnp.zeros_like(ids)
            x = x + self.type_emb(types)
        if "pos_emb" in self.children:
            positions = input_batch.get("positions")
            if positions is None:
                positions = jnp.arange(ids.shape[1])[None]
            x = x + self.pos_emb(positions)
        if "norm" in self.children:
            x = self.norm(x)
        return self.dropout(x)

    def attend(self, x: Tensor) -> Tensor:
        logits = self.token_emb.attend(x)
        cap = self.config.soft_cap_logits
        if not cap:
            return logits
        return cap_logits(logits, cap)

    def linear_head(self) -> LinearHead | None:
        if type(self).attend is not TransformerTextEmbeddings.attend:
            return None
        token_attend = getattr(type(self.token_emb), "attend", None)
        if token_attend is not Embedding.attend:
            return None
        if self.token_emb.compute_dtype() != self.compute_dtype():
            return None
        return LinearHead(
            self.token_emb.embeddings(), self.config.soft_cap_logits or None
        )


@dataclasses.dataclass(frozen=True)
class ModalityVocabInfo:
    """Ids that belong to a modality; each range excludes its end.

    Attributes:
        placeholder_start: first id of positions that an encoder fills.
        generate_logits: whether a model generates ids of this modality.

    >>> ModalityVocabInfo("image", 0, 0, 100, 164, generate_logits=True).vocab_size
    64
    """

    modality_name: str
    placeholder_start: int
    placeholder_end: int
    vocab_start: int
    vocab_end: int
    generate_logits: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of ids in the vocabulary."""
        return self.vocab_end - self.vocab_start


class ModalityEmbedding(BaseEmbedding):
    """Embeds the ids of one modality and returns zeros for all others.

    Parameter: `weight` of shape (vocab_size, dim).
    """

    class Config(BaseEmbedding.Config):
        """Configures a ModalityEmbedding; specs that are None leave layouts to the compiler."""

        modality_vocab_info: Required[ModalityVocabInfo] = REQUIRED
        param_init: DefaultInitializer.Config | None = normal_weights("fan_out")
        param_partition_spec: Any = (None, "model")
        in_partition_spec: PartitionSpec | MeshAxes | None = None
        out_partition_spec: PartitionSpec | MeshAxes | None = None

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (cfg.modality_vocab_info.vocab_size, cfg.dim)
        return {
            "weight": ParameterSpec(
                shape=shape, mesh_axes=cfg.param_partition_spec
            )
        }

    def forward(self, input_batch: NestedTensor) -> Tensor:
        """Embeds `input_batch["inputs"]`, ids of any modality, `Int[Array, "batch time"]`.

        Returns `Float[Array, "batch time dim"]`, zero for ids of other modalities.
        """
        inputs: Any = input_batch["inputs"]
        zeros = jnp.zeros(
            (*inputs.shape, self.config.dim), self.parameters["weight"].dtype
        )
        return self.lookup_modality_embeddings(inputs, zeros)

    def lookup_modality_embeddings(
        self, input_ids: Tensor, accum: Tensor
    ) -> Tensor:
        """Adds the embeddings of this modality's ids to `accum`, `Float[Array, "batch time dim"]`.

        `input_ids`, `Int[Array, "batch time"]`, may have ids of any modality.
        """
        cfg = self.config
        info = cfg.modality_vocab_info
        ids = maybe_shard(input_ids, cfg.in_partition_spec)
        mine = (ids >= info.vocab_start) & (ids < info.vocab_end)
        x = lookup(
            self.parameters["weight"],
            jnp.where(mine, ids - info.vocab_start, 0),
        )
        added = accum + jnp.where(mine[..., None], x, 0).astype(accum.dtype)
        return maybe_shard(added, cfg.out_partition_spec)

    def attend(self, x: Tensor) -> Tensor:
        """Returns logits of the modality's ids, `Float[Array, "batch time vocab_size"]`."""
        return attend(self.parameters["weight"], x)
