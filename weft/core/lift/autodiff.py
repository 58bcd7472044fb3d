"""Derivatives of functions of scopes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from weft import errors, lifting
from weft.core.filters import Filter
from weft.core.scope import Scope
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.lifting import DIFF, Roles, signature
from weft.lifting.roles import SpecialRole
from weft.typing import Fn, PyTree


def _wrt(
    diff_collections: Filter, variables: Filter, rngs: Filter
) -> tuple[Roles, SpecialRole]:
    """Returns the roles for differentiation of some collections and all arguments."""
    scope_roles = Roles(
        ((Select(diff_collections), DIFF), (Select(variables, rngs), None))
    )
    return scope_roles, DIFF


def _variables(gradients: PyTree) -> PyTree:
    """Returns the gradients of collections from those of scopes; only the first group has any."""

    def is_groups(node: PyTree) -> bool:
        return (
            isinstance(node, tuple)
            and len(node) > 0
            and isinstance(node[0], Group)
        )

    return jax.tree.map(
        lambda groups: groups[0].variables, gradients, is_leaf=is_groups
    )


def vjp(
    fn: Fn,
    scope: PyTree,
    *primals: PyTree,
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


def _pulled_back(
    pullback: Callable[[PyTree], PyTree], cotangent: PyTree
) -> tuple[PyTree, ...]:
    scope_gradients, primal_gradients = pullback(cotangent)
    return _variables(scope_gradients), *primal_gradients


def value_and_grad(
    fn: Fn,
    scope: PyTree,
    *primals: PyTree,
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
    if has_aux:
        return *value, grads
    return value, grads


def grad(
    fn: Fn,
    scope: PyTree,
    *primals: PyTree,
    has_aux: bool = False,
    **kwargs: Any,
) -> PyTree:
    """Returns the gradients of `value_and_grad`; with `has_aux`, and the auxiliary output."""
    _, *aux, grads = value_and_grad(
        fn, scope, *primals, has_aux=has_aux, **kwargs
    )
    return (grads, *aux) if has_aux else grads


def jvp(
    fn: Fn,
    scope: PyTree,
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree],
    variable_tangents: PyTree,
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, Any]:
    """Applies `jax.jvp` to `fn(scope, *primals)` and returns the result and its tangent.

    `variable_tangents` are tangents by collection; for several scopes, a pytree of such dicts.
    """
    groups: list[Group] = []
    collections: set[str] = set()
    for scope_tangents in _structure_of_scopes(scope).flatten_up_to(
        variable_tangents
    ):
        nonempty: dict[str, PyTree] = {}
        for collection, variables_of_collection in scope_tangents.items():
            # Tangents of variables not yet created are empty.
            if jax.tree.leaves(variables_of_collection):
                nonempty[collection] = variables_of_collection
        collections.update(nonempty)
        groups.append(Group(nonempty, {}, {}))
    lifted = lifting.jvp(
        ScopeKind("jvp"),
        lambda scope, primals: fn(scope, *primals),
        wrt=_wrt(collections, variables, rngs),
    )
    primal_tangents = jax.tree.leaves(tuple(tangents))
    return lifted((scope, tuple(primals)), [*groups, *primal_tangents])


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
    signature.check_argnums(
        "lift.custom_vjp", "nondiff_argnums", fn, nondiff_argnums
    )

    @functools.wraps(fn)
    def call(scope: PyTree, *args: PyTree) -> PyTree:
        nondiff, diff_args = _split_nondiff(args, nondiff_argnums)
        scope_structure = _structure_of_scopes(scope)
        diff_structure = jax.tree.structure(diff_args)

        def backward(residuals: PyTree, cotangent: PyTree) -> list[PyTree]:
            """Returns the gradients as groups of scopes followed by arguments."""
            variable_gradients, *arg_gradients = backward_fn(
                *nondiff.values, residuals, cotangent
            )
            gradients: list[PyTree] = []
            for scope_gradients in scope_structure.flatten_up_to(
                variable_gradients
            ):
                gradients.append(Group(dict(scope_gradients), {}, {}))
            gradients += diff_structure.flatten_up_to(tuple(arg_gradients))
            return gradients

        lifted = lifting.custom_vjp(
            ScopeKind("custom_vjp"),
            lambda scope, diff: fn(scope, *nondiff.joined_with(diff)),
            lambda scope, diff: forward_fn(scope, *nondiff.joined_with(diff)),
            backward,
            wrt=_wrt(grad_vars, True, True),
        )
        return lifted(scope, diff_args)

    return call


def custom_jvp(
    fn: Fn,
    jvp_fn: Fn,
    grad_vars: Filter = "params",
    nondiff_argnums: Sequence[int] = (),
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
    signature.check_argnums(
        "lift.custom_jvp", "nondiff_argnums", fn, nondiff_argnums
    )

    @functools.wraps(fn)
    def call(scope: PyTree, *args: PyTree) -> PyTree:
        nondiff, diff_args = _split_nondiff(args, nondiff_argnums)
        scope_structure = _structure_of_scopes(scope)
        num_scopes = scope_structure.num_leaves

        def rule(
            tangents: list[PyTree], scope: PyTree, diff: tuple[PyTree, ...]
        ) -> PyTree:
            # The groups of the scopes precede the arguments.
            scope_tangents = [
                group.variables for group in tangents[:num_scopes]
            ]
            variable_tangents = scope_structure.unflatten(scope_tangents)
            arg_tangents = jax.tree.structure(diff).unflatten(
                tangents[num_scopes:]
            )
            return jvp_fn(
                *nondiff.values, scope, diff, arg_tangents, variable_tangents
            )

        lifted = lifting.custom_jvp(
            ScopeKind("custom_jvp"),
            lambda scope, diff: fn(scope, *nondiff.joined_with(diff)),
            rule,
            wrt=_wrt(grad_vars, True, True),
        )
        return lifted(scope, diff_args)

    return call


class _NondiffArguments(NamedTuple):
    """Positional arguments after the scope that are not differentiated.

    JAX keeps rules, so these refer to nothing else of a call: no tracer outlives its trace.
    """

    by_index: dict[int, PyTree]

    @property
    def values(self) -> tuple[PyTree, ...]:
        return tuple(self.by_index.values())

    def joined_with(self, diff: Sequence[PyTree]) -> list[PyTree]:
        """Returns all arguments in order, with other values of the differentiated ones."""
        args = list(diff)
        for index, arg in self.by_index.items():  # in increasing order
            args.insert(index, arg)
        return args


def _split_nondiff(
    args: tuple[PyTree, ...], nondiff_argnums: Sequence[int]
) -> tuple[_NondiffArguments, tuple[PyTree, ...]]:
    """Returns the arguments that are not differentiated, and those that are."""
    num_args = len(args) + 1  # the numbers count the scope
    nondiff_indices = {number % num_args - 1 for number in nondiff_argnums}
    nondiff_by_index: dict[int, PyTree] = {}
    diff: list[PyTree] = []
    for index, arg in enumerate(args):
        if index in nondiff_indices:
            nondiff_by_index[index] = arg
        else:
            diff.append(arg)
    return _NondiffArguments(nondiff_by_index), tuple(diff)


def _structure_of_scopes(scope: PyTree) -> Any:
    return jax.tree.structure(scope, is_leaf=lambda x: isinstance(x, Scope))


def _check_reduce_axes(reduce_axes: tuple[()]) -> None:
    if reduce_axes:
        raise errors.TransformArgumentError(
            f"reduce_axes={reduce_axes!r}: JAX no longer reduces over axes automatically; sum the "
            "gradients with jax.lax.psum."
        )
