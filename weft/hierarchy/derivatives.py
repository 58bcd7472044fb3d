"""Derivatives of functions that invoke modules, and custom derivative rules."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from weft import lifting
from weft.hierarchy.context import InvocationContext, require_context
from weft.hierarchy.context_kind import OUTPUTS
from weft.hierarchy.in_context import CONTEXTS, in_context, spread
from weft.lifting import DIFF, Roles
from weft.lifting.argnums import given_at
from weft.lifting.names import named_after


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.value_and_grad` to a function that invokes modules; takes the same arguments.

    Derivatives are with respect to arguments; `vjp` also returns those of parameters.

    Returns:
        A function with the arguments of `fn`, to be called inside an invocation. It returns the
        value, or with `has_aux` a pair of the value and the rest, and the gradients.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        at = given_at("value_and_grad", "argnums", fn, argnums, args)
        lifted = lifting.value_and_grad(
            CONTEXTS,
            spread(fn),
            wrt=(None, tuple(DIFF if i in at else None for i in range(len(args))), None),
            has_aux=has_aux,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
        value, (_, grads, _) = lifted(require_context("value_and_grad"), args, kwargs)
        return value, grads[at[0]] if isinstance(argnums, int) else tuple(grads[i] for i in at)

    return named_after(fn, call, leading=())


def grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Applies `jax.grad` to a function that invokes modules; see `value_and_grad`.

    Returns:
        A function that returns the gradients, or with `has_aux` a pair of them and the rest.
    """
    both = value_and_grad(fn, argnums, has_aux=has_aux, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return named_after(fn, call, leading=())


_OF_STATE = Roles((("state", DIFF), (True, None)))
# In a custom rule, state shared from above would have a derivative that no rule returns.
_OF_OWN_STATE = Roles((("state", DIFF), (("prng_key", *OUTPUTS), None)))


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Applies `jax.vjp` to a function that invokes modules, inside an invocation.

    Returns:
        The result, a function from its cotangent to the gradients of the current module's state and
        of each argument, and with `has_aux` the rest.
    """
    lifted = lifting.vjp(CONTEXTS, spread(fn), wrt=(_OF_STATE, DIFF, None), has_aux=has_aux)
    value, pullback, *aux = lifted(require_context("vjp"), primals, {})
    return value, jax.tree_util.Partial(_pulled_back, pullback), *aux


def _pulled_back(pullback: Callable[[Any], Any], cotangent: Any) -> tuple[Any, ...]:
    (of_state, _), of_primals, _ = pullback(cotangent)
    return of_state["state"], *of_primals


def jvp(
    fn: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    state_tangents: Any = None,
    *,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Applies `jax.jvp` to a function that invokes modules, inside an invocation.

    Args:
        tangents: of the arguments, in the same structure.
        state_tangents: of the current module's state, a dict like it; None where the state is
            constant.
        has_aux: whether `fn` returns a pair of its result and auxiliary values.

    Returns:
        The result, its tangent, and with `has_aux` the auxiliary values.
    """
    of_state = () if state_tangents is None else ({"state": state_tangents},)
    lifted = lifting.jvp(
        CONTEXTS, spread(fn), wrt=(_OF_STATE if of_state else None, DIFF, None), has_aux=has_aux
    )
    arguments = require_context("jvp"), tuple(primals), {}
    return lifted(arguments, [*of_state, *jax.tree.leaves(tuple(tangents))])


def custom_vjp(
    fn: Callable[..., Any],
    forward_fn: Callable[..., Any],
    backward_fn: Callable[..., Any],
    *,
    nondiff_argnums: Sequence[int] = (),
) -> Callable[..., Any]:
    """Applies `jax.custom_vjp` to a function that invokes modules.

    Args:
        forward_fn: takes the arguments of `fn`; returns the result of `fn` and the residuals for
            `backward_fn`, such as the function returned by `vjp`.
        backward_fn: `backward_fn(*nondiff, residuals, cotangent)` returns the gradients of the
            current module's state and of each argument not in `nondiff_argnums`.
        nondiff_argnums: the arguments without a gradient.

    Returns:
        A function with the arguments and results of `fn`, to be called inside an invocation.
        Outputs come from `forward_fn` where derivatives are taken. It cannot call modules shared
        from above the current one, since `backward_fn` could not return their gradients.
    """

    def call(*args: Any) -> Any:
        at = given_at("custom_vjp", "nondiff_argnums", fn, nondiff_argnums, args)
        nondiff, diff, together = _divided(args, at)

        def backward(needed: Any, cotangent: Any) -> list[Any]:
            of_state, *of_args = backward_fn(*nondiff, needed, cotangent)
            return [{"state": of_state}, *jax.tree.structure(diff).flatten_up_to(tuple(of_args))]

        lifted = lifting.custom_vjp(
            CONTEXTS,
            in_context(named_after(fn, lambda diff: fn(*together(diff)))),
            in_context(named_after(forward_fn, lambda diff: forward_fn(*together(diff)))),
            named_after(backward_fn, backward),
            wrt=(_OF_OWN_STATE, DIFF),
        )
        return lifted(require_context("custom_vjp"), diff)

    return named_after(fn, call, leading=())


def custom_jvp(
    fn: Callable[..., Any], jvp_fn: Callable[..., Any], *, nondiff_argnums: Sequence[int] = ()
) -> Callable[..., Any]:
    """Applies `jax.custom_jvp` to a function that invokes modules.

    Args:
        jvp_fn: `jvp_fn(*nondiff, primals, tangents, state_tangents)` returns the result of `fn` and
            its tangent; see `jvp`.
        nondiff_argnums: the arguments without a tangent.

    Returns:
        A function with the arguments and results of `fn`; as for `custom_vjp`.
    """

    def call(*args: Any) -> Any:
        at = given_at("custom_jvp", "nondiff_argnums", fn, nondiff_argnums, args)
        nondiff, diff, together = _divided(args, at)

        def rule(tangents: list[Any], context: InvocationContext, diff: tuple[Any, ...]) -> Any:
            of_state, *of_args = tangents
            of_args = jax.tree.structure(diff).unflatten(of_args)
            return in_context(jvp_fn)(context, *nondiff, diff, of_args, of_state["state"])

        lifted = lifting.custom_jvp(
            CONTEXTS,
            in_context(named_after(fn, lambda diff: fn(*together(diff)))),
            named_after(jvp_fn, rule),
            wrt=(_OF_OWN_STATE, DIFF),
        )
        return lifted(require_context("custom_jvp"), diff)

    return named_after(fn, call, leading=())


def _divided(
    args: tuple[Any, ...], at: Collection[int]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Any], list[Any]]]:
    diff = tuple(x for i, x in enumerate(args) if i not in at)
    kept = [x if i in at else None for i, x in enumerate(args)]

    def together(diff: Any) -> list[Any]:
        rest = iter(diff)
        return [x if i in at else next(rest) for i, x in enumerate(kept)]

    return tuple(args[i] for i in sorted(at)), diff, together
