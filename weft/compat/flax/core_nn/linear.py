"""Linear maps and embeddings as functions of a scope."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from weft import errors, functional, struct
from weft.core.scope import Scope
from weft.functional.arrays import as_tuple, promote_dtype
from weft.functional.initializers import default_embed_init

Initializer = Callable[..., Any]
default_kernel_init = jax.nn.initializers.lecun_normal()


def dense(
    scope: Scope,
    inputs: Num[Array, "*batch input"],
    features: int,
    bias: bool = True,
    dtype: jax.typing.DTypeLike = jnp.float32,
    precision: jax.lax.PrecisionLike = None,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
) -> Num[Array, "*batch features"]:
    """Applies a linear map of the last axis.

    Args:
        scope: has `kernel`, shape `(input, features)`, and `bias`, shape `(features,)`.

    >>> from weft.core import init
    >>> y, variables = init(dense)(jax.random.key(0), jnp.ones((2, 3)), 4)
    >>> y.shape, variables["params"]["kernel"].shape
    ((2, 4), (3, 4))
    """
    kernel = scope.param("kernel", kernel_init, (inputs.shape[-1], features))
    bias_array = scope.param("bias", bias_init, (features,)) if bias else None
    arrays = promote_dtype(
        inputs, kernel, bias_array, dtype=dtype, inexact=False
    )
    return functional.dense(*arrays, precision=precision)


def dense_general(
    scope: Scope,
    inputs: Num[Array, "*input"],
    features: int | Sequence[int],
    axis: int | Sequence[int] = -1,
    batch_dims: int | Sequence[int] = (),
    bias: bool = True,
    dtype: jax.typing.DTypeLike = jnp.float32,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
    precision: jax.lax.PrecisionLike = None,
) -> Num[Array, "*output"]:
    """Applies a linear map of any axes to any number of axes; see `dense` for the other arguments.

    Args:
        scope: has `kernel`, shape `(*batch_dims, *axis, *features)`, and `bias`, shape
            `(*batch_dims, *features)`.
        features: sizes of the new axes, which come last.
        axis: axes to contract.
        batch_dims: leading axes, also of the result, whose positions have separate parameters.
        kernel_init: initializer of the kernel as one matrix, of the products of its sizes.
        bias_init: initializer of the bias as one vector.

    Raises ArgumentShapeError if `batch_dims` are not the first axes.

    >>> from weft.core import init
    >>> x = jnp.ones((5, 2, 3))
    >>> y, variables = init(dense_general)(jax.random.key(0), x, (4, 6), axis=(1, 2))
    >>> y.shape, variables["params"]["kernel"].shape
    ((5, 4, 6), (2, 3, 4, 6))
    """
    features, axis = as_tuple(features), as_tuple(axis)
    batch_dims = tuple(dim % inputs.ndim for dim in as_tuple(batch_dims))
    if set(batch_dims) != set(range(len(batch_dims))):
        raise errors.ArgumentShapeError(
            f"batch_dims is {batch_dims}; expected the first axes of the input, "
            f"{tuple(range(len(batch_dims)))}: move the others with jnp.moveaxis."
        )
    batch_shape = tuple(inputs.shape[dim] for dim in batch_dims)
    contracted = tuple(inputs.shape[a] for a in axis)

    def init_param(
        key: Array,
        init: Initializer,
        matrix_shape: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> Array:
        # A matrix with the fans of the map, repeated for every position of the batch axes.
        param = jnp.reshape(init(key, matrix_shape), shape)
        return jnp.broadcast_to(param, (*batch_shape, *shape))

    num_outputs = math.prod(features)
    matrix_shape = (math.prod(contracted), num_outputs)
    kernel_shape = (*contracted, *features)
    kernel = scope.param(
        "kernel", init_param, kernel_init, matrix_shape, kernel_shape
    )
    bias_array = None
    if bias:
        bias_array = scope.param(
            "bias", init_param, bias_init, (num_outputs,), features
        )
    arrays = promote_dtype(
        inputs, kernel, bias_array, dtype=dtype, inexact=False
    )
    return functional.dense_general(
        *arrays, axis=axis, batch_axes=batch_dims, precision=precision
    )


class Embedding(struct.PyTreeNode):
    """Table of vectors.

    Attributes:
        table: one row for each id, shape `(num_embeddings, features)`.
    """

    table: Any

    def lookup(
        self, indices: Int[Array, "*shape"]
    ) -> Float[Array, "*shape features"]:
        """Returns the rows of integer ids, NaN for ids outside of the table."""
        return functional.lookup(
            self.table, functional.as_ids(indices, "an Embedding")
        )

    def attend(
        self, query: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch ids"]:
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

    >>> from weft.core import init
    >>> table, _ = init(embedding)(jax.random.key(0), 10, 4)
    >>> table.lookup(jnp.array([3, 5])).shape
    (2, 4)
    """
    return Embedding(scope.param("table", init_fn, (num_embeddings, features)))
