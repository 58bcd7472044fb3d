"""Execution of functions of scopes: jit, remat, eval_shape, checkify and named_call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft import lifting
from weft.core.filters import Filter
from weft.core.lift.common import Fn, shared, spread, taking_all
from weft.core.scope_kind import ScopeKind
from weft.errors import TransformArgumentError
from weft.lifting.argnums import as_tuple, check_argnums
from weft.lifting.crossing import Static


def remat(
    fn: Fn,
    variables: Filter = True,
    rngs: Filter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
) -> Fn:
    """Applies `jax.checkpoint` to `fn(scope, *args)`; `concrete` must be False.

    Args:
        prevent_cse: see `jax.checkpoint`; False inside a scan.
        static_argnums: arguments that are hashable values, not arrays; 0 is the scope.
        policy: selects values to store, see `jax.checkpoint_policies`.
    """
    if concrete:
        raise TransformArgumentError(
            "remat(concrete=True): JAX no longer computes concrete values in it; name the "
            "arguments that have to be concrete in static_argnums."
        )
    check_argnums("lift.remat", "static_argnums", fn, static_argnums)
    static = as_tuple(static_argnums)

    def of_static(scope: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(scope, *(x.value if isinstance(x, Static) else x for x in args), **kwargs)

    lifted = lifting.remat(
        ScopeKind("remat"),
        of_static,
        prevent_cse=prevent_cse,
        policy=policy,
        in_axes=(shared(variables, rngs), None, None),
    )

    @functools.wraps(fn)
    def call(scope: Any, *args: Any, **kwargs: Any) -> Any:
        n = len(args) + 1
        at = {i % n - 1 for i in static}
        args = tuple(Static(x) if i in at else x for i, x in enumerate(args))
        return lifted(scope, args, kwargs)

    return call


checkpoint = remat


def jit(
    fn: Fn,
    variables: Filter = True,
    rngs: Filter = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    device: Any = None,
    backend: str | None = None,
) -> Fn:
    """Applies `jax.jit` to `fn(scope, *args)`, compiling once for equal structure.

    The position of the scope does not matter, and a new `fn` with the same code and equal captured
    values is not recompiled. PRNG streams restart inside, from a key drawn outside.

    Args:
        static_argnums: arguments that are hashable values, not arrays; 0 is the scope.
        static_argnames: static arguments given by name.
        donate_argnums: arguments whose buffers may be reused for the results.
        device: device to use instead of the arguments' device.
        backend: platform to use, such as "cpu".

    Returns:
        The function. Its `explain_recompile()` describes the cause of a recompilation, and its
        `lower` is that of `jax.jit`.
    """
    check_argnums("lift.jit", "static_argnums", fn, static_argnums)
    check_argnums("lift.jit", "donate_argnums", fn, donate_argnums)
    lifted = lifting.jit(
        ScopeKind("jit", folds=True),
        fn,
        of_carriers=shared(variables, rngs),
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
    )
    if backend is not None:
        device = jax.devices(backend)[0]

    @functools.wraps(fn)
    def call(scope: Any, *args: Any, **kwargs: Any) -> Any:
        if device is None:
            return lifted(scope, *args, **kwargs)
        with jax.default_device(device):
            return lifted(scope, *args, **kwargs)

    call.explain_recompile = lifted.explain_recompile  # pyright: ignore[reportAttributeAccessIssue]
    call.lower = lifted.lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


def eval_shape(fn: Fn, variables: Filter = True, rngs: Filter = True) -> Fn:
    """Applies `jax.eval_shape` to `fn(scope, *args)`; changed variables become shapes."""
    in_axes = (shared(variables, rngs), None, None)
    lifted = lifting.eval_shape(ScopeKind("eval_shape"), spread(fn), in_axes=in_axes)
    return taking_all(fn, lifted)


def checkify(
    fn: Fn,
    variables: Filter = True,
    rngs: Filter = True,
    errors: Any = None,
) -> Fn:
    """Applies `jax.experimental.checkify.checkify` to `fn(scope, *args)`.

    The result returns a checkify error and the result of `fn`. `errors` are the enabled checks, by
    default `checkify.user_checks`.
    """
    in_axes = (shared(variables, rngs), None, None)
    lifted = lifting.checkify(ScopeKind("checkify"), spread(fn), errors=errors, in_axes=in_axes)
    return taking_all(fn, lifted)


def named_call(fn: Fn, name: str | None = None) -> Fn:
    """Names the operations of `fn` in profiles, by default after the function."""
    shown = name or getattr(fn, "__name__", "fn")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(shown):
            return fn(*args, **kwargs)

    return call
