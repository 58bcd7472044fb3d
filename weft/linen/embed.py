"""Embeddings: a vector for each id."""

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
    """A table of vectors that are learned, one for each id.

    The parameter is `embedding`, shape `(num_embeddings, features)`; a bound module has it as an
    attribute.

    Attributes:
        num_embeddings: the number of ids.
        features: the size of a vector.
        dtype: of the results; by default that of the table, and in `attend` the one to which query
            and table promote.
        param_dtype: of the table.
        embedding_init: makes the table.
        promote_dtype: gives table and query the dtype of the results.

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
        """Makes the table."""
        functional.check_sizes(
            type(self).__name__, num_embeddings=self.num_embeddings, features=self.features
        )
        shape = (self.num_embeddings, self.features)
        self.embedding: Any = self.param("embedding", self.embedding_init, shape, self.param_dtype)

    def __call__(self, inputs: Int[Array, "*shape"]) -> Float[Array, "*shape features"]:
        """The vectors of ids.

        An id that is not in the table gives NaN: it shows, where a vector of another id would not.

        Args:
            inputs: the ids; negative ones count from the end.

        Raises:
            ArgumentValueError: if the ids are not integers, or too large for those of JAX.
        """
        inputs = functional.as_ids(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ArgumentValueError(
                f"Embed {path_of(self)} was asked for ids of dtype {inputs.dtype}; expected "
                "integers: convert them with ids.astype(int)."
            )
        (table,) = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        return functional.lookup(table, inputs)

    def attend(self, query: Float[Array, "*batch features"]) -> Float[Array, "*batch ids"]:
        """The inner product of each query with every vector: logits, if outputs are tied to inputs.

        Args:
            query: what is compared with the vectors.

        Raises:
            ArgumentShapeError: if a query has another size than a vector.
        """
        if jnp.shape(query)[-1:] != (self.features,):
            raise ArgumentShapeError(
                f"Embed {path_of(self)} has vectors of size {self.features}; expected queries of "
                f"shape (..., {self.features}), but theirs is {jnp.shape(query)}."
            )
        query, table = self.promote_dtype(query, self.embedding, dtype=self.dtype)
        return functional.attend(table, query)
