"""Dtype of the model's computation: one for all parameters, or by path."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from weft.config.names import did_you_mean
from weft.errors import TrainDtypeError
from weft.trainer.optimizer_base import tree_paths
from weft.typing import DType, Nested, NestedTensor

PerParamDType = Callable[[NestedTensor], Nested[DType | None]]
"""Function from parameters to their dtypes in the forward pass; None keeps a dtype."""


def per_param_train_dtype_by_path(
    default_dtype: DType | None = jnp.bfloat16,
    *,
    update_rules: Sequence[tuple[str, DType | None]] = (),
) -> PerParamDType:
    """Returns dtypes by regular expressions on parameters' paths, for a trainer's `train_dtype`.

    Args:
        default_dtype: For parameters without a matching rule and for floats in a batch; None keeps
            their own.
        update_rules: Pairs of a pattern, which must match the whole path, such as "decoder/emb/.*",
            and a dtype, or None for the parameter's own; the first match counts.

    Raises:
        TrainDtypeError: When called, if a rule matches no parameter.

    >>> dtypes = per_param_train_dtype_by_path("bfloat16", update_rules=[(".*/scale", None)])
    >>> dtypes({"norm": {"scale": jnp.ones(2)}, "linear": {"weight": jnp.ones(2)}})
    {'linear': {'weight': 'bfloat16'}, 'norm': {'scale': None}}
    """
    return _ByPath(default_dtype, tuple((pattern, dtype) for pattern, dtype in update_rules))


@dataclasses.dataclass(frozen=True)
class _ByPath:
    default_dtype: DType | None
    rules: tuple[tuple[str, DType | None], ...]

    def __call__(self, params: NestedTensor) -> Nested[Any]:
        paths = tree_paths(params)
        for pattern, _ in self.rules:
            self._check_matches(pattern, jax.tree.leaves(paths))
        return jax.tree.map(self._dtype_of, paths)

    def _check_matches(self, pattern: str, paths: list[str]) -> None:
        if not any(re.fullmatch(pattern, path) for path in paths):
            raise TrainDtypeError(
                f"the rule {pattern!r} of train_dtype matches the whole path of no parameter. "
                f"{did_you_mean(pattern, paths)}"
            )

    def _dtype_of(self, path: str) -> DType | None:
        for pattern, dtype in self.rules:
            if re.fullmatch(pattern, path):
                return dtype
        return self.default_dtype


def cast_floats(tree: Any, dtype: DType | None) -> Any:
    """Casts floating-point arrays to a dtype; other leaves, or all for None, are unchanged."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, tree
    )


def cast_for_forward(
    params: NestedTensor, batch: Any, train_dtype: DType | PerParamDType | None
) -> tuple[NestedTensor, Any]:
    """Casts parameters and a batch to one dtype, to one per parameter, or not at all."""
    if train_dtype is None or not _is_per_param(train_dtype):
        return cast_floats(params, train_dtype), cast_floats(batch, train_dtype)
    dtypes = train_dtype(params)
    cast = jax.tree.map(
        lambda dtype, x: cast_floats(x, dtype), dtypes, params, is_leaf=lambda x: x is None
    )
    return cast, cast_floats(batch, getattr(train_dtype, "default_dtype", None))


def _is_per_param(train_dtype: Any) -> bool:
    try:
        jnp.dtype(train_dtype)
    except TypeError:
        return True
    return False
