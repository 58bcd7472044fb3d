import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from tests.lifting.counting import BoxKind
from weft import lifting
from weft.lifting import CARRY, DIFF
from weft.lifting.names import named_after

KIND = BoxKind()


def train_step(state, batch, *, rate=0.1):
    return jax.tree.map(lambda s: s + rate * batch, state)


class Callable:
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (train_step, "train_step"),
        (functools.partial(train_step, rate=0.2), "train_step"),
        (jax.jit(train_step), "train_step"),
        (Callable(), "Callable"),
        (Callable().__call__, "__call__"),
        (jnp.sin, "sin"),
        (max, "max"),
    ],
    ids=["function", "partial", "jitted", "object", "method", "of jax", "of C"],
)
def test_a_name_is_that_of_the_users_function(fn, name):
    pure = named_after(fn, lambda *args: args, leading=("static",))
    assert pure.__name__ == name
    assert inspect.signature(pure).parameters


def test_arguments_follow_those_of_the_engine():
    def fn(static, b, /, _static, c=1, *, d, **rest):
        del static, b, _static, c, d, rest

    def shown(**kwargs):
        return str(inspect.signature(named_after(fn, lambda: None, **kwargs)))

    assert shown(leading=("x", "y")) == "(x, y, static, b, /, _static, c=1, *, d, **rest)"
    assert shown(leading=("static",)).startswith("(__static, static, b, /, _static")
    assert shown(leading=(), left_out=(0, 3, "d")) == "(b, /, _static, **rest)"
    assert shown() == "(*args, **kwargs)"


def test_a_jitted_function_keeps_its_names():
    jitted = lifting.jit(KIND, train_step, donate_argnums=0)
    lowered = jitted.lower({"w": jnp.ones(2)}, jnp.ones(2), rate=jnp.float32(2))
    text = lowered.as_text(debug_info=True)
    assert "module @jit_train_step" in text
    assert all(f'loc("{name}")' in text for name in ("state['w']", "batch", "rate"))
    assert "HloModule jit_train_step" in lowered.compile().as_text()
    with pytest.raises(TypeError, match=r"<function train_step .* at path batch"):
        jitted(jnp.ones(2), "text")


def carried(x, y):
    return x + y, y


def of_one(x):
    return 2 * x


TRANSFORMED = {
    "vmap": lambda: lifting.vmap(KIND, of_one),
    "remat": lambda: lifting.remat(KIND, of_one),
    "scan": lambda: (
        lambda x: lifting.scan(KIND, carried, in_axes=(CARRY, 0), out_axes=(CARRY, 0))(x[0], x)
    ),
    "fori_loop": lambda: lifting.fori_loop(KIND, 0, 3, lambda i, x: of_one(x), in_axes=CARRY),
    "while_loop": lambda: lifting.while_loop(KIND, lambda x: x.sum() < 9, of_one, in_axes=CARRY),
    "switch": lambda: functools.partial(lifting.switch(KIND, [of_one, of_one]), 0),
    "value_and_grad": lambda: lifting.value_and_grad(KIND, lambda x: of_one(x).sum(), wrt=DIFF),
    "eval_shape": lambda: lifting.eval_shape(KIND, of_one),
}


@pytest.mark.parametrize("of_name", TRANSFORMED)
def test_no_function_that_jax_sees_is_of_the_engine(of_name, monkeypatch):
    """The error about a leaked tracer names the user's function."""
    leaked = []

    def leaking(x):
        leaked.append(x)
        return 2 * x

    monkeypatch.setitem(globals(), "of_one", leaking)
    monkeypatch.setitem(globals(), "carried", lambda x, y: (leaking(x), y))
    TRANSFORMED[of_name]()(jnp.ones(2))
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jnp.sin(leaked[0]) + 1
    assert "weft/lifting" not in str(caught.value).split("The leaked")[0]


def test_rules_of_their_own_keep_their_names():
    def forward(x):
        return of_one(x), None

    def tangent(t, x):
        return of_one(x), of_one(t)

    with_vjp = lifting.custom_vjp(KIND, of_one, forward, lambda _, g: (g,), wrt=DIFF)
    with_jvp = lifting.custom_jvp(KIND, of_one, tangent, wrt=DIFF)
    for call in (with_vjp, with_jvp):
        assert "name=of_one" in str(jax.make_jaxpr(call)(1.0))
