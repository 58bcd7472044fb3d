"""Derivatives with respect to arguments and groups of state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.crossing import Cargo, Kind, Results, Units, commit, depart, is_parcel, run
from weft.lifting.names import named_after
from weft.lifting.roles import DIFF


class _Differentiable:
    """Call as a function of the values to differentiate, selected by `wrt`."""

    def __init__(self, kind: Kind, fn: Callable[..., Any], args: Any, wrt: Any, has_aux: bool):
        self.outer, cargo = depart(kind, args, wrt, "wrt")
        units = Units.of_cargo(cargo)

        def pure(diff: list[Any]) -> tuple[Any, Results]:
            """Returns the result, and all other outputs."""
            inside = Cargo(cargo.static, units.merged(DIFF, diff).packed())
            results = run(kind, lambda args: fn(*args), inside)
            value, aux = results.packed if has_aux else (results.packed, None)
            return value, results._replace(packed=aux)

        self.units, self.pure, self._kind = units, named_after(fn, pure), kind

    @property
    def inputs(self) -> list[Any]:
        return self.units.with_roles(DIFF)

    def commit(self, results: Results) -> Any:
        return commit(self._kind, self.outer, results)


def as_args(units: Units, values: list[Any]) -> Any:
    """Returns the values with role DIFF in the tree of the arguments, None elsewhere."""
    by_unit = units.emptied().merged(DIFF, values).packed()
    return jax.tree.map(lambda x: x.groups if is_parcel(x) else x, by_unit, is_leaf=is_parcel)


def value_and_grad(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    wrt: Any,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.value_and_grad` to a function that takes carriers.

    Args:
        fn: returns a scalar, or with `has_aux` a pair of a scalar and any auxiliary output.
        wrt: a prefix of the arguments: DIFF to differentiate, None elsewhere, `Roles` for a
            carrier.
        holomorphic, allow_int: see `jax.grad`.

    Returns:
        A function that returns the result of `fn` and the gradients: a tree like the arguments,
            with None for arguments without gradients and, for a carrier, a tuple with one entry per
            group.
    """

    def call(*args: Any) -> tuple[Any, Any]:
        of_call = _Differentiable(kind, fn, args, wrt, has_aux)
        differentiated = jax.value_and_grad(
            of_call.pure, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )
        (value, results), grads = differentiated(of_call.inputs)
        aux = of_call.commit(results)
        return (value, aux) if has_aux else value, as_args(of_call.units, grads)

    return call


def grad(kind: Kind, fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """Returns the gradients of `value_and_grad`; with `has_aux`, and the auxiliary output."""
    both = value_and_grad(kind, fn, **kwargs)

    def call(*args: Any) -> Any:
        value, grads = both(*args)
        return (grads, value[1]) if kwargs.get("has_aux") else grads

    return call


def vjp(
    kind: Kind, fn: Callable[..., Any], *, wrt: Any, has_aux: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Applies `jax.vjp` to a function that takes carriers; see `value_and_grad` for the arguments.

    Returns:
        A function that returns the result of `fn`, a function from its cotangent to gradients as in
        `value_and_grad`, and with `has_aux` the auxiliary output.
    """

    def call(*args: Any) -> tuple[Any, ...]:
        of_call = _Differentiable(kind, fn, args, wrt, has_aux)
        value, pullback, results = jax.vjp(of_call.pure, of_call.inputs, has_aux=True)
        aux = of_call.commit(results)
        empty = of_call.units.emptied()

        def backward(pullback: Callable[[Any], Any], cotangent: Any) -> Any:
            (grads,) = pullback(cotangent)
            return as_args(empty, grads)

        # A pytree of the residuals, so that it can leave a transformation.
        of_value = jax.tree_util.Partial(backward, pullback)
        return (value, of_value, aux) if has_aux else (value, of_value)

    return call


def jvp(
    kind: Kind, fn: Callable[..., Any], *, wrt: Any, has_aux: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Applies `jax.jvp` to a function that takes carriers; see `value_and_grad` for the arguments.

    Returns:
        `call(args, tangents)`, where `tangents` has one tangent for each argument and group of
        state with role DIFF, in order. It returns the result of `fn`, its tangent, and with
        `has_aux` the auxiliary output.
    """

    def call(args: tuple[Any, ...], tangents: list[Any]) -> tuple[Any, ...]:
        of_call = _Differentiable(kind, fn, args, wrt, has_aux)
        value, tangent, results = jax.jvp(
            of_call.pure, (of_call.inputs,), (tangents,), has_aux=True
        )
        aux = of_call.commit(results)
        return (value, tangent, aux) if has_aux else (value, tangent)

    return call
