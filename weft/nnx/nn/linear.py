"""Linear layers (over the last axis, over any axes, by an einsum) and embeddings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from weft import errors, functional
from weft.core.frozen_dict import FrozenDict
from weft.functional import arrays, initializers
from weft.nnx.module import Module
from weft.nnx.nn import parameters
from weft.nnx.nn.parameters import NO_METADATA, Initializer, KernelModule, Metadata, PromoteDtype
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

    def __post_init__(self, *init_vars: Any) -> None:
        parameters.check_sizes(self, "in_features", "out_features")
        shape = (self.in_features, self.out_features)
        self._make_parameters(shape, shape[1:] if self.use_bias else None, *init_vars)

    def __call__(
        self, inputs: Num[Array, "*batch input"], out_sharding: Any = None
    ) -> Num[Array, "*batch output"]:
        """Applies the map; `out_sharding` is the output's, as in `jax.lax.dot_general`."""
        x, kernel, bias = self._promoted(inputs, self.kernel[...])
        if x.shape[-1:] != kernel.shape[:1]:
            raise errors.ArgumentShapeError(
                f"{type(self).__name__} with in_features={self.in_features} and "
                f"out_features={self.out_features} was given an input of shape {x.shape}; expected "
                f"(..., {self.in_features}). Its kernel has shape {kernel.shape}."
            )
        product = None if self.dot_general is lax.dot_general else self.dot_general
        options = self._options(out_sharding)
        return functional.dense(x, kernel, bias, dot_general=product, **options)


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
        self, kernel_init: Initializer, bias_init: Initializer, *init_vars: Any
    ) -> None:
        parameters.check_sizes(self, "in_features", "out_features")
        self.in_features = in_features = arrays.as_tuple(self.in_features)
        self.out_features = out_features = arrays.as_tuple(self.out_features)
        self.axis = arrays.as_tuple(self.axis)
        self.batch_axis = FrozenDict(self.batch_axis)
        self._check_sizes()
        batch = tuple(self.batch_axis[i] for i in range(len(self.batch_axis)))
        outputs = batch + out_features
        self._make_parameters(
            (*batch, *in_features, *out_features),
            outputs if self.use_bias else None,
            _shaped(kernel_init, (math.prod(batch + in_features), math.prod(out_features))),
            _shaped(bias_init, (math.prod(outputs),)),
            *init_vars,
        )

    def _check_sizes(self) -> None:
        if len(arrays.as_tuple(self.in_features)) != len(arrays.as_tuple(self.axis)):
            raise errors.ArgumentShapeError(
                f"LinearGeneral was given in_features={self.in_features} and axis={self.axis}; "
                "expected one size for each axis."
            )
        first = range(len(self.batch_axis))
        if set(self.batch_axis) != set(first):
            raise errors.ArgumentValueError(
                f"LinearGeneral was given batch_axis={dict(self.batch_axis)}; expected sizes of "
                f"the first axes, {tuple(first)}: move other axes there with jnp.moveaxis."
            )

    def __call__(
        self, inputs: Num[Array, "*input"], out_sharding: Any = None
    ) -> Num[Array, "*output"]:
        """Applies the map; `out_sharding` is the output's, as in `jax.lax.dot_general`."""
        x, kernel, bias = self._promoted(inputs, self.kernel[...])
        batch_axes = tuple(range(len(self.batch_axis)))
        axis = tuple(sorted(a + x.ndim if a < 0 else a for a in arrays.as_tuple(self.axis)))
        self._check_input(x.shape, kernel.shape, batch_axes + axis)
        given = self.dot_general if self.dot_general_cls is None else self.dot_general_cls()
        options = {"axis": axis, "batch_axes": batch_axes, "dot_general": given}
        return functional.dense_general(x, kernel, bias, **options, **self._options(out_sharding))

    def _check_input(
        self, shape: tuple[int, ...], kernel: tuple[int, ...], leading: tuple[int, ...]
    ) -> None:
        known = all(0 <= a < len(shape) for a in leading) and len(set(leading)) == len(leading)
        if not known or tuple(shape[a] for a in leading) != kernel[: len(leading)]:
            batch = f", batch_axis={dict(self.batch_axis)}" if self.batch_axis else ""
            raise errors.ArgumentShapeError(
                f"LinearGeneral with in_features={self.in_features}, axis={self.axis}{batch} and "
                f"out_features={self.out_features} was given an input of shape {shape}; expected "
                f"the sizes {kernel[: len(leading)]} of its axes {leading}."
            )


def _shaped(init: Initializer, flat: tuple[int, ...]) -> Initializer:
    """Returns an initializer that draws in shape `flat`, which has the map's fans, and reshapes."""

    def make(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        value = init(key, flat, dtype)
        if isinstance(value, VariableMetadata):
            return dataclasses.replace(value, raw_value=jnp.reshape(value.raw_value, shape))
        return jnp.reshape(value, shape)

    return make


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

    def __post_init__(self, *init_vars: Any) -> None:
        self.kernel_shape = kernel_shape = arrays.as_tuple(self.kernel_shape)
        self.bias_shape = None if self.bias_shape is None else arrays.as_tuple(self.bias_shape)
        _check_kernel(self.einsum_str, kernel_shape)
        self.einsum_str = self.einsum_str.replace(" ", "")
        self._make_parameters(kernel_shape, self.bias_shape, *init_vars)

    def __call__(
        self, inputs: Num[Array, "*input"], einsum_str: str | None = None, out_sharding: Any = None
    ) -> Num[Array, "*output"]:
        """Applies the map.

        Args:
            einsum_str: overrides the subscripts for this call.
            out_sharding: sharding of the output, as in `jax.numpy.einsum`.

        Raises ArgumentValueError if the subscripts do not name two operands and a result.
        """
        subscripts = self.einsum_str if einsum_str is None else einsum_str
        x, kernel, bias = self._promoted(inputs, self.kernel[...])
        axes, out_axes, ndim = functional.project_weight_axes(subscripts, x.ndim, kernel.ndim)
        try:
            if bias is not None:
                shape = tuple(kernel.shape[axis] for axis in axes)
                if bias.size != math.prod(shape):
                    raise _bias_error(subscripts, kernel.shape, bias.shape, shape)
                bias = bias if bias.shape == shape else bias.reshape(shape)
                bias = functional.broadcast_bias(bias, out_axes, ndim)
            einsum = None if self.einsum_op is jnp.einsum else self.einsum_op
            options = self._options(out_sharding)
            return functional.project(subscripts, x, kernel, bias, einsum=einsum, **options)
        except (TypeError, ValueError) as error:
            is_known = isinstance(error, errors.ArgumentShapeError)
            if is_known or self.einsum_op is not jnp.einsum:
                raise
            raise errors.ArgumentShapeError(
                f"Einsum {subscripts!r} with a kernel of shape {kernel.shape} was given an "
                f"input of shape {x.shape}: {error}"
            ) from error


def _check_kernel(subscripts: str, kernel_shape: tuple[int, ...]) -> None:
    """Checks the shape as far as possible without an input, which may have more leading axes."""
    named = subscripts.replace(" ", "").partition(",")[0].replace("...", "")
    functional.project_weight_axes(subscripts, len(named), len(kernel_shape))


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
        self, embedding_init: Initializer, rngs: Rngs, embedding_metadata: Metadata
    ) -> None:
        parameters.check_sizes(self, "num_embeddings", "features")
        shape, dtype = (self.num_embeddings, self.features), self.param_dtype
        self.embedding = parameters.new_param(
            embedding_init, rngs, shape, dtype, embedding_metadata
        )
        self.dtype = self.embedding.dtype if self.dtype is None else self.dtype

    def _output_dtype(self) -> DType | None:
        # A trainer may compute with a table in another dtype than it was made in.
        return self.embedding.dtype if self.dtype == self.param_dtype else self.dtype

    def __call__(
        self, inputs: Int[Array, "*shape"], out_sharding: Any = None
    ) -> Float[Array, "*shape features"]:
        """Returns the vectors of ids; out-of-range ids return NaN, so that errors are visible.

        Args:
            inputs: ids; negative ones count from the end.
            out_sharding: sharding of the output, as in `jax.Array.at[].get`.

        Raises ArgumentValueError if the ids are not integers, or too large for JAX's integers.
        """
        layer = f"Embed with num_embeddings={self.num_embeddings}"
        inputs = functional.as_ids(inputs, layer)
        table, dtype = self.embedding[...], self._output_dtype()
        (table,) = self.promote_dtype((table,), dtype=dtype, inexact=False)
        return functional.lookup(table, inputs, out_sharding=out_sharding)

    def attend(
        self, query: Float[Array, "*batch features"], out_sharding: Any = None
    ) -> Float[Array, "*batch ids"]:
        """Returns the inner products of queries with all vectors: logits with tied embeddings.

        `out_sharding` is that of the output, as in `jax.lax.dot_general`.

        Raises ArgumentShapeError if the last axis of the query is not of size `features`.
        """
        table, dtype = self.embedding[...], self._output_dtype()
        query, table = self.promote_dtype((query, table), dtype=dtype)
        if query.shape[-1:] != table.shape[-1:]:
            raise errors.ArgumentShapeError(
                f"Embed with features={self.features} was given queries of shape {query.shape}; "
                f"expected (..., {self.features}). Its embedding has shape {table.shape}."
            )
        return functional.attend(table, query, out_sharding=out_sharding)
