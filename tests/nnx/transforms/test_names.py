"""Whatever transforms a function, what JAX compiles has the user's name for it."""

import jax
import jax.numpy as jnp
import pytest

from weft import nnx


class Model(nnx.Module):
    def __init__(self, *shape):
        self.w = nnx.Param(jnp.ones(shape))


def user_step(model, x):
    return jnp.sum(model.w * x)


def user_body(x, model):
    return x * model.w.sum(), x


def user_loop(i, x):
    return x + 1.0


def ruled():
    f = nnx.custom_vjp(user_step)
    f.defvjp(lambda model, x: (f(model, x), x), lambda x, g: (nnx.state(Model(2)), x))
    return lambda: f(Model(2), jnp.ones(2))


X = jnp.ones(2)
RUNS = {
    "jit": (lambda: nnx.jit(user_step)(Model(2), X), "user_step"),
    "jit of a partial": (lambda: nnx.jit_partial(user_step, Model(2))(X), "user_step"),
    "remat": (lambda: nnx.remat(user_step)(Model(2), X), "user_step"),
    "custom_vjp": (ruled(), "user_step"),
    "pmap": (lambda: nnx.pmap(user_step)(Model(1, 2), X[None]), "user_step"),
    "cond": (lambda: nnx.cond(X[0] > 0, user_step, user_step, Model(2), X), "user_step"),
    "scan": (lambda: nnx.scan(user_body)(jnp.array(1.0), Model(2)), "user_body"),
    "fori_loop": (lambda: nnx.fori_loop(0, 2, user_loop, 1.0), "user_loop"),
}
INTERNAL = ("pure", "call", "run", "checked", "body", "of_values", "of_leaves", "lambda")


def names_in(run):
    """The names of all functions that are traced inside of a run."""
    found = set()

    def look(jaxpr):
        found.add(jaxpr.debug_info.func_name)
        for equation in jaxpr.eqns:
            name = equation.params.get("name")
            found.update([name] if isinstance(name, str) else [])
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    look(inner)

    def outermost():
        return run()

    look(jax.make_jaxpr(outermost)().jaxpr)
    return found - {"outermost"}


@pytest.mark.parametrize(("run", "name"), RUNS.values(), ids=RUNS)
def test_what_is_compiled_is_named_after_the_users_function(run, name):
    found = names_in(run)
    assert name in found, found
    assert not any(part == given for given in found for part in INTERNAL), found
