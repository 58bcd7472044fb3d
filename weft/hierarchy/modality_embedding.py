"""Embeddings of one modality among several that share a sequence of ids.

Each modality has a range of ids of its own: `[vocab_start, vocab_end)` for what it can say, and
within the sequence `[placeholder_start, placeholder_end)` for positions that its encoder fills.
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
    """Which ids belong to a modality.

    Attributes:
        modality_name: its name.
        placeholder_start: the first id that stands for something to be filled in.
        placeholder_end: the id after the last of them.
        vocab_start: the first id of its vocabulary.
        vocab_end: the id after the last of them.
        generate_logits: whether a model generates its ids.

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
        """The number of ids in the vocabulary."""
        return self.vocab_end - self.vocab_start


class ModalityEmbedding(BaseEmbedding):
    """Embeds the ids of one modality, and gives zeros for all others.

    Parameter: `weight` of shape (vocab_size, dim).
    """

    @config_class
    class Config(BaseEmbedding.Config):
        """Configures a ModalityEmbedding.

        Attributes:
            modality_vocab_info: which ids belong to the modality.
            in_partition_spec: the mesh axes of the ids; None leaves it to the compiler.
            out_partition_spec: the mesh axes of the embeddings, likewise.
        """

        modality_vocab_info: Required[ModalityVocabInfo] = REQUIRED
        in_partition_spec: PartitionSpec | MeshAxes | None = None
        out_partition_spec: PartitionSpec | MeshAxes | None = None

    @classmethod
    def default_config(cls) -> Any:
        """A config whose table is drawn and laid out as that of an `Embedding`."""
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
        """Embeds.

        Args:
            input_batch: a dict with `inputs`, `Int[Array, "batch time"]`, ids of any modality.

        Returns:
            `Float[Array, "batch time dim"]`, zero where the id is of another modality.
        """
        inputs: Any = input_batch["inputs"]
        zeros = jnp.zeros((*inputs.shape, self.config.dim), self.parameters["weight"].dtype)
        return self.lookup_modality_embeddings(inputs, zeros)

    def lookup_modality_embeddings(self, input_ids: Tensor, accum: Tensor) -> Tensor:
        """Adds the embeddings of the modality's ids to those of others.

        Args:
            input_ids: `Int[Array, "batch time"]`, ids of any modality.
            accum: `Float[Array, "batch time dim"]`.

        Returns:
            `accum`, with this modality's embeddings added where the ids are its own.
        """
        cfg = self.config
        info = cfg.modality_vocab_info
        ids = maybe_shard(input_ids, cfg.in_partition_spec)
        mine = (ids >= info.vocab_start) & (ids < info.vocab_end)
        x = lookup(self.parameters["weight"], jnp.where(mine, ids - info.vocab_start, 0))
        added = accum + jnp.where(mine[..., None], x, 0).astype(accum.dtype)
        return maybe_shard(added, cfg.out_partition_spec)

    def attend(self, x: Tensor) -> Tensor:
        """Returns the logits of the modality's vocabulary.

        Args:
            x: `Float[Array, "batch time dim"]`.

        Returns:
            `Float[Array, "batch time vocab_size"]`.
        """
        return attend(self.parameters["weight"], x)
