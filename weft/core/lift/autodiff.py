"""Derivatives of functions of scopes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft import errors, lifting
from weft.core.filters import Filter
from weft.core.lift.transforms import Fn
from weft.core.scope import Scope
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.lifting import DIFF, Roles, signature


def _wrt(of_diff: Filter, variables: Filter, rngs: Filter) -> tuple[Roles, Any]:
    """Returns the roles for differentiation of some collections and all arguments."""
    return Roles(((Select(of_diff), DIFF), (Select(variables, rngs), None))), DIFF


def _variables(grads: object) -> Any:
    def is_groups(x: object) -> bool:
        return isinstance(x, tuple) and len(x) > 0 and isinstance(x[0], Group)

    return jax.tree.map(lambda groups: groups[0].variables, grads, is_leaf=is_groups)


def vjp(
    fn: Fn,
    scope: object,
    *primals: object,
    has_aux: bool = False,
    reduce_axes: tuple[()] = (),
    vjp_variables: Filter = "params",
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, ...]:
    """Applies `jax.vjp` to `fn(scope, *primals)`.

    Returns the result, a function from its cotangent to the gradients of the collections and of
    each argument, and with `has_aux` the auxiliary output, which `fn` returns after its result.
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


def _pulled_back(pullback: Callable[[Any], Any], cotangent: object) -> tuple[Any, ...]:
    of_scope, of_primals = pullback(cotangent)
    return _variables(of_scope), *of_primals


def value_and_grad(
    fn: Fn,
    scope: object,
    *primals: object,
    has_aux: bool = False,
    reduce_axes: tuple[()] = (),
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, ...]:
    """Applies `jax.value_and_grad` to `fn(scope, *primals)`, with gradients of each of `primals`.

    Returns the scalar result of `fn`, with `has_aux` the auxiliary output, and a tuple with the
    gradient of each argument: two or three values, unlike `weft.linen.value_and_grad` and JAX.
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
    """Returns the gradients of `value_and_grad`; with `has_aux`, and the auxiliary output."""
    _, *aux, grads = value_and_grad(fn, scope, *primals, has_aux=has_aux, **kwargs)
    return (grads, *aux) if has_aux else grads


def jvp(
    fn: Fn,
    scope: object,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    variable_tangents: object,
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, Any]:
    """Applies `jax.jvp` to `fn(scope, *primals)` and returns the result and its tangent.

    `variable_tangents` are tangents by collection; for several scopes, a pytree of such dicts.
    """
    of_scopes = [
        # Tangents of variables not yet created are empty.
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
    """Applies `jax.custom_vjp` to `fn(scope, *args)`.

    Args:
        forward_fn: takes the arguments of `fn`; returns its result and residuals for `backward_fn`,
            such as the function that `vjp` returns.
        backward_fn: `backward_fn(*nondiff, residuals, cotangent)` returns the gradients of the
            collections `grad_vars` and of each argument not in `nondiff_argnums`.
        nondiff_argnums: arguments without gradients; 0 is the scope.

    The rule applies to the result and to variables that `fn` changes, whose later uses have no
    gradient. Unchanged variables keep their own gradients.

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
    signature.check_argnums("lift.custom_vjp", "nondiff_argnums", fn, nondiff_argnums)

    @functools.wraps(fn)
    def call(scope: object, *args: object) -> Any:
        nondiff, diff, together = _split_nondiff(args, nondiff_argnums)
        scopes, of_args = _structure_of_scopes(scope), jax.tree.structure(diff)
        lifted = lifting.custom_vjp(
            ScopeKind("custom_vjp"),
            lambda scope, diff: fn(scope, *together(diff)),
            lambda scope, diff: forward_fn(scope, *together(diff)),
            lambda needed, cotangent: _gradient_groups(
                backward_fn(*nondiff, needed, cotangent), scopes, of_args
            ),
            wrt=_wrt(grad_vars, True, True),
        )
        return lifted(scope, diff)

    return call


def custom_jvp(
    fn: Fn, jvp_fn: Fn, grad_vars: Filter = "params", nondiff_argnums: Sequence[int] = ()
) -> Fn:
    """Applies `jax.custom_jvp` to `fn(scope, *args)`.

    Args:
        jvp_fn: `jvp_fn(*nondiff, scope, primals, tangents, variable_tangents)` returns the result
            of `fn` and its tangent; see `jvp`.
        nondiff_argnums: arguments without tangents; 0 is the scope.

    >>> from weft.core import apply, lift
    >>> def scaled(scope, x):
    ...     return scope.get_variable("params", "scale") * x
    >>> def rule(scope, primals, tangents, variable_tangents):
    ...     return scaled(scope, *primals), 10.0 * tangents[0]
    >>> f = apply(lift.custom_jvp(scaled, rule))
    >>> jax.grad(lambda x: f({"params": {"scale": 2.0}}, x))(3.0)
    Array(10., dtype=float32, weak_type=True)
    """
    signature.check_argnums("lift.custom_jvp", "nondiff_argnums", fn, nondiff_argnums)

    @functools.wraps(fn)
    def call(scope: object, *args: object) -> Any:
        nondiff, diff, together = _split_nondiff(args, nondiff_argnums)
        scopes = _structure_of_scopes(scope)

        def rule(tangents: list[Any], scope: object, diff: tuple[Any, ...]) -> Any:
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


def _split_nondiff(
    args: tuple[Any, ...], nondiff_argnums: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Any], list[Any]]]:
    n = len(args) + 1
    at = {i % n - 1 for i in nondiff_argnums}
    diff = tuple(x for i, x in enumerate(args) if i not in at)
    kept = [x if i in at else None for i, x in enumerate(args)]

    def together(diff: Any) -> list[Any]:
        rest = iter(diff)
        return [x if i in at else next(rest) for i, x in enumerate(kept)]

    return tuple(x for i, x in enumerate(args) if i in at), diff, together


def _gradient_groups(grads: Any, scopes: Any, args: Any) -> list[Any]:
    """Converts the result of `backward_fn` to groups of scopes followed by arguments."""
    of_scope, *of_args = grads
    of_scopes = scopes.flatten_up_to(of_scope)
    return [*(Group(dict(g), {}, {}) for g in of_scopes), *args.flatten_up_to(tuple(of_args))]


def _structure_of_scopes(scope: object) -> Any:
    return jax.tree.structure(scope, is_leaf=lambda x: isinstance(x, Scope))


def _check_reduce_axes(reduce_axes: object) -> None:
    if reduce_axes:
        raise errors.TransformArgumentError(
            f"reduce_axes={reduce_axes!r}: JAX no longer reduces over axes automatically; sum the "
            "gradients with jax.lax.psum."
        )
