"""Detection of the JAX transformation that runs, for messages.

Raw JAX transformations do not lift scopes. Errors name the transformation as the user called it,
and Weft's replacement.
"""

import sys

# By the function of JAX that runs: what its user called.
_NAMES = {
    "ad_checkpoint.fun_remat": "jax.checkpoint",
    "api.eval_shape": "jax.eval_shape",
    "api.grad_f": "jax.grad",
    "api.grad_f_aux": "jax.grad",
    "api.jacfun": "a Jacobian of JAX",
    "api.jvp": "jax.jvp",
    "api.linearize": "jax.linearize",
    "api.value_and_grad_f": "jax.value_and_grad",
    "api.vjp": "jax.vjp",
    "api.vmap_f": "jax.vmap",
    "checkify.checked_fun": "checkify",
    "conditionals.cond": "jax.lax.cond",
    "conditionals.switch": "jax.lax.switch",
    "custom_derivatives.__call__": "a custom derivative of JAX",
    "loops.fori_loop": "jax.lax.fori_loop",
    "loops.map": "jax.lax.map",
    "loops.scan": "jax.lax.scan",
    "loops.while_loop": "jax.lax.while_loop",
    "pjit.cache_miss": "jax.jit",
    "shard_map.wrapped": "jax.shard_map",
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
# What takes the place of those that Weft has under another name.
_OTHER_NAMES = {
    "a Jacobian of JAX": ("jvp", "vjp"),
    "a custom derivative of JAX": ("custom_vjp", "custom_jvp"),
    "jax.checkpoint": ("remat",),
    "jax.lax.map": ("scan",),
    "jax.linearize": ("jvp",),
}


def running_transformation() -> str:
    """Returns the innermost transformation of JAX that the user called, "" if unknown."""
    found, frame = "", sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax."):
            key = f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
            if key in _NAMES and (not found or key in _CALL_OTHERS):
                found = _NAMES[key]
        elif module.startswith("weft.lifting."):
            found = ""  # not called by the user
        elif found:
            break
        frame = frame.f_back
    return found


def lifted_names(of_jax: str) -> tuple[str, ...]:
    """Returns the names of Weft's functions for a result of `running_transformation`.

    Example:
        >>> lifted_names("jax.lax.scan"), lifted_names("jax.linearize")
        (('scan',), ('jvp',))
    """
    return _OTHER_NAMES.get(of_jax) or tuple(filter(None, (of_jax.rpartition(".")[2],)))
