"""Linear layers, over the last axis or over any axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from weft import functional
from weft.core.frozen_dict import FrozenDict
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.initializers import zeros
from weft.nnx.initial_metadata import VariableMetadata
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    default_kernel_init,
    new_param,
)
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["Linear", "LinearGeneral"]

DotGeneral = Callable[..., Array]


class Linear(Module):
    """Linear map of the last axis.

    The parameters are `kernel`, shape `(in_features, out_features)`, and `bias`, shape
    `(out_features,)` or None.

    Args:
        dtype: computation dtype; by default promoted from input and parameters.
        precision: precision of the product, as in `jax.lax.dot_general`.
        dot_general: replaces `jax.lax.dot_general`.
        promote_dtype: casts input and parameters to `dtype`.
        preferred_element_type: accumulation dtype, as in `jax.lax.dot_general`.
        kernel_metadata: metadata of the kernel's variable, such as `out_sharding`; `bias_metadata`
            that of the bias.

    Example:
        >>> from weft import nnx
        >>> layer = Linear(3, 4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape, layer.kernel.shape
        ((2, 4), (3, 4))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        dot_general: DotGeneral = lax.dot_general,
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DType | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(
            type(self).__name__, in_features=in_features, out_features=out_features
        )
        shape = (in_features, out_features)
        self.kernel = new_param(kernel_init, rngs, shape, param_dtype, kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = new_param(bias_init, rngs, (out_features,), param_dtype, bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(
        self, inputs: Num[Array, "*batch input"], out_sharding: Any = None
    ) -> Num[Array, "*batch output"]:
        """Applies the map.

        Args:
            out_sharding: sharding of the output, as in `jax.lax.dot_general`.
        """
        x, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], value_of(self.bias)), dtype=self.dtype
        )
        if x.shape[-1:] != kernel.shape[:1]:
            raise ArgumentShapeError(
                f"{type(self).__name__} with in_features={self.in_features} and "
                f"out_features={self.out_features} was given an input of shape {x.shape}; expected "
                f"(..., {kernel.shape[0]})."
            )
        return functional.dense(
            x,
            kernel,
            bias,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            dot_general=_replaced(self.dot_general),
            out_sharding=out_sharding,
        )


class LinearGeneral(Module):
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

    Example:
        >>> from weft import nnx
        >>> layer = LinearGeneral((3, 4), (2, 5), axis=(1, -1), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((7, 3, 4))).shape, layer.kernel.shape
        ((7, 2, 5), (3, 4, 2, 5))
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = FrozenDict({}),
        use_bias: bool = True,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        precision: lax.PrecisionLike = None,
        promote_dtype: PromoteDtype = promote_dtype,
        dot_general: DotGeneral | None = None,
        dot_general_cls: Callable[[], DotGeneral] | None = None,
        preferred_element_type: DType | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(
            type(self).__name__, in_features=in_features, out_features=out_features
        )
        self.in_features = _as_tuple(in_features)
        self.out_features = _as_tuple(out_features)
        self.axis = _as_tuple(axis)
        self.batch_axis: Mapping[int, int] = FrozenDict(batch_axis)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.dot_general_cls = dot_general_cls
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self._check_sizes()

        batch = tuple(self.batch_axis[i] for i in range(len(self.batch_axis)))
        n_in, n_out = math.prod(batch + self.in_features), math.prod(self.out_features)
        shape = (*batch, *self.in_features, *self.out_features)
        init = _shaped(kernel_init, (n_in, n_out))
        self.kernel = new_param(init, rngs, shape, param_dtype, kernel_metadata)
        self.bias = None
        if use_bias:
            shape = (*batch, *self.out_features)
            init = _shaped(bias_init, (math.prod(shape),))
            self.bias = new_param(init, rngs, shape, param_dtype, bias_metadata)

    def _check_sizes(self) -> None:
        if len(self.in_features) != len(self.axis):
            raise ArgumentShapeError(
                f"LinearGeneral was given in_features={self.in_features} and axis={self.axis}; "
                "expected one size for each axis."
            )
        first = range(len(self.batch_axis))
        if set(self.batch_axis) != set(first):
            raise ArgumentValueError(
                f"LinearGeneral was given batch_axis={dict(self.batch_axis)}; expected sizes of "
                f"the first axes, {tuple(first)}: move other axes there with jnp.moveaxis."
            )

    def __call__(
        self, inputs: Num[Array, "*input"], out_sharding: Any = None
    ) -> Num[Array, "*output"]:
        """Applies the map.

        Args:
            out_sharding: sharding of the output, as in `jax.lax.dot_general`.
        """
        x, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], value_of(self.bias)), dtype=self.dtype
        )
        batch_axes = tuple(range(len(self.batch_axis)))
        axis = tuple(sorted(a + x.ndim if a < 0 else a for a in self.axis))
        self._check_input(x.shape, kernel.shape, batch_axes + axis)
        given = self.dot_general if self.dot_general_cls is None else self.dot_general_cls()
        return functional.dense_general(
            x,
            kernel,
            bias,
            axis=axis,
            batch_axes=batch_axes,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            dot_general=_replaced(given),
            out_sharding=out_sharding,
        )

    def _check_input(
        self, shape: tuple[int, ...], kernel: tuple[int, ...], leading: tuple[int, ...]
    ) -> None:
        known = all(0 <= a < len(shape) for a in leading) and len(set(leading)) == len(leading)
        if not known or tuple(shape[a] for a in leading) != kernel[: len(leading)]:
            batch = f", batch_axis={dict(self.batch_axis)}" if self.batch_axis else ""
            raise ArgumentShapeError(
                f"LinearGeneral with in_features={self.in_features}, axis={self.axis}{batch} and "
                f"out_features={self.out_features} was given an input of shape {shape}; expected "
                f"the sizes {kernel[: len(leading)]} of its axes {leading}."
            )


def value_of(bias: Any) -> Any:
    """Returns the value of a variable; None stays None."""
    return None if bias is None else bias[...]


def _replaced(dot_general: DotGeneral | None) -> DotGeneral | None:
    return None if dot_general is lax.dot_general else dot_general


def _shaped(init: Initializer, flat: tuple[int, ...]) -> Initializer:
    """Returns an initializer that draws in shape `flat`, which has the map's fans, and reshapes."""

    def make(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        value = init(key, flat, dtype)
        if isinstance(value, VariableMetadata):
            return dataclasses.replace(value, raw_value=jnp.reshape(value.raw_value, shape))
        return jnp.reshape(value, shape)

    return make


def _as_tuple(x: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(x) if isinstance(x, Sequence) else (x,)
