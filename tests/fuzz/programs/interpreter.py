"""Evaluates what JAX has traced, operation by operation: compiling a program takes much longer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from weft.lifting.state_creation import consts_and_carry


def interpreted(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `jax.jit(f)`, without a compiler."""

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        flat = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return call


def evaluate(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    env: dict[Any, Any] = {}
    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        special = SPECIAL.get(eqn.primitive.name)
        if special is not None:
            results = special(values, **eqn.params)
        else:
            # JAX would compile each operation inside of a shard_map by itself, every time.
            run = compiled(eqn) if eqn.primitive.name == "shard_map" else bound(eqn)
            results = run(*values)
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def bound(eqn: Any) -> Callable[..., Any]:
    return functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(eqn.params))


@functools.lru_cache(maxsize=32)
def compiled(eqn: Any) -> Callable[..., Any]:
    return jax.jit(lambda *values: [*bound(eqn)(*values)])


def closed(of: ClosedJaxpr, args: Any) -> list[Any]:
    return evaluate(of.jaxpr, of.consts, args)


def call(values: Any, *, jaxpr: Any, **_: Any) -> list[Any]:
    return closed(jaxpr, values) if isinstance(jaxpr, ClosedJaxpr) else evaluate(jaxpr, [], values)


def custom(values: Any, *, call_jaxpr: Any, **_: Any) -> list[Any]:
    return closed(call_jaxpr, values)


def scan(
    values: Any,
    *,
    jaxpr: Any,
    length: int,
    reverse: bool,
    **params: Any,
) -> list[Any]:
    num_consts, num_carry = consts_and_carry(params)
    consts, values = values[:num_consts], values[num_consts:]
    carry, xs = values[:num_carry], values[num_carry:]
    ys: list[Any] = [None] * length
    for k in reversed(range(length)) if reverse else range(length):
        results = closed(jaxpr, [*consts, *carry, *(x[k] for x in xs)])
        carry, ys[k] = results[:num_carry], results[num_carry:]
    avals = [v.aval for v in jaxpr.jaxpr.outvars[num_carry:]]
    if not length:
        return [*carry, *(jnp.zeros((0, *a.shape), a.dtype) for a in avals)]
    return [*carry, *(jnp.stack(y) for y in zip(*ys, strict=True))]


def while_loop(
    values: Any, *, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int, **_: Any
) -> list[Any]:
    of_cond, values = values[:cond_nconsts], values[cond_nconsts:]
    of_body, carry = values[:body_nconsts], values[body_nconsts:]
    while closed(cond_jaxpr, [*of_cond, *carry])[0]:
        carry = closed(body_jaxpr, [*of_body, *carry])
    return carry


def cond(values: Any, *, branches: Any, **_: Any) -> list[Any]:
    return closed(branches[min(max(int(values[0]), 0), len(branches) - 1)], values[1:])


SPECIAL = {
    "jit": call,
    "pjit": call,
    "remat2": call,
    "checkpoint": call,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "custom_jvp_call": custom,
    "custom_vjp_call": custom,
}
