"""Embeddings of one modality among several that share a sequence of ids.

Each modality owns two ranges of ids: `[vocab_start, vocab_end)` for its vocabulary, and
`[placeholder_start, placeholder_end)` for positions that its encoder fills.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.functional import attend, lookup
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.embedding import Embedding
from weft.hierarchy.sharding import maybe_shard
from weft.hierarchy.text_embedding import BaseEmbedding
from weft.typing import MeshAxes, NestedTensor, PartitionSpec, Tensor


@dataclasses.dataclass(frozen=True)
class ModalityVocabInfo:
    """Ids that belong to a modality; each range excludes its end.

    Attributes:
        placeholder_start: first id of positions that an encoder fills.
        vocab_start: first id of the vocabulary.
        generate_logits: whether a model generates ids of this modality.

    Example:
        >>> ModalityVocabInfo("image", 0, 0, 100, 164, generate_logits=True).vocab_size
        64
    """

    modality_name: str
    placeholder_start: int
    placeholder_end: int
    vocab_start: int
    vocab_end: int
    generate_logits: bool

    @property
    def vocab_size(self) -> int:
        """Number of ids in the vocabulary."""
        return self.vocab_end - self.vocab_start


class ModalityEmbedding(BaseEmbedding):
    """Embeds the ids of one modality and returns zeros for all others.

    Parameter: `weight` of shape (vocab_size, dim).
    """

    @config_class
    class Config(BaseEmbedding.Config):
        """Configures a ModalityEmbedding.

        Attributes:
            in_partition_spec: mesh axes of the ids; None leaves it to the compiler.
            out_partition_spec: mesh axes of the embeddings; None leaves it to the compiler.
        """

        modality_vocab_info: Required[ModalityVocabInfo] = REQUIRED
        in_partition_spec: PartitionSpec | MeshAxes | None = None
        out_partition_spec: PartitionSpec | MeshAxes | None = None

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config with the sharding and initializer of `Embedding`."""
        table = Embedding.default_config()
        return (
            super()
            .default_config()
            .set(
                param_partition_spec=table.param_partition_spec,
                param_init=table.param_init,
            )
        )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (cfg.modality_vocab_info.vocab_size, cfg.dim)
        return {"weight": ParameterSpec(shape=shape, mesh_axes=cfg.param_partition_spec)}

    def forward(self, input_batch: NestedTensor) -> Tensor:
        """Embeds `input_batch["inputs"]`, ids of any modality, `Int[Array, "batch time"]`.

        Returns `Float[Array, "batch time dim"]`, zero for ids of other modalities.
        """
        inputs: Any = input_batch["inputs"]
        zeros = jnp.zeros((*inputs.shape, self.config.dim), self.parameters["weight"].dtype)
        return self.lookup_modality_embeddings(inputs, zeros)

    def lookup_modality_embeddings(self, input_ids: Tensor, accum: Tensor) -> Tensor:
        """Adds the embeddings of this modality's ids to `accum`, `Float[Array, "batch time dim"]`.

        `input_ids`, `Int[Array, "batch time"]`, may have ids of any modality.
        """
        cfg = self.config
        info = cfg.modality_vocab_info
        ids = maybe_shard(input_ids, cfg.in_partition_spec)
        mine = (ids >= info.vocab_start) & (ids < info.vocab_end)
        x = lookup(self.parameters["weight"], jnp.where(mine, ids - info.vocab_start, 0))
        added = accum + jnp.where(mine[..., None], x, 0).astype(accum.dtype)
        return maybe_shard(added, cfg.out_partition_spec)

    def attend(self, x: Tensor) -> Tensor:
        """Returns logits of the modality's ids, `Float[Array, "batch time vocab_size"]`."""
        return attend(self.parameters["weight"], x)
