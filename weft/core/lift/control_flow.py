"""Loops and branches over functions of scopes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft import lifting
from weft.core.filters import Filter
from weft.core.lift.transforms import (
    Fn,
    VariableAxis,
    remat,
    roles_of,
    shared,
    takes_packed_args,
    without_broadcast,
)
from weft.core.scope_kind import ScopeKind
from weft.lifting import CARRY
from weft.typing import ArrayLike


def scan(
    fn: Fn,
    variable_axes: Mapping[Any, VariableAxis] = {},
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    split_rngs: Mapping[Any, bool] = {},
    in_axes: object = 0,
    out_axes: object = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    data_transform: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    check_constancy_invariants: bool = True,
) -> Fn:
    """Applies `jax.lax.scan` to `fn(scope, carry, *xs) -> (carry, y)`.

    Args:
        variable_axes: by filter of collections, the axis of the iterations' separate variables, or
            `In(axis)` or `Out(axis)` for variables that only enter or only leave.
        variable_broadcast: collections that all iterations share.
        variable_carry: collections that each iteration passes to the next.
        split_rngs: by filter of PRNG streams, whether each iteration has its own keys.
        in_axes: the scanned axis of each of `xs`; `broadcast` for values shared by all iterations.
        out_axes: the axis along which `y` is stacked.
        length: number of iterations, if no scanned value determines it.
        data_transform: maps groups of variables and PRNG streams to those that `fn` sees.
        metadata_params: passed to axis metadata that gains or loses the axis.
        check_constancy_invariants: whether to count keys as after a first run, as Flax with True.

    >>> from weft.core import init, lift, nn
    >>> def layer(scope, x, _):
    ...     return nn.dense(scope, x, 4), None
    >>> stack = lift.scan(layer, {"params": 0}, split_rngs={"params": True}, length=3)
    >>> (y, _), variables = init(stack)(jax.random.key(0), jax.numpy.ones(4), None)
    >>> variables["params"]["kernel"].shape
    (3, 4, 4)
    """
    first = ((variable_broadcast, None), (variable_carry, CARRY))
    is_packed = takes_packed_args(fn)
    lifted = lifting.scan(
        ScopeKind(
            "scan", data_transform=data_transform, counts_first_run=check_constancy_invariants
        ),
        fn if is_packed else lambda scope, carry, xs: fn(scope, carry, *xs),
        in_axes=(roles_of(variable_axes, split_rngs, *first), CARRY, without_broadcast(in_axes)),
        out_axes=(CARRY, without_broadcast(out_axes)),
        length=length,
        reverse=reverse,
        unroll=unroll,
        split_transpose=_split_transpose,
        metadata=dict(metadata_params),
    )
    if is_packed:
        return lifted

    @functools.wraps(fn)
    def call(scope: object, carry: object, *xs: object) -> Any:
        return lifted(scope, carry, xs)

    return call


def remat_scan(
    body_fn: Fn,
    lengths: Sequence[int],
    policy: Callable[..., bool] | None = None,
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    variable_axes: Mapping[Any, VariableAxis] = {True: 0},
    split_rngs: Mapping[Any, bool] = {True: True},
) -> Fn:
    """Applies nested scans with rematerialization to `body_fn(scope, carry) -> carry`.

    Args:
        lengths: of the loops, the outermost first; `a * b` iterations store `a + b` carries.
        policy: selects further values to store, see `jax.checkpoint_policies`.
        variable_axes: see `scan`, as for the others; a variable has a new axis for each loop.
    """
    state = (variable_axes, variable_broadcast, variable_carry, split_rngs)

    def looped(inner: Fn, length: int) -> Fn:
        def body(scope: object, carry: object) -> tuple[Any, None]:
            return inner(scope, carry), None

        loop = scan(remat(body, prevent_cse=False, policy=policy), *state, length=length)
        return functools.wraps(body_fn)(lambda scope, carry: loop(scope, carry)[0])

    return functools.reduce(looped, reversed(lengths), body_fn)


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
