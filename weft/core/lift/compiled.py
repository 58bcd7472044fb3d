"""How functions of scopes are computed: jit, remat, and what can be known before."""

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
    """`jax.checkpoint` of `fn(scope, *args)`.

    Args:
        fn: the function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees.
        concrete: False; JAX has no other form any more.
        prevent_cse: as for `jax.checkpoint`; False inside a scan.
        static_argnums: the arguments that are hashable values and no arrays; 0 is the scope.
        policy: what to keep, one of `jax.checkpoint_policies`.

    Raises:
        TransformArgumentError: if `concrete` is True.
    """
    if concrete:
        raise TransformArgumentError(
            "remat(concrete=True): JAX computes no concrete values in it any more; name the "
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
    """`jax.jit` of `fn(scope, *args)`: compiled once for equal structure.

    It makes no difference which scope it is, nor whether `fn` was made anew, as long as it is the
    same code and sees equal values. PRNG streams begin anew inside, from a key drawn outside.

    Args:
        fn: the function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees.
        static_argnums: the arguments that are hashable values and no arrays; 0 is the scope.
        static_argnames: those among the arguments given by name.
        donate_argnums: the arguments whose arrays may be used for the results.
        device: where to run, instead of where the arguments are.
        backend: the platform where to run, such as "cpu".

    Returns:
        The function. Its `explain_recompile()` says what differed when it was compiled again, and
        its `lower` is as that of `jax.jit`.
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
    """`jax.eval_shape` of `fn(scope, *args)`; what it changes becomes `jax.ShapeDtypeStruct`.

    Args:
        fn: the function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees.
    """
    in_axes = (shared(variables, rngs), None, None)
    lifted = lifting.eval_shape(ScopeKind("eval_shape"), spread(fn), in_axes=in_axes)
    return taking_all(fn, lifted)


def checkify(
    fn: Fn,
    variables: Filter = True,
    rngs: Filter = True,
    errors: Any = None,
) -> Fn:
    """`jax.experimental.checkify.checkify` of `fn(scope, *args)`.

    Args:
        fn: the function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees.
        errors: which checks are made; None for `checkify.user_checks`.

    Returns:
        A function that returns the error, which may be none, and the result of `fn`.
    """
    in_axes = (shared(variables, rngs), None, None)
    lifted = lifting.checkify(ScopeKind("checkify"), spread(fn), errors=errors, in_axes=in_axes)
    return taking_all(fn, lifted)


def named_call(fn: Fn, name: str | None = None) -> Fn:
    """`fn` with a name for its operations in profiles.

    Args:
        fn: the function.
        name: the name; that of the function by default.
    """
    shown = name or getattr(fn, "__name__", "fn")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(shown):
            return fn(*args, **kwargs)

    return call
