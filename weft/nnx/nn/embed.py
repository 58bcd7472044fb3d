"""Embeddings: a vector for each id."""

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
    """A table of vectors that are learned, one for each id.

    The parameter is `embedding`, shape `(num_embeddings, features)`.

    Args:
        num_embeddings: the number of ids.
        features: the size of a vector.
        dtype: of the results; by default that of the table.
        param_dtype: of the table.
        embedding_init: makes the table.
        promote_dtype: gives table and query the dtype of the results.
        rngs: its stream `params` gives the table's key.
        embedding_metadata: of the table's variable.

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
        """The vectors of ids.

        An id that is not in the table gives NaN: it shows, where a vector of another id would not.

        Args:
            inputs: the ids; negative ones count from the end.
            out_sharding: how the result is laid out, as in `jax.Array.at[].get`.

        Raises:
            ArgumentValueError: if the ids are not integers, or too large for those of JAX.
        """
        inputs = functional.as_ids(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ArgumentValueError(
                f"Embed with num_embeddings={self.num_embeddings} was asked for ids of dtype "
                f"{inputs.dtype}; expected integers: convert them with ids.astype(int)."
            )
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        return functional.lookup(table, inputs, out_sharding=out_sharding)

    def attend(
        self, query: Float[Array, "*batch features"], out_sharding: Any = None
    ) -> Float[Array, "*batch ids"]:
        """The inner product of each query with every vector: logits, if outputs are tied to inputs.

        Args:
            query: what is compared with the vectors.
            out_sharding: how the result is laid out, as in `jax.lax.dot_general`.

        Raises:
            ArgumentShapeError: if a query has another size than a vector.
        """
        query, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        if query.shape[-1:] != table.shape[-1:]:
            raise ArgumentShapeError(
                f"Embed with features={self.features} was given queries of shape {query.shape}; "
                f"expected (..., {table.shape[-1]})."
            )
        return functional.attend(table, query, out_sharding=out_sharding)
