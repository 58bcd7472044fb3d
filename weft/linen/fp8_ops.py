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
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

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
        def variable(name: str, init: Any, size: int) -> Any:
            return self.variable(OVERWRITE_WITH_GRADIENT, name, init, (size,), jnp.float32)

        for name in ("input", "kernel", "output_grad"):
            history, scale = f"{name}_amax_history", f"{name}_scale"
            setattr(self, history, variable(history, jnp.zeros, self.amax_history_length))
            setattr(self, scale, variable(scale, jnp.ones, 1))

    def _meta(self, name: str) -> tuple[Array, Array]:
        return getattr(self, f"{name}_scale").value, getattr(self, f"{name}_amax_history").value

    def _scaled_dot_general(self, compute_dtype: DTypeLike) -> Any:
        names = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
        metas = {of: self._meta(name) for of, name in names.items()}
        return functools.partial(
            fp8.fp8_scaled_dot_general,
            **{f"{of}_scale": scale for of, (scale, _) in metas.items()},
            **{f"{of}_amax_history": history for of, (_, history) in metas.items()},
            quantize_compute_type=compute_dtype,
        )


class _DotGeneral(Fp8DotGeneralBase):
    def __call__(
        self,
        lhs: Num[Array, "..."],
        rhs: Num[Array, "..."],
        dimension_numbers: Any,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Num[Array, "..."]:
        """Returns the product in the dtype of `rhs`; the last two arguments have no effect."""
        return self._product(jnp.asarray(lhs, rhs.dtype), rhs, dimension_numbers)

    def _product(self, lhs: Array, rhs: Array, dimension_numbers: Any) -> Array:
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

    def _product(self, lhs: Array, rhs: Array, dimension_numbers: Any) -> Array:
        dtype = rhs.dtype
        lhs = fp8.in_qdq(dtype, self.e4m3_dtype, lhs, *self._meta("input"))
        rhs = fp8.in_qdq(dtype, self.e4m3_dtype, rhs, *self._meta("kernel"))
        y = fp8.dot_general_with_precision(lhs, rhs, dimension_numbers)
        return fp8.out_qdq(dtype, self.e5m2_dtype, y, *self._meta("output_grad"))


class NANOOFp8DotGeneralOp(Fp8DotGeneralOp):
    """`Fp8DotGeneralOp` in the dtypes without infinity and negative zero, of AMD's devices."""

    e4m3_dtype: DType = jnp.float8_e4m3fnuz
    e5m2_dtype: DType = jnp.float8_e5m2fnuz


class Fp8DirectDotGeneralOp(_DotGeneral):
    """Product of 8 bits, of operands in `float8_e4m3fn` and gradients in `float8_e5m2`.

    `e4m3_dtype` and `e5m2_dtype` have no effect.
    """

    def _product(self, lhs: Array, rhs: Array, dimension_numbers: Any) -> Array:
        product = self._scaled_dot_general(rhs.dtype)
        return product(lhs, rhs, dimension_numbers, preferred_element_type=rhs.dtype)


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
