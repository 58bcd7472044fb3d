"""Loops and branches over functions of modules.

`variables` and `rngs` select the collections and PRNG streams that a function sees.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.core import lift
from weft.core.filters import Filter
from weft.linen.passengers import Carriage, Logged, arrive, board, inside

Fn = Callable[..., Any]


def while_loop(
    cond_fn: Fn,
    body_fn: Fn,
    mdl: Any,
    init: Any,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> Any:
    """Applies `jax.lax.while_loop` to functions of a module and returns the last carry.

    Args:
        cond_fn: `cond_fn(module, carry)` returns whether to continue; it changes no variables.
        body_fn: `body_fn(module, carry)` returns the next carry.
        carry_variables: collections that the body may change.
        broadcast_variables: collections that all iterations share.
        split_rngs: by filter of PRNG streams, whether each iteration has its own keys.
    """
    boarding, carriage, (init,), _ = board((body_fn, cond_fn), mdl, (init,))
    is_on, run = inside(cond_fn, 1), inside(body_fn)
    result = lift.while_loop(
        lambda carriage, carry: is_on(carriage, carry.value),
        lambda carriage, carry: Logged(run(carriage, carry.value), carriage),
        carriage,
        Logged(init, carriage),
        carry_variables,
        broadcast_variables,
        split_rngs,
    ).read(carriage)
    arrive(boarding, carriage)
    return result


def fori_loop(
    lower: Any,
    upper: Any,
    body_fn: Fn,
    mdl: Any,
    init: Any,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> Any:
    """Applies `jax.lax.fori_loop` to `body_fn(i, module, carry)`; see `while_loop`."""

    def body(mdl: Any, i: Any, carry: Any) -> Any:
        return body_fn(i, mdl, carry)

    boarding, carriage, (init,), _ = board((body_fn,), mdl, (init,))
    run = inside(body)
    result = lift.fori_loop(
        lower,
        upper,
        lambda i, carriage, carry: Logged(run(carriage, i, carry.value), carriage),
        carriage,
        Logged(init, carriage),
        carry_variables,
        broadcast_variables,
        split_rngs,
    ).read(carriage)
    arrive(boarding, carriage)
    return result


def cond(
    pred: Any,
    true_fun: Fn,
    false_fun: Fn,
    mdl: Any,
    *operands: Any,
    variables: Filter = True,
    rngs: Filter = True,
) -> Any:
    """Applies `jax.lax.cond` to functions of a module.

    Args:
        pred: whether `true_fun` runs.
        true_fun: `true_fun(module, *operands)`.
        false_fun: as `true_fun`, with a result of the same structure. Variables that only one of
            them creates are created for both.
        rngs: PRNG streams that both functions see; both draw the same keys.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import linen as nn
        >>> class Routed(nn.Module):
        ...     def setup(self):
        ...         self.one, self.other = nn.Dense(2), nn.Dense(2)
        ...     def __call__(self, x, first):
        ...         return nn.cond(first, lambda m, x: m.one(x), lambda m, x: m.other(x), self, x)
        >>> sorted(Routed().init(jax.random.key(0), jnp.ones(3), True)["params"])
        ['one', 'other']
    """
    fns = (true_fun, false_fun)
    boarding, carriage, operands, _ = board(fns, mdl, operands)
    lifted = (_branch(fn, i) for i, fn in enumerate(fns))
    result = lift.cond(pred, *lifted, carriage, *operands, variables=variables, rngs=rngs)
    result = result.read(carriage)
    arrive(boarding, carriage)
    return result


def _branch(fn: Fn, index: int) -> Fn:
    run = inside(fn, index)

    @functools.wraps(fn)
    def branch(carriage: Carriage, *operands: Any) -> Logged:
        return Logged(run(carriage, *operands), carriage)

    return branch


def switch(
    index: Any,
    branches: Sequence[Fn],
    mdl: Any,
    *operands: Any,
    variables: Filter = True,
    rngs: Filter = True,
) -> Any:
    """Applies `jax.lax.switch` to functions `branch(module, *operands)`; see `cond`."""
    fns = tuple(branches)
    boarding, carriage, operands, _ = board(fns, mdl, operands)
    lifted = [_branch(fn, i) for i, fn in enumerate(fns)]
    result = lift.switch(index, lifted, carriage, *operands, variables=variables, rngs=rngs)
    result = result.read(carriage)
    arrive(boarding, carriage)
    return result
