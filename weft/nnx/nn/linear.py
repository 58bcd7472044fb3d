"""Linear layers (over the last axis, over any axes, by an einsum) and embeddings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from weft import errors, functional
from weft.core.frozen_dict import FrozenDict
from weft.functional import arrays, initializers
from weft.functional.arrays import OutSharding
from weft.nnx.module import Module
from weft.nnx.nn import parameters
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    KernelArguments,
    KernelModule,
    Metadata,
    PromoteDtype,
)
from weft.nnx.rngs import Rngs
from weft.nnx.variables import VariableMetadata
from weft.typing import DType

DotGeneral = Callable[..., Array]


@dataclass(repr=False, eq=False)
class Linear(KernelModule):
    """Linear map of the last axis.

    The parameters are `kernel`, shape `(in_features, out_features)`, and `bias`, shape
    `(out_features,)` or None.

    Args:
        dtype: computation dtype; by default promoted from input and parameters.
        precision: precision of the product, as in `jax.lax.dot_general`.
        dot_general: replaces `jax.lax.dot_general`, see `weft.functional.default_dot_general`.
        promote_dtype: casts input and parameters to `dtype`.
        preferred_element_type: accumulation dtype, as in `jax.lax.dot_general`.
        kernel_metadata, bias_metadata: metadata of the variables, such as `out_sharding`.

    >>> layer = Linear(3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape, layer.kernel.shape
    ((2, 4), (3, 4))
    """

    in_features: int
    out_features: int
    _: KW_ONLY
    use_bias: bool = True
    dot_general: DotGeneral = lax.dot_general

    def __post_init__(self, *arguments: *KernelArguments) -> None:
        parameters.check_sizes(self, "in_features", "out_features")
        kernel_shape = (self.in_features, self.out_features)
        bias_shape = (self.out_features,) if self.use_bias else None
        self._make_parameters(kernel_shape, bias_shape, *arguments)

    def __call__(
        self,
        inputs: Num[Array, "*batch input"],
        out_sharding: OutSharding = None,
    ) -> Num[Array, "*batch output"]:
        """Applies the map; `out_sharding` is the output's, as in `jax.lax.dot_general`."""
        x, kernel, bias = self._promoted(inputs, self.kernel[...])
        if x.shape[-1:] != kernel.shape[:1]:
            raise errors.ArgumentShapeError(
                f"{type(self).__name__} with in_features={self.in_features} and "
                f"out_features={self.out_features} was given an input of shape {x.shape}; expected "
                f"(..., {self.in_features}). Its kernel has shape {kernel.shape}."
            )
        # None is JAX's, or what `functional.default_dot_general` sets instead.
        dot_general = None
        if self.dot_general is not lax.dot_general:
            dot_general = self.dot_general
        options = self._product_options(out_sharding)
        return functional.dense(
            x, kernel, bias, dot_general=dot_general, **options
        )


@dataclass(repr=False, eq=False)
class LinearGeneral(KernelModule):
    """Linear map from any axes to any number of axes.

    The parameters are `kernel`, shape `(*batch, *in_features, *out_features)`, and `bias`, shape
    `(*batch, *out_features)` or None.

    Args:
        in_features: sizes of the contracted axes, in increasing order of the axes.
        out_features: sizes of the new axes, which come last.
        axis: contracted axes, as many as `in_features`.
        batch_axis: sizes of leading axes by axis number, along which each position has its own
            parameters; they come first in the output.
        kernel_init: initializer, called for a matrix of shape `(batch * input, output)`.
        bias_init: initializer, called for a vector.
        dot_general_cls: returns a replacement of `jax.lax.dot_general` at each call; takes
            precedence over `dot_general`.

    The other arguments are those of `Linear`.

    Raises:
        ArgumentShapeError: if `axis` and `in_features` differ in length.
        ArgumentValueError: if `batch_axis` are not the first axes.

    >>> layer = LinearGeneral((3, 4), (2, 5), axis=(1, -1), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((7, 3, 4))).shape, layer.kernel.shape
    ((7, 2, 5), (3, 4, 2, 5))
    """

    in_features: int | Sequence[int]
    out_features: int | Sequence[int]
    _: KW_ONLY
    axis: int | Sequence[int] = -1
    batch_axis: Mapping[int, int] = FrozenDict({})
    use_bias: bool = True
    dot_general: DotGeneral | None = None
    dot_general_cls: Callable[[], DotGeneral] | None = None

    def __post_init__(
        self,
        kernel_init: Initializer,
        bias_init: Initializer,
        rngs: Rngs,
        kernel_metadata: Metadata,
        bias_metadata: Metadata,
    ) -> None:
        parameters.check_sizes(self, "in_features", "out_features")
        in_features = arrays.as_tuple(self.in_features)
        out_features = arrays.as_tuple(self.out_features)
        axis = arrays.as_tuple(self.axis)
        batch_axis = FrozenDict(self.batch_axis)
        self.in_features, self.out_features = in_features, out_features
        self.axis, self.batch_axis = axis, batch_axis
        if len(in_features) != len(axis):
            raise errors.ArgumentShapeError(
                f"LinearGeneral was given in_features={in_features} and axis={axis}; expected one "
                "size for each axis."
            )
        batch_axes = tuple(range(len(batch_axis)))
        if set(batch_axis) != set(batch_axes):
            raise errors.ArgumentValueError(
                f"LinearGeneral was given batch_axis={dict(batch_axis)}; expected sizes of the "
                f"first axes, {batch_axes}: move other axes there with jnp.moveaxis."
            )
        batch_sizes = tuple(batch_axis[a] for a in batch_axes)
        input_size = math.prod(batch_sizes + in_features)
        output_size = math.prod(out_features)
        bias_shape = batch_sizes + out_features
        self._make_parameters(
            (*batch_sizes, *in_features, *out_features),
            bias_shape if self.use_bias else None,
            _reshaped(kernel_init, (input_size, output_size)),
            _reshaped(bias_init, (math.prod(bias_shape),)),
            rngs,
            kernel_metadata,
            bias_metadata,
        )

    def __call__(
        self, inputs: Num[Array, "*input"], out_sharding: OutSharding = None
    ) -> Num[Array, "*output"]:
        """Applies the map; `out_sharding` is the output's, as in `jax.lax.dot_general`."""
        x, kernel, bias = self._promoted(inputs, self.kernel[...])
        batch_axes = tuple(range(len(self.batch_axis)))
        axes = arrays.as_tuple(self.axis)
        axes = tuple(sorted(a + x.ndim if a < 0 else a for a in axes))
        self._check_input(x.shape, kernel.shape, batch_axes + axes)
        dot_general = self.dot_general
        if self.dot_general_cls is not None:
            dot_general = self.dot_general_cls()
        return functional.dense_general(
            x,
            kernel,
            bias,
            axis=axes,
            batch_axes=batch_axes,
            dot_general=dot_general,
            **self._product_options(out_sharding),
        )

    def _check_input(
        self,
        shape: tuple[int, ...],
        kernel_shape: tuple[int, ...],
        axes: tuple[int, ...],
    ) -> None:
        """Raises ArgumentShapeError unless the kernel's first sizes are those of the input."""
        expected_sizes = kernel_shape[: len(axes)]
        has_axes = all(0 <= a < len(shape) for a in axes)
        is_distinct = len(set(axes)) == len(axes)
        if has_axes and is_distinct:
            sizes = tuple(shape[a] for a in axes)
            if sizes == expected_sizes:
                return
        batch = ""
        if self.batch_axis:
            batch = f", batch_axis={dict(self.batch_axis)}"
        raise errors.ArgumentShapeError(
            f"LinearGeneral with in_features={self.in_features}, axis={self.axis}{batch} and "
            f"out_features={self.out_features} was given an input of shape {shape}; expected "
            f"the sizes {expected_sizes} of its axes {axes}."
        )


def _reshaped(init: Initializer, drawn_shape: tuple[int, ...]) -> Initializer:
    """Returns an initializer that draws in a shape that has the map's fans, and reshapes."""

    def reshaped_init(
        key: jax.Array, shape: tuple[int, ...], dtype: DType
    ) -> Array | VariableMetadata:
        value = init(key, drawn_shape, dtype)
        if isinstance(value, VariableMetadata):
            raw_value = jnp.reshape(value.raw_value, shape)
            return dataclasses.replace(value, raw_value=raw_value)
        return jnp.reshape(value, shape)

    return reshaped_init


@dataclass(repr=False, eq=False)
class Einsum(KernelModule):
    """Einsum of the input and a kernel.

    The parameters are `kernel` and `bias`; the bias has the kernel's axes that the result has, in
    the result's order. Other arguments are those of `Linear`.

    Args:
        einsum_str: subscripts of input, kernel and result, such as `"bti,io->bto"`.
        kernel_shape: shape of the kernel, or the size of its only axis.
        bias_shape: shape of the bias, or a size; None for no bias.
        einsum_op: replaces `jax.numpy.einsum`.

    Raises:
        ArgumentValueError: if the subscripts do not name two operands and a result.
        ArgumentShapeError: if the kernel does not match the subscripts; in a call, if the bias
            does not.

    >>> layer = Einsum("btd,dnh->btnh", (4, 2, 5), (2, 5), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((7, 3, 4))).shape
    (7, 3, 2, 5)
    """

    einsum_str: str
    kernel_shape: int | Sequence[int]
    bias_shape: int | Sequence[int] | None = None
    _: KW_ONLY
    einsum_op: Callable[..., Array] = jnp.einsum

    def __post_init__(self, *arguments: *KernelArguments) -> None:
        kernel_shape = arrays.as_tuple(self.kernel_shape)
        bias_shape = None
        if self.bias_shape is not None:
            bias_shape = arrays.as_tuple(self.bias_shape)
        self.kernel_shape, self.bias_shape = kernel_shape, bias_shape
        _check_kernel(self.einsum_str, kernel_shape)
        self.einsum_str = self.einsum_str.replace(" ", "")
        self._make_parameters(kernel_shape, bias_shape, *arguments)

    def __call__(
        self,
        inputs: Num[Array, "*input"],
        einsum_str: str | None = None,
        out_sharding: OutSharding = None,
    ) -> Num[Array, "*output"]:
        """Applies the map.

        Args:
            einsum_str: overrides the subscripts for this call.
            out_sharding: sharding of the output, as in `jax.numpy.einsum`.

        Raises ArgumentValueError if the subscripts do not name two operands and a result.
        """
        subscripts = einsum_str
        if subscripts is None:
            subscripts = self.einsum_str
        x, kernel, bias = self._promoted(inputs, self.kernel[...])
        kernel_axes, out_axes, out_ndim = functional.project_weight_axes(
            subscripts, x.ndim, kernel.ndim
        )
        try:
            if bias is not None:
                # It may have been given as one axis.
                shape = tuple(kernel.shape[axis] for axis in kernel_axes)
                if bias.size != math.prod(shape):
                    raise _bias_error(
                        subscripts, kernel.shape, bias.shape, shape
                    )
                bias = bias.reshape(shape)
                bias = functional.broadcast_bias(bias, out_axes, out_ndim)
            einsum = None
            if self.einsum_op is not jnp.einsum:
                einsum = self.einsum_op
            options = self._product_options(out_sharding)
            return functional.project(
                subscripts, x, kernel, bias, einsum=einsum, **options
            )
        except (TypeError, ValueError) as error:
            # JAX's own errors name neither the layer nor the shapes.
            has_advice = isinstance(error, errors.ArgumentShapeError)
            if has_advice or self.einsum_op is not jnp.einsum:
                raise
            raise errors.ArgumentShapeError(
                f"Einsum {subscripts!r} with a kernel of shape {kernel.shape} was given an "
                f"input of shape {x.shape}: {error}"
            ) from error


def _check_kernel(subscripts: str, kernel_shape: tuple[int, ...]) -> None:
    """Checks the shape as far as possible without an input, which may have more leading axes."""
    input_labels, _, _ = subscripts.replace(" ", "").partition(",")
    input_ndim = len(input_labels.replace("...", ""))
    functional.project_weight_axes(subscripts, input_ndim, len(kernel_shape))


def _bias_error(
    subscripts: str,
    kernel_shape: tuple[int, ...],
    bias_shape: tuple[int, ...],
    expected: tuple[int, ...],
) -> errors.ArgumentShapeError:
    return errors.ArgumentShapeError(
        f"Einsum {subscripts!r} with a kernel of shape {kernel_shape} has a bias of shape "
        f"{bias_shape}; expected {expected}, the sizes of those axes of the kernel that the "
        "result has. Give bias_shape."
    )


@dataclass(repr=False, eq=False)
class Embed(Module):
    """Learned table with one vector per id.

    The parameter is `embedding`, shape `(num_embeddings, features)`.

    Args:
        dtype: dtype of the output; by default, and if it is `param_dtype`, that of the table.
        promote_dtype: casts table and query to `dtype`.

    >>> layer = Embed(10, 4, rngs=nnx.Rngs(0))
    >>> vectors = layer(jnp.array([3, 5]))
    >>> vectors.shape, layer.attend(vectors).shape
    ((2, 4), (2, 10))
    """

    num_embeddings: int
    features: int
    _: KW_ONLY
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    embedding_init: InitVar[Initializer] = initializers.default_embed_init
    promote_dtype: PromoteDtype = parameters.promote_dtype
    rngs: InitVar[Rngs]
    embedding_metadata: InitVar[Metadata] = NO_METADATA

    def __post_init__(
        self,
        embedding_init: Initializer,
        rngs: Rngs,
        embedding_metadata: Metadata,
    ) -> None:
        parameters.check_sizes(self, "num_embeddings", "features")
        self.embedding = parameters.new_param(
            embedding_init,
            rngs,
            (self.num_embeddings, self.features),
            self.param_dtype,
            embedding_metadata,
        )
        if self.dtype is None:
            self.dtype = self.embedding.dtype

    def _output_dtype(self) -> DType | None:
        # A trainer may compute with a table in another dtype than it was made in.
        if self.dtype == self.param_dtype:
            return self.embedding.dtype
        return self.dtype

    def __call__(
        self, inputs: Int[Array, "*shape"], out_sharding: OutSharding = None
    ) -> Float[Array, "*shape features"]:
        """Returns the vectors of ids; out-of-range ids return NaN, so that errors are visible.

        Args:
            inputs: ids; negative ones count from the end.
            out_sharding: sharding of the output, as in `jax.Array.at[].get`.

        Raises ArgumentValueError if the ids are not integers, or too large for JAX's integers.
        """
        layer = f"Embed with num_embeddings={self.num_embeddings}"
        inputs = functional.as_ids(inputs, layer)
        (table,) = self.promote_dtype(
            (self.embedding[...],), dtype=self._output_dtype(), inexact=False
        )
        return functional.lookup(table, inputs, out_sharding=out_sharding)

    def attend(
        self,
        query: Float[Array, "*batch features"],
        out_sharding: OutSharding = None,
    ) -> Float[Array, "*batch ids"]:
        """Returns the inner products of queries with all vectors: logits with tied embeddings.

        `out_sharding` is that of the output, as in `jax.lax.dot_general`.

        Raises ArgumentShapeError if the last axis of the query is not of size `features`.
        """
        query, table = self.promote_dtype(
            (query, self.embedding[...]), dtype=self._output_dtype()
        )
        if query.shape[-1:] != table.shape[-1:]:
            raise errors.ArgumentShapeError(
                f"Embed with features={self.features} was given queries of shape {query.shape}; "
                f"expected (..., {self.features}). Its embedding has shape {table.shape}."
            )
        return functional.attend(table, query, out_sharding=out_sharding)
