"""Branches over functions of scopes: cond and switch."""

from collections.abc import Sequence
from typing import Any

from weft import lifting
from weft.core.filters import Filter
from weft.core.lift.common import Fn, shared
from weft.core.scope_kind import ScopeKind


def cond(
    pred: Any,
    true_fun: Fn,
    false_fun: Fn,
    scope: Any,
    *operands: Any,
    variables: Filter = True,
    rngs: Filter = True,
) -> Any:
    """Applies `jax.lax.cond` to functions `fun(scope, *operands)` with equal result structures.

    Variables that only one of them creates are created for both, and both draw the same keys.
    """
    in_axes = (shared(variables, rngs), *[None] * len(operands))
    lifted = lifting.cond(ScopeKind("cond"), true_fun, false_fun, in_axes=in_axes)
    return lifted(pred, scope, *operands)


def switch(
    index: Any,
    branches: Sequence[Fn],
    scope: Any,
    *operands: Any,
    variables: Filter = True,
    rngs: Filter = True,
) -> Any:
    """Applies `jax.lax.switch` to functions `branch(scope, *operands)`; see `cond`."""
    in_axes = (shared(variables, rngs), *[None] * len(operands))
    return lifting.switch(ScopeKind("switch"), branches, in_axes=in_axes)(index, scope, *operands)
