"""Embeddings as functions of a scope."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft import functional, struct
from weft.core.nn.linear import Initializer
from weft.core.scope import Scope
from weft.errors import ArgumentValueError
from weft.functional.initializers import default_embed_init


class Embedding(struct.PyTreeNode):
    """Table of vectors.

    Attributes:
        table: one row for each id, shape `(num_embeddings, features)`.

    Example:
        >>> table = Embedding(jnp.eye(3))
        >>> table.lookup(jnp.array([2])).tolist()
        [[0.0, 0.0, 1.0]]
        >>> table.attend(jnp.array([4.0, 5.0, 6.0])).tolist()
        [4.0, 5.0, 6.0]
    """

    table: Any

    def lookup(self, indices: Int[Array, "*shape"]) -> Float[Array, "*shape features"]:
        """Returns the rows of integer ids, NaN for ids outside of the table."""
        indices = jnp.asarray(indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ArgumentValueError(
                f"an Embedding was given ids of dtype {indices.dtype}; expected integers: "
                "convert them with ids.astype(int)."
            )
        return functional.lookup(self.table, indices)

    def attend(self, query: Float[Array, "*batch features"]) -> Float[Array, "*batch ids"]:
        """Returns the inner products of each query with every row: logits of tied embeddings."""
        return functional.attend(self.table, query)


def embedding(
    scope: Scope,
    num_embeddings: int,
    features: int,
    init_fn: Initializer = default_embed_init,
) -> Embedding:
    """Returns a learned table of vectors.

    Args:
        scope: has `table`, shape `(num_embeddings, features)`.

    Example:
        >>> import jax
        >>> from weft.core import init
        >>> table, _ = init(embedding)(jax.random.key(0), 10, 4)
        >>> table.lookup(jnp.array([3, 5])).shape
        (2, 4)
    """
    return Embedding(scope.param("table", init_fn, (num_embeddings, features)))
