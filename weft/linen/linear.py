"""Linear maps of the last axis, of any axes, or by einsum, and embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from weft import errors, functional
from weft.functional.arrays import as_tuple, promote_dtype
from weft.functional.initializers import (
    default_embed_init,
    lecun_normal,
    zeros_init,
)
from weft.linen.apply import merge_param
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.typing import DType, PyTree

DotGeneral = Callable[..., Array]
Initializer = Callable[..., Any]
default_kernel_init = lecun_normal()


class PromoteDtype(Protocol):
    """Function that converts arrays to a common dtype, as `weft.functional.promote_dtype`."""

    def __call__(
        self,
        *args: Array | None,
        dtype: DType | None = None,
        inexact: bool = True,
    ) -> list[Any]: ...


def kernel_and_bias(
    module: Any, kernel_shape: Sequence[int], bias_shape: Sequence[int]
) -> tuple[Array, Array | None]:
    """Returns the parameters `kernel` and `bias` of a layer, or None for an unused bias."""
    kernel = module.param(
        "kernel", module.kernel_init, kernel_shape, module.param_dtype
    )
    if not module.use_bias:
        return kernel, None
    return kernel, module.param(
        "bias", module.bias_init, bias_shape, module.param_dtype
    )


class Dense(Module):
    """Linear map of the last axis.

    The parameters are `kernel`, shape `(input, features)`, and `bias`, shape `(features,)`.

    Attributes:
        dtype: dtype of the computation; by default promoted from input and parameters.
        promote_dtype: converts input and parameters to the dtype of the computation.
        dot_general: replaces `jax.lax.dot_general`, see `weft.functional.default_dot_general`.
        dot_general_cls: factory that takes precedence over `dot_general`; called with the layer.

    >>> y, variables = Dense(4).init_with_output(jax.random.key(0), jnp.ones((2, 3)))
    >>> y.shape, jax.tree.map(jnp.shape, variables)
    ((2, 4), {'params': {'bias': (4,), 'kernel': (3, 4)}})
    """

    features: int
    use_bias: bool = True
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = zeros_init()
    promote_dtype: PromoteDtype = promote_dtype
    dot_general: DotGeneral | None = None
    dot_general_cls: Callable[[], DotGeneral] | None = None

    @compact
    def __call__(
        self, inputs: Num[Array, "*batch input"]
    ) -> Num[Array, "*batch features"]:
        """Applies the map.

        Raises:
            ArgumentShapeError: if the input has no axis.
            ScopeParamShapeError: if the given parameters have another size.
        """
        functional.check_sizes(type(self).__name__, features=self.features)
        shape = _input_shape(self, inputs)
        if not shape:
            raise errors.ArgumentShapeError(
                f"Dense {path_of(self)} maps the last axis of its input, which has none: its shape "
                "is ()."
            )
        kernel, bias = kernel_and_bias(
            self, (shape[-1], self.features), (self.features,)
        )
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        return functional.dense(
            inputs,
            kernel,
            bias,
            precision=self.precision,
            dot_general=_dot_general(self),
        )


class DenseGeneral(Module):
    """Linear map of any axes to any number of axes.

    The parameters are `kernel`, shape `(*batch_dims, *axis, *features)`, and `bias`, shape
    `(*batch_dims, *features)`, with `axis` and `batch_dims` in increasing order. The initializers
    create them as a matrix `(batch * input, features)` and a vector. For the rest see `Dense`.

    Attributes:
        features: sizes of the new axes, which come last.
        batch_dims: leading axes, also in the result, whose positions have separate parameters.

    >>> layer = DenseGeneral((2, 5), axis=(1, -1))
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((7, 3, 4)))
    >>> y.shape, variables["params"]["kernel"].shape
    ((7, 2, 5), (3, 4, 2, 5))
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    batch_dims: int | Sequence[int] = ()
    use_bias: bool = True
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = zeros_init()
    precision: jax.lax.PrecisionLike = None
    promote_dtype: PromoteDtype = promote_dtype
    dot_general: DotGeneral | None = None
    dot_general_cls: Callable[[], DotGeneral] | None = None

    @compact
    def __call__(self, inputs: Num[Array, "*input"]) -> Num[Array, "*output"]:
        """Applies the map.

        Raises:
            ArgumentShapeError: if `batch_dims` are not the first axes, or the input lacks an axis.
            ScopeParamShapeError: if the given parameters have other sizes.
        """
        functional.check_sizes(type(self).__name__, features=self.features)
        input_shape = _input_shape(self, inputs)
        features = as_tuple(self.features)
        axis, batch_dims = self._axes(input_shape)
        batch_shape = tuple(input_shape[a] for a in batch_dims)
        contracted_shape = tuple(input_shape[a] for a in axis)

        kernel_shape = batch_shape + contracted_shape + features
        # The initializer's scale depends on the fans, which are those of a matrix.
        matrix_shape = (
            math.prod(batch_shape + contracted_shape),
            math.prod(features),
        )
        kernel_init = _reshaped(self.kernel_init, matrix_shape)
        kernel = self.param(
            "kernel", kernel_init, kernel_shape, self.param_dtype
        )
        bias = None
        if self.use_bias:
            bias_shape = batch_shape + features
            bias_init = _reshaped(self.bias_init, (math.prod(bias_shape),))
            bias = self.param("bias", bias_init, bias_shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        return functional.dense_general(
            inputs,
            kernel,
            bias,
            axis=axis,
            batch_axes=batch_dims,
            precision=self.precision,
            dot_general=_dot_general(self),
        )

    def _axes(
        self, input_shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the contracted and the batch axes, from 0 and in order, after checking them."""
        ndim = len(input_shape)
        axis = sorted(a + ndim if a < 0 else a for a in as_tuple(self.axis))
        batch_dims = sorted(as_tuple(self.batch_dims))
        num_batch_dims = len(batch_dims)
        if batch_dims != list(range(num_batch_dims)):
            raise errors.ArgumentShapeError(
                f"DenseGeneral {path_of(self)} has batch_dims={self.batch_dims}; expected the "
                f"first axes, {tuple(range(num_batch_dims))}: move the others with jnp.moveaxis."
            )
        if len(set(axis)) != len(axis) or not set(axis) <= set(
            range(num_batch_dims, ndim)
        ):
            raise errors.ArgumentShapeError(
                f"DenseGeneral {path_of(self)} has axis={self.axis}; expected different axes of "
                f"the input, whose shape is {input_shape}, that are none of "
                f"batch_dims={self.batch_dims}."
            )
        return tuple(axis), tuple(batch_dims)


class Einsum(Module):
    """Einsum of the input and a kernel of shape `shape`.

    The bias has the axes of the kernel that are in the result, in the result's order. See `Dense`
    for the other attributes.

    Attributes:
        einsum_str: subscripts, as `"bti,io->bto"`; set here or in the call.
        preferred_element_type: dtype of the sum, see `jax.numpy.einsum`.

    >>> layer = Einsum((4, 2, 5), "btd,dnh->btnh")
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((7, 3, 4)))
    >>> y.shape, variables["params"]["bias"].shape
    ((7, 3, 2, 5), (2, 5))
    """

    shape: Sequence[int]
    einsum_str: str | None = None
    use_bias: bool = True
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = zeros_init()
    promote_dtype: PromoteDtype = promote_dtype
    preferred_element_type: DType | None = None

    @compact
    def __call__(
        self, inputs: Num[Array, "*input"], einsum_str: str | None = None
    ) -> Num[Array, "*output"]:
        """Applies the einsum.

        Raises:
            ParameterGivenTwiceError: if the subscripts are given twice or not at all.
            ArgumentValueError: if the subscripts do not have two operands and a result.
            ArgumentShapeError: if the subscripts do not match the numbers of axes.
        """
        subscripts = merge_param("einsum_str", self.einsum_str, einsum_str)
        kernel_axes, out_axes, ndim = functional.project_weight_axes(
            subscripts, jnp.ndim(inputs), len(self.shape)
        )
        bias_shape = tuple(self.shape[axis] for axis in kernel_axes)
        kernel, bias = kernel_and_bias(self, self.shape, bias_shape)
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        if bias is not None:
            bias = functional.broadcast_bias(bias, out_axes, ndim)
        return functional.project(
            subscripts,
            inputs,
            kernel,
            bias,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


def _dot_general(layer: Dense | DenseGeneral) -> DotGeneral | None:
    return (
        layer.dot_general
        if layer.dot_general_cls is None
        else layer.dot_general_cls()
    )


def _reshaped(init: Initializer, drawn_shape: tuple[int, ...]) -> Initializer:
    """Wraps an initializer to draw in the shape `drawn_shape`, which defines the fans."""

    def drawn_and_reshaped(
        key: Array, shape: tuple[int, ...], dtype: DType
    ) -> PyTree:
        # Reshapes inside of a box, whose axis names are those of the new shape.
        drawn = init(key, drawn_shape, dtype)
        return jax.tree.map(lambda x: jnp.reshape(x, shape), drawn)

    return drawn_and_reshaped


def _input_shape(
    layer: Dense | DenseGeneral, inputs: object
) -> tuple[int, ...]:
    """Returns the shape of the input of a layer.

    Raises ArgumentShapeError for a dict, such as a whole batch, for None and for text: JAX gives
    them the shape of a number.
    """
    if isinstance(inputs, Mapping | str | None):
        text = repr(inputs)
        if isinstance(inputs, Mapping):
            text = f"a dict with the keys {list(inputs)}"
        raise errors.ArgumentShapeError(
            f"{type(layer).__name__} {path_of(layer)} was given {text}; give it one array, such as "
            "one of the batch's."
        )
    return jnp.shape(inputs)  # pyright: ignore[reportArgumentType]


def path_of(module: Module) -> str:
    """Returns the path of a module, for errors."""
    if module.scope is None:
        return "(not bound to variables)"
    return "/".join(module.path) or "(the outermost module)"


class Embed(Module):
    """Table of learned vectors, one for each id.

    The parameter `embedding`, shape `(num_embeddings, features)`, is an attribute of bound modules.

    Attributes:
        dtype: output dtype; by default that of the table, in `attend` promoted from query and it.
        promote_dtype: converts table and query to the output dtype.

    >>> layer = Embed(10, 4)
    >>> vectors, variables = layer.init_with_output(jax.random.key(0), jnp.array([3, 5]))
    >>> vectors.shape, layer.apply(variables, vectors, method="attend").shape
    ((2, 4), (2, 10))
    """

    num_embeddings: int
    features: int
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    embedding_init: Initializer = default_embed_init
    promote_dtype: PromoteDtype = promote_dtype

    def setup(self) -> None:
        functional.check_sizes(
            type(self).__name__,
            num_embeddings=self.num_embeddings,
            features=self.features,
        )
        shape = (self.num_embeddings, self.features)
        self.embedding: Any = self.param(
            "embedding", self.embedding_init, shape, self.param_dtype
        )

    def __call__(
        self, inputs: Int[Array, "*shape"]
    ) -> Float[Array, "*shape features"]:
        """Returns the vectors of ids, NaN outside of the table; negative ids count from its end.

        Raises ArgumentValueError if the ids are not integers, or too large for JAX.
        """
        inputs = functional.as_ids(inputs, f"Embed {path_of(self)}")
        (table,) = self.promote_dtype(
            self.embedding, dtype=self.dtype, inexact=False
        )
        return functional.lookup(table, inputs)

    def attend(
        self, query: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch ids"]:
        """Returns the inner products of each query with every vector: logits of tied embeddings.

        Raises ArgumentShapeError if the query's size is not `features`.
        """
        if jnp.shape(query)[-1:] != (self.features,):
            raise errors.ArgumentShapeError(
                f"Embed {path_of(self)} has vectors of size {self.features}; expected queries of "
                f"shape (..., {self.features}), but theirs is {jnp.shape(query)}."
            )
        query, table = self.promote_dtype(
            query, self.embedding, dtype=self.dtype
        )
        return functional.attend(table, query)
