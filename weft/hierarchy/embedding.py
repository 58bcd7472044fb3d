"""Embeddings of discrete values: tokens, positions in space and time."""

import enum
import math
from typing import Any

import jax.numpy as jnp

from weft.config import REQUIRED, InstantiableConfig, Required, config_class
from weft.errors import LayerConfigError
from weft.functional import attend, lookup
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.module import Module
from weft.hierarchy.param_init import PARAM_REGEXP_WEIGHT, DefaultInitializer, WeightInitializer
from weft.hierarchy.sharding import maybe_shard
from weft.typing import MeshAxes, PartitionSpec, Tensor


class Embedding(BaseLayer):
    """Table of vectors. Parameter: `weight` of shape (num_embeddings, dim)."""

    class Scale(enum.Enum):
        """Scale of embedding vectors.

        UNIT multiplies by the square root of the dimension, for a variance of about 1 per
        component; CONSTANT by `scale_constant`.
        """

        UNIT = "unit"
        CONSTANT = "constant"

    @config_class
    class Config(BaseLayer.Config):
        """Configures an Embedding.

        Attributes:
            scale: None for unscaled vectors.
            scale_constant: the factor for Scale.CONSTANT.
            input_partition_spec: the mesh axes of the ids; None leaves it to the compiler.
            output_partition_spec: the mesh axes of the vectors; None leaves it to the compiler.
            embedding_partition_spec: the mesh axes of the table in use; None leaves it to the
                compiler.
        """

        num_embeddings: Required[int] = REQUIRED
        dim: Required[int] = REQUIRED
        scale: "Embedding.Scale | None" = None
        scale_constant: float | None = None
        input_partition_spec: PartitionSpec | MeshAxes | None = None
        output_partition_spec: PartitionSpec | MeshAxes | None = None
        embedding_partition_spec: PartitionSpec | MeshAxes | None = None

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config with variance 1 / dim, sharded over the mesh axis "model" by dim."""
        init = WeightInitializer.default_config().set(fan="fan_out", distribution="normal")
        return (
            super()
            .default_config()
            .set(
                param_partition_spec=(None, "model"),
                param_init=DefaultInitializer.default_config().set(
                    init_by_param_name={PARAM_REGEXP_WEIGHT: init}
                ),
            )
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if (cfg.scale is Embedding.Scale.CONSTANT) != (cfg.scale_constant is not None):
            raise LayerConfigError(
                f"{self.path()}: scale={cfg.scale} and scale_constant={cfg.scale_constant} do not "
                "match; set both scale=Embedding.Scale.CONSTANT and scale_constant, or no "
                "scale_constant."
            )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        return {
            "weight": ParameterSpec(
                shape=(cfg.num_embeddings, cfg.dim), mesh_axes=cfg.param_partition_spec
            )
        }

    def forward(self, x: Tensor) -> Tensor:
        """Returns vectors, `Float[Array, "*batch dim"]`.

        Args:
            x: `Int[Array, "*batch"]`, in `[0, num_embeddings)`; others give NaN.
        """
        cfg = self.config
        y = lookup(self.embeddings(), maybe_shard(x, cfg.input_partition_spec))
        if cfg.scale is Embedding.Scale.UNIT:
            y = y * math.sqrt(cfg.dim)
        elif cfg.scale is Embedding.Scale.CONSTANT:
            y = y * cfg.scale_constant
        self._add_tensor_stats("outputs", y)
        return maybe_shard(y, cfg.output_partition_spec)

    def embeddings(self) -> Tensor:
        """Returns the table, `Float[Array, "num_embeddings dim"]`."""
        return maybe_shard(self.parameters["weight"], self.config.embedding_partition_spec)

    def attend(self, x: Tensor) -> Tensor:
        """Returns the inner product with every vector of the table: logits of a tied output layer.

        Maps `Float[Array, "*batch dim"]` to `Float[Array, "*batch num_embeddings"]`.
        """
        return attend(self.embeddings(), x)


class SeparableSpaceTimePositionalEmbedding(BaseLayer):
    """Embedding of positions by the sum of a vector for time and a vector for space.

    Position `p` has the time `p // num_spatial_embeddings` and the place
    `p % num_spatial_embeddings`.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a SeparableSpaceTimePositionalEmbedding."""

        dim: Required[int] = REQUIRED
        spatial_embeddings: InstantiableConfig = Embedding.default_config()
        temporal_embeddings: InstantiableConfig = Embedding.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("spatial_embeddings", cfg.spatial_embeddings.clone(dim=cfg.dim))
        self._add_child("temporal_embeddings", cfg.temporal_embeddings.clone(dim=cfg.dim))

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
        places = self.num_spatial_embeddings
        return self.temporal_embeddings(positions // places) + self.spatial_embeddings(
            positions % places
        )
