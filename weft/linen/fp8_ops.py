"""Products of 8 bits with delayed scaling, for `dot_general_cls` of layers.

Scales and histories are variables of the collection `OVERWRITE_WITH_GRADIENT`. What `jax.grad`
returns for them are their next values, see `weft.functional.fp8`, not gradients for an optimizer.

    >>> layer = nn.Dense(4, dot_general_cls=Fp8DirectDotGeneralOp)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> loss = lambda variables: layer.apply(variables, jnp.ones((2, 3))).sum()
    >>> gradients = jax.grad(loss)(variables)
    >>> params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients["params"])
    >>> variables = {OVERWRITE_WITH_GRADIENT: gradients[OVERWRITE_WITH_GRADIENT], "params": params}
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from weft.core.scope import Variable
from weft.functional import fp8
from weft.functional.fp8 import OVERWRITE_WITH_GRADIENT
from weft.linen.module import Module
from weft.typing import DType


class Fp8DotGeneralBase(Module):
    """Base class of products; declares scales and histories of operands and of the gradient.

    Attributes:
        amax_history_length: number of steps whose largest magnitudes define a scale.
    """

    amax_history_length: int = 1024
    e4m3_dtype: DType = jnp.float8_e4m3fn
    e5m2_dtype: DType = jnp.float8_e5m2

    def setup(self) -> None:
        for name in ("input", "kernel", "output_grad"):
            history_name, scale_name = f"{name}_amax_history", f"{name}_scale"
            history = self._variable(
                history_name, jnp.zeros, self.amax_history_length
            )
            setattr(self, history_name, history)
            setattr(self, scale_name, self._variable(scale_name, jnp.ones, 1))

    def _variable(
        self, name: str, init: Callable[..., Array], size: int
    ) -> Variable[Array]:
        # Its "gradient" is its new value, which the optimizer is to store as it is.
        return self.variable(
            OVERWRITE_WITH_GRADIENT, name, init, (size,), jnp.float32
        )

    def _scale_and_history(self, name: str) -> tuple[Array, Array]:
        return getattr(self, f"{name}_scale").value, getattr(
            self, f"{name}_amax_history"
        ).value

    def _scaled_dot_general(
        self, compute_dtype: DTypeLike
    ) -> Callable[..., Array]:
        lhs_scale, lhs_history = self._scale_and_history("input")
        rhs_scale, rhs_history = self._scale_and_history("kernel")
        grad_scale, grad_history = self._scale_and_history("output_grad")
        return functools.partial(
            fp8.fp8_scaled_dot_general,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
            grad_scale=grad_scale,
            lhs_amax_history=lhs_history,
            rhs_amax_history=rhs_history,
            grad_amax_history=grad_history,
            quantize_compute_type=compute_dtype,
        )


class _DotGeneral(Fp8DotGeneralBase):
    def __call__(
        self,
        lhs: Num[Array, "..."],
        rhs: Num[Array, "..."],
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Num[Array, "..."]:
        """Returns the product in the dtype of `rhs`; the last two arguments have no effect."""
        return self._product(
            jnp.asarray(lhs, rhs.dtype), rhs, dimension_numbers
        )

    def _product(
        self, lhs: Array, rhs: Array, dimension_numbers: lax.DotDimensionNumbers
    ) -> Array:
        raise NotImplementedError


class Fp8DotGeneralOp(_DotGeneral):
    """Product of operands that are rounded to 8 bits and converted back.

    The compiler may use a product of 8 bits. Deprecated, as in Flax: use `Fp8DirectDotGeneralOp`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self) is Fp8DotGeneralOp:
            message = "Fp8DotGeneralOp is deprecated; use Fp8DirectDotGeneralOp or Fp8Einsum."
            warnings.warn(message, DeprecationWarning, stacklevel=3)

    def _product(
        self, lhs: Array, rhs: Array, dimension_numbers: lax.DotDimensionNumbers
    ) -> Array:
        dtype = rhs.dtype
        lhs = fp8.in_qdq(
            dtype, self.e4m3_dtype, lhs, *self._scale_and_history("input")
        )
        rhs = fp8.in_qdq(
            dtype, self.e4m3_dtype, rhs, *self._scale_and_history("kernel")
        )
        y = fp8.dot_general_with_precision(lhs, rhs, dimension_numbers)
        return fp8.out_qdq(
            dtype, self.e5m2_dtype, y, *self._scale_and_history("output_grad")
        )


class NANOOFp8DotGeneralOp(Fp8DotGeneralOp):
    """`Fp8DotGeneralOp` in the dtypes without infinity and negative zero, of AMD's devices."""

    e4m3_dtype: DType = jnp.float8_e4m3fnuz
    e5m2_dtype: DType = jnp.float8_e5m2fnuz


class Fp8DirectDotGeneralOp(_DotGeneral):
    """Product of 8 bits, of operands in `float8_e4m3fn` and gradients in `float8_e5m2`.

    `e4m3_dtype` and `e5m2_dtype` have no effect.
    """

    def _product(
        self, lhs: Array, rhs: Array, dimension_numbers: lax.DotDimensionNumbers
    ) -> Array:
        product = self._scaled_dot_general(rhs.dtype)
        return product(
            lhs, rhs, dimension_numbers, preferred_element_type=rhs.dtype
        )


Fp8DotGeneral = Fp8DirectDotGeneralOp
"""The same as `Fp8DirectDotGeneralOp`."""


class Fp8Einsum(Fp8DotGeneralBase):
    """Einsum of 8 bits, like `Fp8DirectDotGeneralOp`; called as `jax.numpy.einsum`."""

    def __call__(
        self,
        eqn: str,
        lhs: Num[Array, "..."],
        rhs: Num[Array, "..."],
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Num[Array, "..."]:
        """Returns the einsum, by default in the dtype of `rhs`; `precision` has no effect."""
        dtype = rhs.dtype
        return jnp.einsum(
            eqn,
            jnp.asarray(lhs, dtype),
            rhs,
            preferred_element_type=preferred_element_type or dtype,
            _dot_general=self._scaled_dot_general(dtype),
        )
