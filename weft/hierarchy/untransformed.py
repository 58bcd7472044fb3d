"""What a child may do inside of a JAX transformation that the invocation around it does not cross.

`jax.vmap(self.child)(x)` hands no context through. The child finds its parameters, so a pure call
passes. What it would add to the outputs would leak a tracer, and its PRNG key would be the same for
every index or iteration, so these are refused.
"""

import sys
from typing import TYPE_CHECKING

from weft.errors import ContextTransformError

if TYPE_CHECKING:
    from weft.hierarchy.context import InvocationContext

# By the function of JAX that runs: what its user called, and what to call instead.
_NAMES = {
    "ad_checkpoint.fun_remat": ("jax.checkpoint", "remat"),
    "api.eval_shape": ("jax.eval_shape", "eval_shape"),
    "api.grad_f": ("jax.grad", "grad"),
    "api.grad_f_aux": ("jax.grad", "grad"),
    "api.jacfun": ("a Jacobian of JAX", "jvp` or `vjp"),
    "api.jvp": ("jax.jvp", "jvp"),
    "api.linearize": ("jax.linearize", "jvp"),
    "api.value_and_grad_f": ("jax.value_and_grad", "value_and_grad"),
    "api.vjp": ("jax.vjp", "vjp"),
    "api.vmap_f": ("jax.vmap", "vmap"),
    "checkify.checked_fun": ("checkify", "checkify"),
    "conditionals.cond": ("jax.lax.cond", "cond"),
    "conditionals.switch": ("jax.lax.switch", "switch"),
    "custom_derivatives.__call__": ("a custom derivative of JAX", "custom_vjp` or `custom_jvp"),
    "loops.fori_loop": ("jax.lax.fori_loop", "fori_loop"),
    "loops.map": ("jax.lax.map", "scan_in_context"),
    "loops.scan": ("jax.lax.scan", "scan_in_context"),
    "loops.while_loop": ("jax.lax.while_loop", "while_loop"),
    "pjit.cache_miss": ("jax.jit", "jit"),
    "shard_map.wrapped": ("jax.shard_map", "shard_map"),
}
# Those that call another one of them, as `jax.grad` does `jax.vjp`.
_CALL_OTHERS = {
    "api.grad_f",
    "api.grad_f_aux",
    "api.jacfun",
    "api.value_and_grad_f",
    "loops.fori_loop",
    "loops.map",
}


def refused(context: "InvocationContext", what: str, why: str) -> ContextTransformError:
    """The error about something that a call inside of a transformation may not do.

    Args:
        context: in which it was to be done.
        what: was to be done.
        why: it is not.
    """
    module = context.module
    of_jax, ours = _running()
    return ContextTransformError(
        f"{what} in {context.path() if module is None else module.path()!r} inside of {of_jax}, "
        f"through which the invocation is not handed, so {why}. Use `{ours}` of "
        "`weft.hierarchy.transforms` in its place: it hands parameters, keys and outputs through."
    )


def _running() -> tuple[str, str]:
    """The innermost transformation of JAX that the user called, and what is to take its place."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax."):
            key = f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
            if key in _NAMES and (found is None or key in _CALL_OTHERS):
                found = _NAMES[key]
        elif module.startswith("weft.lifting."):
            found = None  # it was called there, and not by the user
        elif found is not None:
            break
        frame = frame.f_back
    return found or ("a transformation of JAX", "the transformation of the same name")
