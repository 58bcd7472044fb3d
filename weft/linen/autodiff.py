"""Derivatives of functions of modules.

`variables` and `rngs` select the collections and PRNG streams that a function sees. A bound method
`self.method` is called as `method(module, ...)`, except for custom rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft.core import lift
from weft.core.filters import Filter, in_filter
from weft.lifting.signature import check_argnums
from weft.linen.module_kind import (
    ModuleState,
    lifted_call,
    merge_modules,
    unbound,
)
from weft.typing import Fn, PyTree, ShapeDtype

Path = tuple[str, ...]


class _Position(NamedTuple):
    """Position of a module's variables: in a carried scope, below a path."""

    scope_index: int
    path: Path


def _scope_positions(module_state: ModuleState) -> list[_Position]:
    """Returns the position of each scope in the outermost of the scopes that contain it."""
    scopes = module_state.scopes
    positions: list[_Position] = []
    for scope in scopes:
        containing_scopes: list[tuple[int, int]] = []
        for index, other in enumerate(scopes):
            depth = len(other.path)
            if other.root is scope.root and scope.path[:depth] == other.path:
                containing_scopes.append((depth, index))
        depth, index = min(containing_scopes)
        positions.append(_Position(index, scope.path[depth:]))
    return positions


def _target_positions(module_state: ModuleState) -> list[_Position]:
    positions = _scope_positions(module_state)
    return [positions[ref.index] for ref in module_state.target_refs()]


def _target_gradients(
    module_state: ModuleState, gradients: ModuleState
) -> PyTree:
    """Returns the gradients of the target's modules, by collection, from those of all scopes."""
    target_gradients: list[dict[str, PyTree]] = []
    for position in _target_positions(module_state):
        module_gradients: dict[str, PyTree] = {}
        for collection, variables in gradients.scopes[
            position.scope_index
        ].items():
            for name in position.path:
                variables = variables.get(name, {})
            if variables:
                module_gradients[collection] = variables
        target_gradients.append(module_gradients)
    return jax.tree.unflatten(module_state.target_structure(), target_gradients)


class _ZeroTangents:
    """Zero tangents of all carried modules, into which tangents of the target can be filled."""

    def __init__(self, module_state: ModuleState, wrt: Filter):
        self.module_state = module_state
        # A scope inside of another one has no tangents of its own.
        self.shapes: list[dict[str, PyTree]] = [{} for _ in module_state.scopes]
        for scope_index, _ in _scope_positions(module_state):
            for collection, variables in (
                module_state.scopes[scope_index].variables().items()
            ):
                if variables and in_filter(wrt, collection):
                    shapes = jax.tree.map(jax.typeof, variables)
                    self.shapes[scope_index][collection] = shapes

    def filled(self, target_tangents: PyTree) -> ModuleState:
        """Inverts `_target_gradients`."""
        tangents = [
            jax.tree.map(_zero_tangent, shapes) for shapes in self.shapes
        ]
        structure = self.module_state.target_structure()
        tangents_by_module = structure.flatten_up_to(target_tangents)
        positions = _target_positions(self.module_state)
        for position, module_tangents in zip(
            positions, tangents_by_module, strict=True
        ):
            scope_tangents = tangents[position.scope_index]
            for collection, variables in _nonempty_collections(
                module_tangents
            ).items():
                scope_tangents[collection] = _set_at_path(
                    scope_tangents.get(collection, {}), position.path, variables
                )
        return ModuleState(self.module_state.module_def, tangents)


def _nonempty_collections(
    module_tangents: Mapping[str, PyTree],
) -> dict[str, PyTree]:
    """Returns the collections with tangents; those of variables not yet created are empty."""
    return {
        col: tree
        for col, tree in module_tangents.items()
        if jax.tree.leaves(tree)
    }


def _set_at_path(variables: PyTree, path: Path, value: PyTree) -> PyTree:
    if not path:
        return value
    name, *path_below = path
    new_value = _set_at_path(variables.get(name, {}), tuple(path_below), value)
    return {**variables, name: new_value}


def _zero_tangent(shape: ShapeDtype) -> np.ndarray | jax.Array:
    # Integers have tangents of a dtype that only NumPy's arrays can have.
    if not jnp.issubdtype(shape.dtype, jnp.inexact):
        return np.zeros(shape.shape, jax.dtypes.float0)
    return jnp.zeros(shape.shape, shape.dtype)


def vjp(
    fn: Fn,
    mdl: PyTree,
    *primals: PyTree,
    has_aux: bool = False,
    reduce_axes: tuple[()] = (),
    vjp_variables: Filter = "params",
    variables: Filter = True,
    rngs: Filter = True,
    multi_scope: bool = True,
) -> tuple[Any, ...]:
    """Applies `jax.vjp` to `fn(module, *primals)`.

    Args:
        fn: the function; with `has_aux` it returns a pair of its result and any auxiliary output.

    Returns the result, a function from its cotangent to the gradients of the module's collections
    and of each argument, and with `has_aux` the auxiliary output.
    """
    fn = unbound(fn)
    with lifted_call((fn,), mdl, primals) as (module_state, primals):
        value, pullback, *aux = lift.vjp(
            merge_modules(fn),
            module_state,
            *primals,
            has_aux=has_aux,
            reduce_axes=reduce_axes,
            vjp_variables=vjp_variables,
            variables=variables,
            rngs=rngs,
        )

    def module_pullback(pullback: Fn, cotangent: PyTree) -> tuple[PyTree, ...]:
        gradients, *primal_gradients = pullback(cotangent)
        return _target_gradients(module_state, gradients), *primal_gradients

    return value, jax.tree_util.Partial(module_pullback, pullback), *aux


def value_and_grad(
    fn: Fn,
    mdl: PyTree,
    *primals: PyTree,
    has_aux: bool = False,
    reduce_axes: tuple[()] = (),
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, tuple[Any, ...]]:
    """Applies `jax.value_and_grad` to `fn(module, *primals)`; see `vjp` for the other arguments.

    Returns:
        The scalar result (with `has_aux`, the pair) and a tuple with the gradient of each argument.
    """
    fn = unbound(fn)
    with lifted_call((fn,), mdl, primals) as (module_state, primals):
        value, *aux, grads = lift.value_and_grad(
            merge_modules(fn),
            module_state,
            *primals,
            has_aux=has_aux,
            reduce_axes=reduce_axes,
            variables=variables,
            rngs=rngs,
        )
    if has_aux:
        return (value, *aux), grads
    return value, grads


def grad(
    fn: Fn, mdl: PyTree, *primals: PyTree, has_aux: bool = False, **kwargs: Any
) -> PyTree:
    """Returns the gradients of `value_and_grad`; with `has_aux`, and the auxiliary output."""
    value, grads = value_and_grad(fn, mdl, *primals, has_aux=has_aux, **kwargs)
    return (grads, value[1]) if has_aux else grads


def jvp(
    fn: Fn,
    mdl: PyTree,
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree],
    variable_tangents: PyTree,
    variables: Filter = True,
    rngs: Filter = True,
) -> tuple[Any, Any]:
    """Applies `jax.jvp` to `fn(module, *primals)` and returns the result and its tangent.

    Args:
        variable_tangents: tangents of variables, by collection; for several modules, a tree of such
            dicts. All other tangents are zero.
    """
    fn = unbound(fn)
    with lifted_call((fn,), mdl, tuple(primals)) as (module_state, primals):
        collections: set[str] = set()
        for module_tangents in module_state.target_structure().flatten_up_to(
            variable_tangents
        ):
            collections.update(_nonempty_collections(module_tangents))
        zero_tangents = _ZeroTangents(module_state, sorted(collections))
        return lift.jvp(
            merge_modules(fn),
            module_state,
            primals,
            tangents,
            zero_tangents.filled(variable_tangents),
            variables,
            rngs,
        )


def custom_vjp(
    fn: Fn,
    forward_fn: Fn,
    backward_fn: Fn,
    grad_vars: Filter = "params",
    nondiff_argnums: Sequence[int] = (),
) -> Fn:
    """Applies `jax.custom_vjp` to `fn(module, *args)`.

    The gradients of modules captured in closures are zero; to define them, pass a tree of modules.
    See `weft.core.lift.custom_vjp` for the arguments; 0 in `nondiff_argnums` is the module.

    >>> class SignOfGradient(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         def forward(dense, x):
    ...             return nn.vjp(lambda dense, x: dense(x), dense, x)
    ...         def backward(pullback, cotangent):
    ...             params, of_x = pullback(cotangent)
    ...             return jax.tree.map(jnp.sign, params), of_x
    ...         f = nn.custom_vjp(lambda dense, x: dense(x), forward, backward)
    ...         return f(nn.Dense(1, use_bias=False), x)
    >>> model, x = SignOfGradient(), jnp.array([-3.0, 5.0])
    >>> params = model.init(jax.random.key(0), x)
    >>> jax.grad(lambda p: model.apply(p, x)[0])(params)["params"]["Dense_0"]["kernel"].tolist()
    [[-1.0], [1.0]]
    """
    check_argnums("linen.custom_vjp", "nondiff_argnums", fn, nondiff_argnums)

    def run(mdl: PyTree, *args: PyTree) -> PyTree:
        def backward(*args: PyTree) -> tuple[PyTree, ...]:
            target_gradients, *arg_gradients = backward_fn(*args)
            return zero_tangents.filled(target_gradients), *arg_gradients

        lifted = lift.custom_vjp(
            merge_modules(fn),
            merge_modules(forward_fn, 1),
            backward,
            grad_vars,
            nondiff_argnums,
        )
        with lifted_call((fn, forward_fn), mdl, args) as (module_state, args):
            zero_tangents = _ZeroTangents(module_state, grad_vars)
            return lifted(module_state, *args)

    return run


def custom_jvp(
    fn: Fn,
    jvp_fn: Fn,
    grad_vars: Filter = "params",
    nondiff_argnums: Sequence[int] = (),
) -> Fn:
    """Applies `jax.custom_jvp` to `fn(module, *args)`; see `custom_vjp` for captured modules.

    `jvp_fn(*nondiff, module, primals, tangents, variable_tangents)` returns the result of `fn` and
    its tangent; see `weft.core.lift.custom_jvp` for the other arguments.

    >>> class Clipped(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         def rule(module, primals, tangents, variable_tangents):
    ...             return jnp.clip(*primals, 0, 1), tangents[0]
    ...         return nn.custom_jvp(lambda module, x: jnp.clip(x, 0, 1), rule)(self, x)
    >>> float(jax.grad(lambda x: Clipped().apply({}, x))(3.0))
    1.0
    """
    check_argnums("linen.custom_jvp", "nondiff_argnums", fn, nondiff_argnums)

    def run(mdl: PyTree, *args: PyTree) -> PyTree:
        def rule(*args: PyTree) -> tuple[PyTree, PyTree]:
            *nondiff, inner_state, primals, tangents, scope_tangents = args

            def jvp_of_modules(mdl: PyTree) -> tuple[PyTree, PyTree]:
                variable_tangents = _target_gradients(
                    module_state, scope_tangents
                )
                return jvp_fn(
                    *nondiff, mdl, primals, tangents, variable_tangents
                )

            return merge_modules(jvp_of_modules, 1)(inner_state)

        lifted = lift.custom_jvp(
            merge_modules(fn), rule, grad_vars, nondiff_argnums
        )
        with lifted_call((fn, jvp_fn), mdl, args) as (module_state, args):
            return lifted(module_state, *args)

    return run
