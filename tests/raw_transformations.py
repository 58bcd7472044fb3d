"""Transformations of JAX around a function, as a user of a module writes them."""

import jax
import numpy as np
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec


def sharded(f, x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    p = PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=p, out_specs=p, check_vma=False)(x)


def with_rule(f, x):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), None), lambda _, t: (t,))
    return jax.jit(g)(x)


def stepped(f, x):
    return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(x)), (0, x))[1]


# Each calls `f` and returns `f(x)`; its name, and the lifted replacement.
RAW = {
    "jit": (lambda f, x: jax.jit(f)(x), "jax.jit", "jit"),
    "vmap": (lambda f, x: jax.vmap(f)(x), "jax.vmap", "vmap"),
    "grad": (
        lambda f, x: jax.grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(x)[1],
        "jax.grad",
        "grad",
    ),
    "value_and_grad": (
        lambda f, x: jax.value_and_grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(x)[0][1],
        "jax.value_and_grad",
        "value_and_grad",
    ),
    "vjp": (lambda f, x: jax.vjp(f, x)[0], "jax.vjp", "vjp"),
    "jvp": (lambda f, x: jax.jvp(f, (x,), (x,))[0], "jax.jvp", "jvp"),
    "linearize": (lambda f, x: jax.linearize(f, x)[0], "jax.linearize", "jvp"),
    "jacobian": (
        lambda f, x: jax.jacrev(lambda x: (f(x), f(x)), has_aux=True)(x)[1],
        "a Jacobian of JAX",
        "jvp",
        "vjp",
    ),
    "checkpoint": (lambda f, x: jax.checkpoint(f)(x), "jax.checkpoint", "remat"),
    "scan": (
        lambda f, x: jax.lax.scan(lambda c, y: (c, f(y)), None, x)[1],
        "jax.lax.scan",
        "scan",
    ),
    "map": (lambda f, x: jax.lax.map(f, x), "jax.lax.map", "scan"),
    "while_loop": (stepped, "jax.lax.while_loop", "while_loop"),
    "fori_loop": (
        lambda f, x: jax.lax.fori_loop(0, 2, lambda i, _: f(x), x),
        "jax.lax.fori_loop",
        "fori_loop",
    ),
    "cond": (lambda f, x: jax.lax.cond(True, f, lambda x: f(x) + 1, x), "jax.lax.cond", "cond"),
    "switch": (lambda f, x: jax.lax.switch(1, [lambda x: x, f], x), "jax.lax.switch", "switch"),
    "eval_shape": (
        lambda f, x: jax.eval_shape(lambda x: f(x), x) and jax.jit(f)(x),
        "jax.eval_shape",
        "eval_shape",
    ),
    "shard_map": (sharded, "jax.shard_map", "shard_map"),
    "custom_vjp": (with_rule, "a custom derivative of JAX", "custom_vjp", "custom_jvp"),
    "checkify": (lambda f, x: checkify.checkify(f)(x)[1], "checkify", "checkify"),
    "jit in vmap": (lambda f, x: jax.vmap(jax.jit(f))(x), "jax.jit", "jit"),
    "vmap in jit": (lambda f, x: jax.jit(jax.vmap(f))(x), "jax.vmap", "vmap"),
}
