"""Low-rank adaptation: a learned low-rank map added to a frozen one (Hu et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Num

from weft import errors, functional
from weft.functional.arrays import OutSharding
from weft.functional.initializers import he_uniform, zeros
from weft.nnx.module import Module
from weft.nnx.nn import parameters
from weft.nnx.nn.linear import Linear
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    PromoteDtype,
)
from weft.nnx.rngs import Rngs
from weft.nnx.variables import Param, Variable
from weft.typing import DType

default_a_initializer = he_uniform()


class LoRAParam(Param[Any]):
    """Parameter of a low-rank map, which can be trained while others are frozen."""

    __slots__ = ()


@dataclass(repr=False, eq=False)
class LoRA(Module):
    """Low-rank linear map, added to the output of another module.

    The output is `(x @ lora_a) @ lora_b + base_module(x)`. The parameters are `lora_a`, shape
    `(in_features, lora_rank)`, and `lora_b`, shape `(lora_rank, out_features)`.
    Other arguments are those of `Linear`.

    Args:
        base_module: module called on the same input; by default nothing is added.
        b_initializer: initializer of `lora_b`; zeros, so that training starts from `base_module`.

    Raises ArgumentValueError if `base_module` is not callable.

    >>> rngs = nnx.Rngs(0)
    >>> layer = LoRA(3, 2, 4, base_module=Linear(3, 4, rngs=rngs), rngs=rngs)
    >>> layer(jnp.ones((16, 3))).shape
    (16, 4)
    """

    in_features: int
    lora_rank: InitVar[int]
    out_features: int
    _: KW_ONLY
    base_module: Callable[..., Any] | None = None
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    a_initializer: InitVar[Initializer] = default_a_initializer
    b_initializer: InitVar[Initializer] = zeros
    lora_param_type: type[Variable[Any]] = LoRAParam
    promote_dtype: PromoteDtype = parameters.promote_dtype
    rngs: InitVar[Rngs]
    a_metadata: InitVar[Metadata] = NO_METADATA
    b_metadata: InitVar[Metadata] = NO_METADATA

    def __post_init__(
        self,
        lora_rank: int,
        a_initializer: Initializer,
        b_initializer: Initializer,
        rngs: Rngs,
        a_metadata: Metadata,
        b_metadata: Metadata,
    ) -> None:
        parameters.check_sizes(self, "in_features", "out_features")
        functional.check_sizes(type(self).__name__, lora_rank=lora_rank)
        if self.base_module is not None and not callable(self.base_module):
            raise errors.ArgumentValueError(
                f"LoRA was given base_module={self.base_module!r}, which is not callable; expected "
                "a module with a __call__, or None."
            )
        self.lora_a = parameters.new_param(
            a_initializer,
            rngs,
            (self.in_features, lora_rank),
            self.param_dtype,
            a_metadata,
            self.lora_param_type,
        )
        self.lora_b = parameters.new_param(
            b_initializer,
            rngs,
            (lora_rank, self.out_features),
            self.param_dtype,
            b_metadata,
            self.lora_param_type,
        )

    def __call__(
        self, x: Num[Array, "*batch input"], **kwargs: Any
    ) -> Num[Array, "*batch output"]:
        """Applies the map; `base_module` receives the keyword arguments too."""
        inputs, a, b = self.promote_dtype(
            (x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype
        )
        if inputs.shape[-1:] != a.shape[:1]:
            raise errors.ArgumentShapeError(
                f"LoRA with in_features={self.in_features} and out_features={self.out_features} "
                f"was given an input of shape {inputs.shape}; expected (..., {self.in_features}). "
                f"Its lora_a has shape {a.shape}."
            )
        y = functional.dense(functional.dense(inputs, a), b)
        if self.base_module is None:
            return y
        return y + self.base_module(x, **kwargs)


class LoRALinear(Linear):
    """`Linear` with a low-rank linear map added.

    The parameters are those of `Linear`, and those of `lora`, a `LoRA`.

    Args:
        lora_dtype: computation dtype of the low-rank map; `lora_param_dtype` and
            `lora_promote_dtype` belong to the same map.
        b_initializer: see `LoRA`, as for `a_initializer` and `lora_param_type`.
        **kwargs: passed to `Linear`.

    >>> layer = LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((16, 3))).shape, layer.lora.lora_a.shape
    ((16, 4), (3, 2))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: DType | None = None,
        lora_param_dtype: DType = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = zeros,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        lora_promote_dtype: PromoteDtype = parameters.promote_dtype,
        rngs: Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
        **kwargs: Any,
    ):
        functional.check_sizes(type(self).__name__, lora_rank=lora_rank)
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            dtype=lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            promote_dtype=lora_promote_dtype,
            rngs=rngs,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(
        self, x: Num[Array, "*batch input"], out_sharding: OutSharding = None
    ) -> Num[Array, "*batch output"]:
        """Applies both maps; `out_sharding` is the output's, as in `jax.lax.dot_general`."""
        return super().__call__(x, out_sharding=out_sharding) + self.lora(x)
