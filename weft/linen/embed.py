"""Embeddings: a learned vector for each id."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft import functional
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.initializers import default_embed_init
from weft.linen.dtypes import promote_dtype
from weft.linen.linear import Initializer, PromoteDtype, path_of
from weft.linen.module import Module
from weft.typing import DType

__all__ = ["Embed"]


class Embed(Module):
    """Table of learned vectors, one for each id.

    The parameter `embedding`, shape `(num_embeddings, features)`, is an attribute of bound modules.

    Attributes:
        dtype: output dtype; by default that of the table, in `attend` promoted from query and
            table.
        promote_dtype: converts table and query to the output dtype.

    Example:
        >>> import jax
        >>> layer = Embed(10, 4)
        >>> ids = jnp.array([3, 5])
        >>> vectors, variables = layer.init_with_output(jax.random.key(0), ids)
        >>> vectors.shape
        (2, 4)
        >>> layer.apply(variables, vectors, method="attend").shape
        (2, 10)
    """

    num_embeddings: int
    features: int
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    embedding_init: Initializer = default_embed_init
    promote_dtype: PromoteDtype = promote_dtype

    def setup(self) -> None:
        functional.check_sizes(
            type(self).__name__, num_embeddings=self.num_embeddings, features=self.features
        )
        shape = (self.num_embeddings, self.features)
        self.embedding: Any = self.param("embedding", self.embedding_init, shape, self.param_dtype)

    def __call__(self, inputs: Int[Array, "*shape"]) -> Float[Array, "*shape features"]:
        """Returns the vectors of ids, NaN for ids outside of the table.

        Args:
            inputs: the ids; negative ones count from the end.

        Raises:
            ArgumentValueError: if the ids are not integers, or too large for JAX.
        """
        inputs = functional.as_ids(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ArgumentValueError(
                f"Embed {path_of(self)} was given ids of dtype {inputs.dtype}; expected "
                "integers: convert them with ids.astype(int)."
            )
        (table,) = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        return functional.lookup(table, inputs)

    def attend(self, query: Float[Array, "*batch features"]) -> Float[Array, "*batch ids"]:
        """Returns the inner products of each query with every vector: logits of tied embeddings.

        Raises:
            ArgumentShapeError: if the query's size is not `features`.
        """
        if jnp.shape(query)[-1:] != (self.features,):
            raise ArgumentShapeError(
                f"Embed {path_of(self)} has vectors of size {self.features}; expected queries of "
                f"shape (..., {self.features}), but theirs is {jnp.shape(query)}."
            )
        query, table = self.promote_dtype(query, self.embedding, dtype=self.dtype)
        return functional.attend(table, query)
