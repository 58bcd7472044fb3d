"""Embedding layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft import functional
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.initializers import default_embed_init
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.parameters import NO_METADATA, Initializer, Metadata, new_param
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["Embed"]


class Embed(Module):
    """Learned table with one vector per id.

    The parameter is `embedding`, shape `(num_embeddings, features)`.

    Args:
        features: size of a vector.
        dtype: dtype of the output; by default that of the table.
        promote_dtype: casts table and query to `dtype`.

    Example:
        >>> from weft import nnx
        >>> layer = Embed(10, 4, rngs=nnx.Rngs(0))
        >>> vectors = layer(jnp.array([3, 5]))
        >>> vectors.shape, layer.attend(vectors).shape
        ((2, 4), (2, 10))
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        embedding_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(
            type(self).__name__, num_embeddings=num_embeddings, features=features
        )
        shape = (num_embeddings, features)
        self.embedding = new_param(embedding_init, rngs, shape, param_dtype, embedding_metadata)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = self.embedding.dtype if dtype is None else dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(
        self, inputs: Int[Array, "*shape"], out_sharding: Any = None
    ) -> Float[Array, "*shape features"]:
        """Returns the vectors of ids; out-of-range ids return NaN, so that errors are visible.

        Args:
            inputs: ids; negative ones count from the end.
            out_sharding: sharding of the output, as in `jax.Array.at[].get`.

        Raises:
            ArgumentValueError: if the ids are not integers, or too large for JAX's integers.
        """
        inputs = functional.as_ids(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ArgumentValueError(
                f"Embed with num_embeddings={self.num_embeddings} was given ids of dtype "
                f"{inputs.dtype}; expected integers: convert them with ids.astype(int)."
            )
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        return functional.lookup(table, inputs, out_sharding=out_sharding)

    def attend(
        self, query: Float[Array, "*batch features"], out_sharding: Any = None
    ) -> Float[Array, "*batch ids"]:
        """Returns the inner products of queries with all vectors: logits with tied embeddings.

        Args:
            out_sharding: sharding of the output, as in `jax.lax.dot_general`.

        Raises:
            ArgumentShapeError: if the last axis of the query is not of size `features`.
        """
        query, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        if query.shape[-1:] != table.shape[-1:]:
            raise ArgumentShapeError(
                f"Embed with features={self.features} was given queries of shape {query.shape}; "
                f"expected (..., {table.shape[-1]})."
            )
        return functional.attend(table, query, out_sharding=out_sharding)
