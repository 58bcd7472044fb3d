"""Derivatives of functions of scopes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft import lifting
from weft.core.filters import Filter
from weft.core.lift.common import Fn
from weft.core.scope import Scope
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.errors import TransformArgumentError
from weft.lifting import DIFF, Roles
from weft.lifting.argnums import check_argnums


def _wrt(of_diff: Filter, variables: Filter, rngs: Filter) -> tuple[Roles, Any]:
    """What is differentiated: some collections, and all arguments."""
    return Roles(((Select(of_diff), DIFF), (Select(variables, rngs), None))), DIFF


def _variables(grads: Any) -> Any:
    """The gradients of collections, where the gradients of groups are."""

    def is_groups(x: Any) -> bool:
        return isinstance(x, tuple) and len(x) > 0 and isinstance(x[0], Group)

    return jax.tree.map(lambda groups: groups[0].variables, grads, is_leaf=is_groups)


def vjp(
    fn: Fn,
    scope: Any,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: tuple[()] = (),
    vjp_variables: Filter = "params",
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, ...]:
    """`jax.vjp` of `fn(scope, *primals)`.

    Args:
        fn: the function; with `has_aux` it returns a pair of its result and anything.
        scope: the scope.
        *primals: the arguments.
        has_aux: whether `fn` returns a pair.
        reduce_axes: (); JAX has no other form any more.
        vjp_variables: the collections of which gradients are taken.
        variables: the other collections that `fn` sees.
        rngs: the PRNG streams that it sees.

    Returns:
        The result, a function from its cotangent to the gradients of the collections and of each
        argument, and with `has_aux` the rest.
    """
    _check_reduce_axes(reduce_axes)
    lifted = lifting.vjp(
        ScopeKind("vjp"),
        lambda scope, primals: fn(scope, *primals),
        wrt=_wrt(vjp_variables, variables, rngs),
        has_aux=has_aux,
    )
    value, pullback, *aux = lifted(scope, primals)
    return value, jax.tree_util.Partial(_pulled_back, pullback), *aux


def _pulled_back(pullback: Callable[[Any], Any], cotangent: Any) -> tuple[Any, ...]:
    of_scope, of_primals = pullback(cotangent)
    return _variables(of_scope), *of_primals


def value_and_grad(
    fn: Fn,
    scope: Any,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: tuple[()] = (),
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, ...]:
    """`jax.value_and_grad` of `fn(scope, *primals)`, with gradients of each of `primals`.

    Args:
        fn: returns a scalar, or with `has_aux` a pair of a scalar and anything.
        scope: the scope.
        *primals: the arguments.
        has_aux: whether `fn` returns a pair.
        reduce_axes: (); JAX has no other form any more.
        variables: the collections that `fn` sees.
        rngs: the PRNG streams that it sees.

    Returns:
        The result of `fn`, with `has_aux` the rest, and a tuple with the gradient of each argument:
        two or three values, where `weft.linen.value_and_grad` and JAX return a pair of the result
        and the rest.
    """
    _check_reduce_axes(reduce_axes)
    lifted = lifting.value_and_grad(
        ScopeKind("value_and_grad"),
        lambda scope, primals: fn(scope, *primals),
        wrt=_wrt(False, variables, rngs),
        has_aux=has_aux,
    )
    value, (_, grads) = lifted(scope, primals)
    return (*value, grads) if has_aux else (value, grads)


def grad(fn: Fn, scope: Any, *primals: Any, has_aux: bool = False, **kwargs: Any) -> Any:
    """The gradients of `value_and_grad`; with `has_aux` also the rest.

    Args:
        fn: see `value_and_grad`.
        scope: see `value_and_grad`.
        *primals: see `value_and_grad`.
        has_aux: see `value_and_grad`.
        **kwargs: see `value_and_grad`.
    """
    _, *aux, grads = value_and_grad(fn, scope, *primals, has_aux=has_aux, **kwargs)
    return (grads, *aux) if has_aux else grads


def jvp(
    fn: Fn,
    scope: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    variable_tangents: Any,
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, Any]:
    """`jax.jvp` of `fn(scope, *primals)`.

    Args:
        fn: the function.
        scope: the scope, or a pytree of scopes.
        primals: the arguments.
        tangents: their tangents.
        variable_tangents: the tangents of the variables of some collections, by collection; of
            several scopes, a pytree of those.
        variables: the other collections that `fn` sees.
        rngs: the PRNG streams that it sees.

    Returns:
        The result and its tangent.
    """
    of_scopes = [
        # Tangents of variables that are still to be made are empty.
        {col: tangents for col, tangents in of_scope.items() if jax.tree.leaves(tangents)}
        for of_scope in _structure_of_scopes(scope).flatten_up_to(variable_tangents)
    ]
    cols = {col for of_scope in of_scopes for col in of_scope}
    lifted = lifting.jvp(
        ScopeKind("jvp"),
        lambda scope, primals: fn(scope, *primals),
        wrt=_wrt(cols, variables, rngs),
    )
    groups = [Group(of_scope, {}, {}) for of_scope in of_scopes]
    return lifted((scope, tuple(primals)), [*groups, *jax.tree.leaves(tuple(tangents))])


def custom_vjp(
    fn: Fn,
    forward_fn: Fn,
    backward_fn: Fn,
    grad_vars: Filter = "params",
    nondiff_argnums: Sequence[int] = (),
) -> Fn:
    """`jax.custom_vjp` of `fn(scope, *args)`.

    Args:
        fn: the function.
        forward_fn: takes the same arguments; returns the result of `fn` and what `backward_fn`
            needs, such as the function that `vjp` returns.
        backward_fn: `backward_fn(*nondiff, needed, cotangent)` returns the gradients of the
            collections `grad_vars`, and that of each argument that is not in `nondiff_argnums`.
        grad_vars: the collections with gradients.
        nondiff_argnums: the arguments without; 0 is the scope.

    Example:
        >>> from weft.core import init, lift, nn
        >>> def forward(scope, x, features):
        ...     return lift.vjp(lambda scope, x: nn.dense(scope, x, features), scope, x)
        >>> def backward(features, pullback, cotangent):
        ...     params, *rest = pullback(cotangent)
        ...     return jax.tree.map(jax.numpy.sign, params), *rest
        >>> dense = lift.custom_vjp(nn.dense, forward, backward, nondiff_argnums=(2,))
        >>> y, _ = init(dense)(jax.random.key(0), jax.numpy.ones(3), 2)
        >>> y.shape
        (2,)
    """
    check_argnums("lift.custom_vjp", "nondiff_argnums", fn, nondiff_argnums)

    @functools.wraps(fn)
    def call(scope: Any, *args: Any) -> Any:
        nondiff, diff, together = _divided(args, nondiff_argnums)
        scopes, of_args = _structure_of_scopes(scope), jax.tree.structure(diff)
        lifted = lifting.custom_vjp(
            ScopeKind("custom_vjp"),
            lambda scope, diff: fn(scope, *together(diff)),
            lambda scope, diff: forward_fn(scope, *together(diff)),
            lambda needed, cotangent: _as_units(
                backward_fn(*nondiff, needed, cotangent), scopes, of_args
            ),
            wrt=_wrt(grad_vars, True, True),
        )
        return lifted(scope, diff)

    return call


def custom_jvp(
    fn: Fn,
    jvp_fn: Fn,
    grad_vars: Filter = "params",
    nondiff_argnums: Sequence[int] = (),
) -> Fn:
    """`jax.custom_jvp` of `fn(scope, *args)`.

    Args:
        fn: the function.
        jvp_fn: `jvp_fn(*nondiff, scope, primals, tangents, variable_tangents)` returns the result
            of `fn` and its tangent; see `jvp`.
        grad_vars: the collections with tangents.
        nondiff_argnums: the arguments without; 0 is the scope.

    Example:
        >>> from weft.core import apply, lift
        >>> def scaled(scope, x):
        ...     return scope.get_variable("params", "scale") * x
        >>> def rule(scope, primals, tangents, variable_tangents):
        ...     return scaled(scope, *primals), 10.0 * tangents[0]
        >>> f = apply(lift.custom_jvp(scaled, rule))
        >>> jax.grad(lambda x: f({"params": {"scale": 2.0}}, x))(3.0)
        Array(10., dtype=float32, weak_type=True)
    """
    check_argnums("lift.custom_jvp", "nondiff_argnums", fn, nondiff_argnums)

    @functools.wraps(fn)
    def call(scope: Any, *args: Any) -> Any:
        nondiff, diff, together = _divided(args, nondiff_argnums)
        scopes = _structure_of_scopes(scope)

        def rule(tangents: list[Any], scope: Any, diff: tuple[Any, ...]) -> Any:
            n = scopes.num_leaves
            of_variables = scopes.unflatten([group.variables for group in tangents[:n]])
            of_args = jax.tree.structure(diff).unflatten(tangents[n:])
            return jvp_fn(*nondiff, scope, diff, of_args, of_variables)

        lifted = lifting.custom_jvp(
            ScopeKind("custom_jvp"),
            lambda scope, diff: fn(scope, *together(diff)),
            rule,
            wrt=_wrt(grad_vars, True, True),
        )
        return lifted(scope, diff)

    return call


def _divided(
    args: tuple[Any, ...], nondiff_argnums: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Any], list[Any]]]:
    """The arguments without a derivative, those with one, and how to put them together."""
    n = len(args) + 1
    at = {i % n - 1 for i in nondiff_argnums}
    diff = tuple(x for i, x in enumerate(args) if i not in at)
    kept = [x if i in at else None for i, x in enumerate(args)]

    def together(diff: Any) -> list[Any]:
        rest = iter(diff)
        return [x if i in at else next(rest) for i, x in enumerate(kept)]

    return tuple(x for i, x in enumerate(args) if i in at), diff, together


def _as_units(grads: Any, scopes: Any, args: Any) -> list[Any]:
    """What `backward_fn` returns, as the engine counts: groups of scopes, then arguments."""
    of_scope, *of_args = grads
    of_scopes = scopes.flatten_up_to(of_scope)
    return [*(Group(dict(g), {}, {}) for g in of_scopes), *args.flatten_up_to(tuple(of_args))]


def _structure_of_scopes(scope: Any) -> Any:
    return jax.tree.structure(scope, is_leaf=lambda x: isinstance(x, Scope))


def _check_reduce_axes(reduce_axes: Any) -> None:
    if reduce_axes:
        raise TransformArgumentError(
            f"reduce_axes={reduce_axes!r}: JAX reduces over no axis by itself any more; sum the "
            "gradients with jax.lax.psum."
        )
