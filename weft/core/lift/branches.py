"""One of several functions of scopes: cond and switch."""

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
    """`jax.lax.cond` of functions of a scope.

    Args:
        pred: which of the two runs.
        true_fun: `true_fun(scope, *operands)`.
        false_fun: likewise, with a result of the same structure. A variable that only one of them
            makes is made for both.
        scope: the scope.
        *operands: the arguments.
        variables: the collections that both see.
        rngs: the PRNG streams that both see; both draw the same keys.
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
    """`jax.lax.switch` of functions of a scope; see `cond`.

    Args:
        index: which of the branches runs.
        branches: functions `branch(scope, *operands)`.
        scope: the scope.
        *operands: the arguments.
        variables: the collections that all see.
        rngs: the PRNG streams that all see.
    """
    in_axes = (shared(variables, rngs), *[None] * len(operands))
    return lifting.switch(ScopeKind("switch"), branches, in_axes=in_axes)(index, scope, *operands)
