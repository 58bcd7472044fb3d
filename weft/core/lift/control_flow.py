"""Loops and branches over functions of scopes."""

from collections.abc import Mapping, Sequence
from typing import Any

from weft import lifting
from weft.core.filters import Filter
from weft.core.lift.transforms import roles_of, shared
from weft.core.scope_kind import ScopeKind
from weft.lifting import CARRY
from weft.typing import ArrayLike, Fn


def while_loop(
    cond_fn: Fn,
    body_fn: Fn,
    scope: object,
    init: object,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> Any:
    """Applies `jax.lax.while_loop` to functions of a scope and returns the last carry.

    Args:
        cond_fn: `cond_fn(scope, carry)` returns whether to continue; it changes no variables.
        body_fn: `body_fn(scope, carry)` returns the next carry.
        carry_variables: collections that the body may change.
        broadcast_variables: collections that all iterations share.
        split_rngs: by filter of PRNG streams, whether each iteration has its own keys.
    """
    roles = roles_of({}, split_rngs, (carry_variables, CARRY), (broadcast_variables, None))
    kind = ScopeKind("while_loop", counts_first_run=False)
    loop = lifting.while_loop(kind, cond_fn, body_fn, in_axes=(roles, CARRY))
    return loop(scope, init)


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Fn,
    scope: object,
    init: object,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> Any:
    """Applies `jax.lax.fori_loop` to `body_fn(i, scope, carry)`; see `while_loop`."""
    roles = roles_of({}, split_rngs, (carry_variables, CARRY), (broadcast_variables, None))
    kind = ScopeKind("fori_loop", counts_first_run=False)
    return lifting.fori_loop(kind, lower, upper, body_fn, in_axes=(roles, CARRY))(scope, init)


def cond(
    pred: ArrayLike,
    true_fun: Fn,
    false_fun: Fn,
    scope: object,
    *operands: object,
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
    index: ArrayLike,
    branches: Sequence[Fn],
    scope: object,
    *operands: object,
    variables: Filter = True,
    rngs: Filter = True,
) -> Any:
    """Applies `jax.lax.switch` to functions `branch(scope, *operands)`; see `cond`."""
    in_axes = (shared(variables, rngs), *[None] * len(operands))
    return lifting.switch(ScopeKind("switch"), branches, in_axes=in_axes)(index, scope, *operands)
