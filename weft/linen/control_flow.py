"""Loops and branches over functions of modules.

`variables` and `rngs` select the collections and PRNG streams that a function sees. A bound method
`self.method` is called as `method(module, ...)`, with the module inside of the transformation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from weft.core import lift
from weft.core.filters import Filter
from weft.linen.module_kind import lifted_call, merge_modules, unbound
from weft.typing import ArrayLike, Fn


def while_loop(
    cond_fn: Fn,
    body_fn: Fn,
    mdl: object,
    init: object,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> Any:
    """Applies `jax.lax.while_loop` to functions of a module and returns the last carry.

    Args:
        cond_fn: `cond_fn(module, carry)` returns whether to continue; it changes no variables.
        body_fn: `body_fn(module, carry)` returns the next carry.
        carry_variables: collections that the body may change.
        split_rngs: by filter of PRNG streams, whether each iteration has its own keys.
    """
    cond_fn, body_fn = unbound(cond_fn), unbound(body_fn)
    fns = merge_modules(cond_fn, 1), merge_modules(body_fn)
    state = carry_variables, broadcast_variables, split_rngs
    with lifted_call((body_fn, cond_fn), mdl, (init,)) as (module_state, (init,)):
        return lift.while_loop(*fns, module_state, init, *state)


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Fn,
    mdl: object,
    init: object,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> Any:
    """Applies `jax.lax.fori_loop` to `body_fn(i, module, carry)`; see `while_loop`."""

    def body(mdl: object, i: object, carry: object) -> Any:
        return body_fn(i, mdl, carry)

    run = merge_modules(body)
    lifted: Fn = lambda i, module_state, carry: run(module_state, i, carry)  # noqa: E731
    state = carry_variables, broadcast_variables, split_rngs
    with lifted_call((body_fn,), mdl, (init,)) as (module_state, (init,)):
        return lift.fori_loop(lower, upper, lifted, module_state, init, *state)


def cond(
    pred: ArrayLike,
    true_fun: Fn,
    false_fun: Fn,
    mdl: object,
    *operands: object,
    variables: Filter = True,
    rngs: Filter = True,
) -> Any:
    """Applies `jax.lax.cond` to functions of a module.

    Args:
        false_fun: as `true_fun`, with a result of the same structure. Variables that only one of
            them creates are created for both.
        rngs: PRNG streams that both functions see; both draw the same keys.

    >>> class Routed(nn.Module):
    ...     def setup(self):
    ...         self.one, self.other = nn.Dense(2), nn.Dense(2)
    ...     def __call__(self, x, first):
    ...         return nn.cond(first, lambda m, x: m.one(x), lambda m, x: m.other(x), self, x)
    >>> sorted(Routed().init(jax.random.key(0), jnp.ones(3), True)["params"])
    ['one', 'other']
    """
    fns = (unbound(true_fun), unbound(false_fun))
    lifted = (merge_modules(fn, i) for i, fn in enumerate(fns))
    with lifted_call(fns, mdl, operands) as (module_state, operands):
        return lift.cond(pred, *lifted, module_state, *operands, variables=variables, rngs=rngs)


def switch(
    index: ArrayLike,
    branches: Sequence[Fn],
    mdl: object,
    *operands: object,
    variables: Filter = True,
    rngs: Filter = True,
) -> Any:
    """Applies `jax.lax.switch` to functions `branch(module, *operands)`; see `cond`."""
    fns = tuple(map(unbound, branches))
    lifted = [merge_modules(fn, i) for i, fn in enumerate(fns)]
    with lifted_call(fns, mdl, operands) as (module_state, operands):
        return lift.switch(index, lifted, module_state, *operands, variables=variables, rngs=rngs)
