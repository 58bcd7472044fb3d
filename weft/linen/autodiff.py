"""Derivatives of functions of modules.

`variables` and `rngs` select the collections and PRNG streams that a function sees. A bound method
`self.method` is called as `method(module, ...)`, except for custom rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.core import lift
from weft.core.filters import Filter, in_filter
from weft.lifting.signature import check_argnums
from weft.linen.module_kind import ModuleState, lifted_call, merge_modules, unbound
from weft.typing import Fn

Path = tuple[str, ...]


def _scope_positions(module_state: ModuleState) -> list[tuple[int, Path]]:
    """Returns each scope's carried scope, by index, and the path from there."""
    scopes = module_state.scopes

    def place(scope: Any) -> tuple[int, Path]:
        n, i = min(
            (len(other.path), i)
            for i, other in enumerate(scopes)
            if other.root is scope.root and scope.path[: len(other.path)] == other.path
        )
        return i, scope.path[n:]

    return [place(scope) for scope in scopes]


def _target_positions(module_state: ModuleState) -> list[tuple[int, Path]]:
    places = _scope_positions(module_state)
    return [places[ref.index] for ref in module_state.target_refs()]


def _gradients(module_state: ModuleState, of_scopes: ModuleState) -> Any:
    def below(variables: Any, path: Path) -> Any:
        for name in path:
            variables = variables.get(name, {})
        return variables

    found = [
        {col: of for col, of_all in of_scopes.scopes[i].items() if (of := below(of_all, path))}
        for i, path in _target_positions(module_state)
    ]
    return jax.tree.unflatten(module_state.target_structure(), found)


class _ZeroTangents:
    """Zero tangents of all carried modules, into which tangents of the target can be filled."""

    def __init__(self, module_state: ModuleState, wrt: Filter):
        self.module_state = module_state
        self.shapes: list[dict[str, Any]] = [{} for _ in module_state.scopes]
        for i, _ in _scope_positions(module_state):
            variables = module_state.scopes[i].variables()
            wanted = {col: v for col, v in variables.items() if v and in_filter(wrt, col)}
            self.shapes[i] = jax.tree.map(jax.typeof, wanted)

    def filled(self, of_target: object) -> ModuleState:
        """Inverts `_gradients`."""
        of_scopes = [jax.tree.map(_zero_tangent, shapes) for shapes in self.shapes]
        given = self.module_state.target_structure().flatten_up_to(of_target)
        for (i, path), of_module in zip(_target_positions(self.module_state), given, strict=True):
            for col, tangents in _nonempty_collections(of_module).items():
                of_scopes[i][col] = _set_at_path(of_scopes[i].get(col, {}), path, tangents)
        return ModuleState(self.module_state.module_def, of_scopes)


def _nonempty_collections(of_module: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the collections with tangents; those of variables not yet created are empty."""
    return {col: tangents for col, tangents in of_module.items() if jax.tree.leaves(tangents)}


def _set_at_path(variables: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    return {**variables, path[0]: _set_at_path(variables.get(path[0], {}), path[1:], value)}


def _zero_tangent(of: Any) -> Any:
    dtype = of.dtype if jnp.issubdtype(of.dtype, jnp.inexact) else jax.dtypes.float0
    return np.zeros(of.shape, dtype) if dtype == jax.dtypes.float0 else jnp.zeros(of.shape, dtype)


def vjp(
    fn: Fn,
    mdl: object,
    *primals: object,
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
    options = {"has_aux": has_aux, "reduce_axes": reduce_axes, "variables": variables, "rngs": rngs}
    with lifted_call((fn,), mdl, primals) as (module_state, primals):
        value, pullback, *aux = lift.vjp(
            merge_modules(fn), module_state, *primals, vjp_variables=vjp_variables, **options
        )

    def pulled_back(pullback: Fn, cotangent: object) -> tuple[Any, ...]:
        of_scopes, *of_primals = pullback(cotangent)
        return _gradients(module_state, of_scopes), *of_primals

    return value, jax.tree_util.Partial(pulled_back, pullback), *aux


def value_and_grad(
    fn: Fn,
    mdl: object,
    *primals: object,
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
    options = {"has_aux": has_aux, "reduce_axes": reduce_axes, "variables": variables, "rngs": rngs}
    with lifted_call((fn,), mdl, primals) as (module_state, primals):
        *value, grads = lift.value_and_grad(merge_modules(fn), module_state, *primals, **options)
    return (tuple(value) if has_aux else value[0]), grads


def grad(fn: Fn, mdl: Any, *primals: Any, has_aux: bool = False, **kwargs: Any) -> Any:
    """Returns the gradients of `value_and_grad`; with `has_aux`, and the auxiliary output."""
    value, grads = value_and_grad(fn, mdl, *primals, has_aux=has_aux, **kwargs)
    return (grads, value[1]) if has_aux else grads


def jvp(
    fn: Fn,
    mdl: object,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    variable_tangents: object,
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
        given = module_state.target_structure().flatten_up_to(variable_tangents)
        cols = sorted({col for of_module in given for col in _nonempty_collections(of_module)})
        of_scopes = _ZeroTangents(module_state, cols).filled(variable_tangents)
        given = module_state, primals, tangents, of_scopes, variables, rngs
        return lift.jvp(merge_modules(fn), *given)


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

    def run(mdl: object, *args: object) -> Any:
        def backward(*args: object) -> tuple[Any, ...]:
            of_target, *of_args = backward_fn(*args)
            return zeros.filled(of_target), *of_args

        rule = merge_modules(forward_fn, 1), backward
        lifted = lift.custom_vjp(merge_modules(fn), *rule, grad_vars, nondiff_argnums)
        with lifted_call((fn, forward_fn), mdl, args) as (module_state, args):
            zeros = _ZeroTangents(module_state, grad_vars)
            return lifted(module_state, *args)

    return run


def custom_jvp(
    fn: Fn, jvp_fn: Fn, grad_vars: Filter = "params", nondiff_argnums: Sequence[int] = ()
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

    def run(mdl: object, *args: object) -> Any:
        def rule(*args: Any) -> tuple[Any, Any]:
            *nondiff, inner, primals, tangents, of_scopes = args

            def on_modules(mdl: Any) -> tuple[Any, Any]:
                variable_tangents = _gradients(module_state, of_scopes)
                return jvp_fn(*nondiff, mdl, primals, tangents, variable_tangents)

            return merge_modules(on_modules, 1)(inner)

        lifted = lift.custom_jvp(merge_modules(fn), rule, grad_vars, nondiff_argnums)
        with lifted_call((fn, jvp_fn), mdl, args) as (module_state, args):
            return lifted(module_state, *args)

    return run
