"""Derivatives with respect to arguments and groups of state, custom rules, and remat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.kind import (
    Kind,
    PureArgs,
    PureResults,
    Static,
    call_pure,
    commit_results,
    is_state_node,
    split_args,
)
from weft.lifting.roles import DIFF, Role
from weft.lifting.signature import named_after
from weft.lifting.static_keys import jax_products
from weft.lifting.units import Units
from weft.typing import Fn, PyTree


class _Call:
    """Call as a function of the values to differentiate, selected by `wrt`, and of the others.

    Attributes:
        diff_values: the values with the role DIFF.
        other_values: one value per unit, None for those with the role DIFF.
        units: the units without values, since functions that outlive the call hold no arrays of it.
    """

    # JAX differentiates functions of pytrees, and all leaves: the other values have to be apart.
    def __init__(
        self, kind: Kind, args: PyTree, wrt: PyTree, call: Fn | None = None
    ):
        self._kind = kind
        self._outer, pure_args = split_args(kind, args, wrt, "wrt", call=call)
        units = Units.of_pure_args(kind, pure_args)
        self.diff_values = units.values_with_role(DIFF)
        self.other_values = units.mapped(_without_diff).values
        self.units = units.mapped(lambda value, role: None)

    def pure(
        self, fn: Fn, has_aux: bool
    ) -> Callable[[list[PyTree]], tuple[PyTree, PureResults]]:
        """Returns the function from `diff_values` to the result of `fn`, and all other outputs."""
        run = _runner(self.units, fn)

        def of_diff_values(
            diff_values: list[PyTree],
        ) -> tuple[PyTree, PureResults]:
            results = run(diff_values, self.other_values)
            value, aux = results.packed if has_aux else (results.packed, None)
            return value, results._replace(packed=aux)

        return named_after(fn, of_diff_values)

    def write_back(self, results: PureResults) -> PyTree:
        """Writes changes of state; returns the function's own results."""
        return commit_results(self._kind, self._outer, results)


def _without_diff(value: PyTree, role: Role) -> PyTree:
    return None if role is DIFF else value


def _runner(
    units: Units, fn: Fn
) -> Callable[[list[PyTree], list[PyTree]], PureResults]:
    """Returns `fn` as a function of the values to differentiate and the others."""

    def run(
        diff_values: list[PyTree], other_values: list[PyTree]
    ) -> PureResults:
        inside = units.with_values(other_values).with_role_replaced(
            DIFF, diff_values
        )
        return call_pure(units.kind, fn, inside.pure_args())

    return named_after(fn, run)


def in_args_tree(units: Units, values: list[PyTree]) -> PyTree:
    """Returns values for the role DIFF in the tree of the arguments; `units` are without values."""
    packed = units.with_role_replaced(DIFF, values).packed()

    def groups_of_node(leaf: PyTree) -> PyTree:
        return leaf.groups if is_state_node(leaf) else leaf

    return jax.tree.map(groups_of_node, packed, is_leaf=is_state_node)


def value_and_grad(
    kind: Kind,
    fn: Fn,
    *,
    wrt: PyTree,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Applies `jax.value_and_grad` to a function that takes carriers.

    Args:
        fn: returns a scalar, or with `has_aux` a pair of a scalar and any auxiliary output.
        wrt: a prefix of the arguments: DIFF to differentiate, else None; `Roles` for a carrier.
        holomorphic, allow_int: see `jax.grad`.

    Returns a function that returns the result of `fn` and the gradients: a tree like the arguments,
    with None for arguments without gradients and, for a carrier, a tuple with one entry per group.
    """

    def call(*args: PyTree) -> tuple[PyTree, PyTree]:
        this_call = _Call(kind, args, wrt, call)
        differentiated = jax.value_and_grad(
            this_call.pure(fn, has_aux),
            has_aux=True,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
        (value, results), diff_grads = differentiated(this_call.diff_values)
        aux = this_call.write_back(results)
        grads = in_args_tree(this_call.units, diff_grads)
        if has_aux:
            return (value, aux), grads
        return value, grads

    return call


def grad(kind: Kind, fn: Fn, *, has_aux: bool = False, **options: Any) -> Fn:
    """Returns the gradients of `value_and_grad`; with `has_aux`, and the auxiliary output."""
    differentiated = value_and_grad(kind, fn, has_aux=has_aux, **options)

    def call(*args: PyTree) -> PyTree:
        value, grads = differentiated(*args)
        if has_aux:
            _, aux = value
            return grads, aux
        return grads

    return call


def vjp(
    kind: Kind, fn: Fn, *, wrt: PyTree, has_aux: bool = False
) -> Callable[..., tuple[PyTree, ...]]:
    """Applies `jax.vjp` to a function that takes carriers; see `value_and_grad` for the arguments.

    Returns a function that returns the result of `fn`, a function from its cotangent to gradients
    as in `value_and_grad`, and with `has_aux` the auxiliary output.
    """

    def call(*args: PyTree) -> tuple[PyTree, ...]:
        this_call = _Call(kind, args, wrt, call)
        pure = this_call.pure(fn, has_aux)
        value, pullback, results = jax.vjp(
            pure, this_call.diff_values, has_aux=True
        )
        aux = this_call.write_back(results)
        units = this_call.units

        def backward(
            pullback: Callable[[PyTree], tuple[PyTree]], cotangent: PyTree
        ) -> PyTree:
            (diff_grads,) = pullback(cotangent)
            return in_args_tree(units, diff_grads)

        # A pytree of the residuals, so that it can leave a transformation.
        backward_of_value = jax.tree_util.Partial(backward, pullback)
        if has_aux:
            return value, backward_of_value, aux
        return value, backward_of_value

    return call


def jvp(
    kind: Kind, fn: Fn, *, wrt: PyTree, has_aux: bool = False
) -> Callable[..., tuple[PyTree, ...]]:
    """Applies `jax.jvp` to a function that takes carriers; see `value_and_grad` for the arguments.

    Returns `call(args, tangents)`, with one tangent for each argument and group of state with role
    DIFF, in order. It returns the result of `fn`, its tangent, and with `has_aux` the output.
    """

    def call(
        args: tuple[PyTree, ...], tangents: list[PyTree]
    ) -> tuple[PyTree, ...]:
        # The tangents are of existing state, so none can be created before.
        this_call = _Call(kind, args, wrt)
        pure = this_call.pure(fn, has_aux)
        primals = (this_call.diff_values,)
        value, tangent, results = jax.jvp(
            pure, primals, (tangents,), has_aux=True
        )
        aux = this_call.write_back(results)
        if has_aux:
            return value, tangent, aux
        return value, tangent

    return call


def custom_vjp(
    kind: Kind,
    fn: Fn,
    forward_fn: Fn,
    backward_fn: Fn,
    *,
    wrt: PyTree,
    of_state: bool = False,
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

    def call(*args: PyTree) -> PyTree:
        this_call = _Call(kind, args, wrt, call)
        run_forward = _runner(this_call.units, forward_fn)

        def forward(
            diff_values: list[PyTree], other_values: list[PyTree]
        ) -> tuple[PureResults, PyTree]:
            results = run_forward(diff_values, other_values)
            value, residuals = results.packed
            return results._replace(packed=value), residuals

        def backward(
            residuals: PyTree, cotangents: PureResults
        ) -> tuple[list[PyTree], None]:
            state_cotangents = ()
            if of_state:
                groups = [node.groups for node in cotangents.state_nodes]
                state_cotangents = groups, cotangents.static.value
            grads = backward_fn(residuals, cotangents.packed, *state_cotangents)
            return list(grads), None

        def without_gradient(leaf: PyTree) -> PyTree:
            # JAX fails to transpose a scan whose stacked result has None as its gradient.
            return (
                leaf
                if isinstance(leaf, jax.Ref)
                else jax.lax.stop_gradient(leaf)
            )

        with_rule = jax.custom_vjp(_runner(this_call.units, fn))
        with_rule.defvjp(
            named_after(forward_fn, forward), named_after(backward_fn, backward)
        )
        other_values = jax.tree.map(without_gradient, this_call.other_values)
        return this_call.write_back(
            with_rule(this_call.diff_values, other_values)
        )

    return call


def custom_jvp(
    kind: Kind,
    fn: Fn,
    jvp_fn: Fn,
    *,
    wrt: PyTree,
    pack_tangent: Callable[[PureResults, PyTree, list[PyTree]], PureResults]
    | None = None,
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

    def call(*args: PyTree) -> PyTree:
        this_call = _Call(kind, args, wrt, call)
        units = (
            this_call.units
        )  # without the call's values, since JAX keeps the rule

        def rule(
            primals: tuple[list[PyTree], list[PyTree]],
            tangents: tuple[list[PyTree], PyTree],
        ) -> tuple[PureResults, PureResults]:
            diff_tangents, _ = tangents
            tangent: PyTree = None

            def primal_fn(*args: PyTree) -> PyTree:
                nonlocal tangent
                value, tangent = jvp_fn(diff_tangents, *args)
                return value

            results = _runner(units, primal_fn)(*primals)
            if pack_tangent is not None:
                return results, pack_tangent(results, tangent, diff_tangents)
            zeros: PureResults = jax.tree.map(
                jax.custom_derivatives.zero_from_primal, results
            )
            return results, zeros._replace(packed=tangent)

        with_rule = jax.custom_jvp(_runner(units, fn))
        with_rule.defjvp(named_after(jvp_fn, rule))
        return this_call.write_back(
            with_rule(this_call.diff_values, this_call.other_values)
        )

    return call


def remat(
    kind: Kind,
    fn: Fn,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
    in_axes: PyTree = None,
) -> Fn:
    """Applies `jax.checkpoint` to a function that takes carriers.

    `in_axes` is a prefix of the arguments, of whose `Roles` only the filters are used.
    """

    def pure(products: Static, pure_args: PureArgs) -> PureResults:
        return call_pure(kind, fn, pure_args)

    rematerialized = jax.checkpoint(
        named_after(fn, pure), prevent_cse=prevent_cse, policy=policy
    )  # pyright: ignore[reportArgumentType]

    def call(*args: PyTree) -> PyTree:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        # JAX keeps the trace, which depends on the products that it found.
        results = rematerialized(Static(jax_products()), pure_args)
        return commit_results(kind, outer, results)

    return call
