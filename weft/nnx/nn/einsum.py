"""Einsum layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from weft import functional
from weft.errors import ArgumentShapeError
from weft.functional.initializers import zeros
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.linear import value_of
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    default_kernel_init,
    new_param,
)
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["Einsum"]


class Einsum(Module):
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
        ArgumentShapeError: if the kernel or the bias does not match the subscripts.

    Example:
        >>> from weft import nnx
        >>> layer = Einsum("btd,dnh->btnh", (4, 2, 5), (2, 5), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((7, 3, 4))).shape
        (7, 3, 2, 5)
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: int | Sequence[int],
        bias_shape: int | Sequence[int] | None = None,
        *,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        promote_dtype: PromoteDtype = promote_dtype,
        einsum_op: Callable[..., Array] = jnp.einsum,
        preferred_element_type: DType | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        kernel_shape = _shape(kernel_shape)
        bias_shape = None if bias_shape is None else _shape(bias_shape)
        _check_parameters(einsum_str, kernel_shape, bias_shape)
        self.kernel = new_param(kernel_init, rngs, kernel_shape, param_dtype, kernel_metadata)
        self.bias = None
        if bias_shape is not None:
            self.bias = new_param(bias_init, rngs, bias_shape, param_dtype, bias_metadata)
        self.einsum_str = einsum_str.replace(" ", "")
        self.kernel_shape = kernel_shape
        self.bias_shape = bias_shape
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = preferred_element_type

    def __call__(
        self,
        inputs: Num[Array, "*input"],
        einsum_str: str | None = None,
        out_sharding: Any = None,
    ) -> Num[Array, "*output"]:
        """Applies the map.

        Args:
            einsum_str: overrides the subscripts for this call.
            out_sharding: sharding of the output, as in `jax.numpy.einsum`.

        Raises:
            ArgumentValueError: if the subscripts do not name two operands and a result.
        """
        subscripts = self.einsum_str if einsum_str is None else einsum_str
        x, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], value_of(self.bias)), dtype=self.dtype
        )
        axes, out_axes, ndim = functional.project_weight_axes(subscripts, x.ndim, kernel.ndim)
        try:
            if bias is not None:
                shape = tuple(kernel.shape[axis] for axis in axes)
                bias = bias if bias.shape == shape else bias.reshape(shape)
                bias = functional.spread(bias, out_axes, ndim)
            return functional.project(
                subscripts,
                x,
                kernel,
                bias,
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
                einsum=self.einsum_op,
                out_sharding=out_sharding,
            )
        except (TypeError, ValueError) as error:
            if self.einsum_op is not jnp.einsum:
                raise
            raise ArgumentShapeError(
                f"Einsum {subscripts!r} with a kernel of shape {kernel.shape} was given an "
                f"input of shape {x.shape}: {error}"
            ) from error


def _shape(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def _check_parameters(
    subscripts: str, kernel_shape: tuple[int, ...], bias_shape: tuple[int, ...] | None
) -> None:
    """Checks the shapes as far as possible without an input, which may have more leading axes."""
    named = subscripts.replace(" ", "").partition(",")[0].replace("...", "")
    axes, _, _ = functional.project_weight_axes(subscripts, len(named), len(kernel_shape))
    expected = tuple(kernel_shape[axis] for axis in axes)
    if bias_shape is not None and math.prod(bias_shape) != math.prod(expected):
        raise ArgumentShapeError(
            f"Einsum {subscripts!r} with kernel_shape={kernel_shape} was given "
            f"bias_shape={bias_shape}; expected {expected}, the sizes of those axes of the "
            "kernel that the result has."
        )
