"""Sinusoidal and learned positional embeddings."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.functional import lookup, sinusoidal_positions
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.typing import Tensor


def sinusoidal_positional_embeddings(
    positions: Tensor, *, dim: int, min_timescale: float = 1, max_timescale: float = 10000
) -> Tensor:
    """Computes `functional.sinusoidal_positions`, `Float[Array, "*shape dim"]`, first the sines."""
    return sinusoidal_positions(
        positions, dim=dim, min_timescale=min_timescale, max_timescale=max_timescale
    )


class SinusoidalPositionalEmbedding(BaseLayer):
    """Sines and cosines of positions at geometric timescales (Vaswani et al., 2017)."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a SinusoidalPositionalEmbedding; timescales are periods divided by 2π."""

        dim: Required[int] = REQUIRED
        min_timescale: float = 1
        max_timescale: float = 10000

    def forward(self, positions: Tensor) -> Tensor:
        """Embeds positions of any shape, as `sinusoidal_positional_embeddings` does."""
        cfg = self.config
        return sinusoidal_positional_embeddings(
            positions,
            dim=cfg.dim,
            min_timescale=cfg.min_timescale,
            max_timescale=cfg.max_timescale,
        )


class LearnedPositionalEmbedding(BaseLayer):
    """Table with an embedding for each position."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a LearnedPositionalEmbedding; `shape` may have several axes of positions."""

        dim: Required[int] = REQUIRED
        shape: Required[Sequence[int]] = REQUIRED

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config that shards the embedding dimension over the mesh axis "model"."""
        return super().default_config().set(param_partition_spec=(None, None, "model"))

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
