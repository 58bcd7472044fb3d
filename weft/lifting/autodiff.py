"""Derivatives with respect to arguments and groups of state, custom rules, and remat."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from weft.lifting import kind as kind_lib
from weft.lifting import roles
from weft.lifting.kind import Kind, PureArgs, PureResults, Static
from weft.lifting.signature import named_after
from weft.lifting.static_keys import jax_products
from weft.lifting.units import Units
from weft.typing import Fn


class _Call:
    """Call as a function of the values to differentiate, selected by `wrt`, and of the rest."""

    def __init__(self, kind: Kind, args: object, wrt: object, call: Fn | None = None):
        self._kind = kind
        self._outer, pure_args = kind_lib.split_args(kind, args, wrt, "wrt", call=call)
        units = Units.of_pure_args(kind, pure_args)
        self.diff = units.values_with_role(roles.DIFF)
        self.rest = [None if unit.role is roles.DIFF else value for unit, value in units.items()]
        # Values that outlive the call hold no arrays of it.
        self.units = units.mapped(lambda value, role: None)
        self.run = functools.partial(_run, self.units)

    def pure(self, fn: Fn, has_aux: bool) -> Callable[[list[Any]], Any]:
        """Returns the function from `diff` to the result of `fn`, and all other outputs."""

        def of_diff(diff: list[Any]) -> tuple[Any, PureResults]:
            results = self.run(fn, diff, self.rest)
            value, aux = results.packed if has_aux else (results.packed, None)
            return value, results._replace(packed=aux)

        return named_after(fn, of_diff)

    def write_back(self, results: PureResults) -> Any:
        return kind_lib.commit_results(self._kind, self._outer, results)


def _run(units: Units, fn: Fn, diff: list[Any], rest: list[Any]) -> PureResults:
    inside = units.with_values(rest).with_role_replaced(roles.DIFF, diff)
    return kind_lib.call_pure(units.kind, fn, inside.pure_args())


def in_args_tree(units: Units, values: list[Any]) -> Any:
    """Returns values for the role DIFF in the tree of the arguments; `units` are without values."""
    by_unit = units.with_role_replaced(roles.DIFF, values).packed()
    return jax.tree.map(
        lambda x: x.groups if kind_lib.is_state_node(x) else x,
        by_unit,
        is_leaf=kind_lib.is_state_node,
    )


def value_and_grad(
    kind: Kind,
    fn: Fn,
    *,
    wrt: object,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.value_and_grad` to a function that takes carriers.

    Args:
        fn: returns a scalar, or with `has_aux` a pair of a scalar and any auxiliary output.
        wrt: a prefix of the arguments: DIFF to differentiate, else None; `Roles` for a carrier.
        holomorphic, allow_int: see `jax.grad`.

    Returns a function that returns the result of `fn` and the gradients: a tree like the arguments,
    with None for arguments without gradients and, for a carrier, a tuple with one entry per group.
    """

    def call(*args: object) -> tuple[Any, Any]:
        of_call = _Call(kind, args, wrt, call)
        pure = of_call.pure(fn, has_aux)
        differentiated = jax.value_and_grad(
            pure, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )
        (value, results), grads = differentiated(of_call.diff)
        aux = of_call.write_back(results)
        return (value, aux) if has_aux else value, in_args_tree(of_call.units, grads)

    return call


def grad(kind: Kind, fn: Fn, **kwargs: Any) -> Fn:
    """Returns the gradients of `value_and_grad`; with `has_aux`, and the auxiliary output."""
    both = value_and_grad(kind, fn, **kwargs)

    def call(*args: object) -> Any:
        value, grads = both(*args)
        return (grads, value[1]) if kwargs.get("has_aux") else grads

    return call


def vjp(
    kind: Kind, fn: Fn, *, wrt: object, has_aux: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Applies `jax.vjp` to a function that takes carriers; see `value_and_grad` for the arguments.

    Returns a function that returns the result of `fn`, a function from its cotangent to gradients
    as in `value_and_grad`, and with `has_aux` the auxiliary output.
    """

    def call(*args: object) -> tuple[Any, ...]:
        of_call = _Call(kind, args, wrt, call)
        value, pullback, results = jax.vjp(of_call.pure(fn, has_aux), of_call.diff, has_aux=True)
        aux = of_call.write_back(results)
        units = of_call.units

        def backward(pullback: Callable[[Any], Any], cotangent: object) -> Any:
            (grads,) = pullback(cotangent)
            return in_args_tree(units, grads)

        # A pytree of the residuals, so that it can leave a transformation.
        of_value = jax.tree_util.Partial(backward, pullback)
        return (value, of_value, aux) if has_aux else (value, of_value)

    return call


def jvp(
    kind: Kind, fn: Fn, *, wrt: object, has_aux: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Applies `jax.jvp` to a function that takes carriers; see `value_and_grad` for the arguments.

    Returns `call(args, tangents)`, with one tangent for each argument and group of state with role
    DIFF, in order. It returns the result of `fn`, its tangent, and with `has_aux` the output.
    """

    def call(args: tuple[Any, ...], tangents: list[Any]) -> tuple[Any, ...]:
        # The tangents are of existing state, so none can be created before.
        of_call = _Call(kind, args, wrt)
        pure = of_call.pure(fn, has_aux)
        value, tangent, results = jax.jvp(pure, (of_call.diff,), (tangents,), has_aux=True)
        aux = of_call.write_back(results)
        return (value, tangent, aux) if has_aux else (value, tangent)

    return call


def custom_vjp(
    kind: Kind, fn: Fn, forward_fn: Fn, backward_fn: Fn, *, wrt: object, of_state: bool = False
) -> Fn:
    """Applies `jax.custom_vjp` to a function that takes carriers.

    The state that `fn` changes comes from `forward_fn` when derivatives are taken.

    Args:
        forward_fn: takes the same arguments; returns the result of `fn`, and residuals.
        backward_fn: takes the residuals and a cotangent of the result; returns one gradient for
            each argument and group of state with role DIFF, in order.
        wrt: a prefix of the arguments: DIFF for gradients of `backward_fn`, None elsewhere.
        of_state: whether `backward_fn` also takes the cotangents of changed state, which are the
            groups of each carrier, and the collected static half.
    """

    def call(*args: object) -> Any:
        of_call = _Call(kind, args, wrt, call)
        run = of_call.run

        def forward(diff: list[Any], rest: list[Any]) -> tuple[PureResults, Any]:
            results = run(forward_fn, diff, rest)
            value, residuals = results.packed
            return results._replace(packed=value), residuals

        def backward(residuals: object, cotangents: PureResults) -> tuple[list[Any], None]:
            static, groups = cotangents.static.value, [p.groups for p in cotangents.state_nodes]
            more = (groups, static) if of_state else ()
            return list(backward_fn(residuals, cotangents.packed, *more)), None

        with_rule = jax.custom_vjp(named_after(fn, lambda diff, rest: run(fn, diff, rest)))
        with_rule.defvjp(named_after(forward_fn, forward), named_after(backward_fn, backward))
        # JAX fails to transpose a scan whose stacked result has None as its gradient.
        fixed = jax.tree.map(
            lambda x: x if isinstance(x, jax.Ref) else jax.lax.stop_gradient(x), of_call.rest
        )
        return of_call.write_back(with_rule(of_call.diff, fixed))

    return call


def custom_jvp(
    kind: Kind,
    fn: Fn,
    jvp_fn: Fn,
    *,
    wrt: object,
    pack_tangent: Callable[[PureResults, Any, list[Any]], PureResults] | None = None,
) -> Fn:
    """Applies `jax.custom_jvp` to a function that takes carriers.

    The state that `fn` changes comes from `jvp_fn` when derivatives are taken.

    Args:
        jvp_fn: `jvp_fn(tangents, *args)`, with one tangent for each argument and group of state
            with role DIFF, in order. It returns the result of `fn` and its tangent.
        wrt: a prefix of the arguments: DIFF for tangents of `jvp_fn`, None elsewhere.
        pack_tangent: returns the tangents of the outputs; takes these, the tangent that `jvp_fn`
            returns, and the tangents that it takes. By default those of changed state are zero.
    """

    def call(*args: Any) -> Any:
        of_call = _Call(kind, args, wrt, call)
        run = of_call.run

        def rule(primals: Any, tangents: Any) -> tuple[PureResults, PureResults]:
            tangent: Any = None

            def value(*args: object) -> Any:
                nonlocal tangent
                result, tangent = jvp_fn(tangents[0], *args)
                return result

            results = run(value, *primals)
            if pack_tangent is not None:
                return results, pack_tangent(results, tangent, tangents[0])
            zeros = jax.tree.map(jax.custom_derivatives.zero_from_primal, results)
            return results, zeros._replace(packed=tangent)

        with_rule = jax.custom_jvp(named_after(fn, lambda diff, rest: run(fn, diff, rest)))
        with_rule.defjvp(named_after(jvp_fn, rule))
        return of_call.write_back(with_rule(of_call.diff, of_call.rest))

    return call


def remat(
    kind: Kind,
    fn: Fn,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
    in_axes: object = None,
) -> Fn:
    """Applies `jax.checkpoint` to a function that takes carriers.

    `in_axes` is a prefix of the arguments, of whose `Roles` only the filters are used.
    """

    def pure(products: Static, pure_args: PureArgs) -> PureResults:
        return kind_lib.call_pure(kind, fn, pure_args)

    rematerialized = jax.checkpoint(named_after(fn, pure), prevent_cse=prevent_cse, policy=policy)  # pyright: ignore[reportArgumentType]

    def call(*args: object) -> Any:
        outer, pure_args = kind_lib.split_args(kind, args, in_axes, call=call)
        return kind_lib.commit_results(
            kind, outer, rematerialized(Static(jax_products()), pure_args)
        )

    return call
