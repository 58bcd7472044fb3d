"""

Positions that a function does not have are refused in all ways of writing.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from tests.lifting.counting import BoxKind
from weft import lifting, linen, nnx
from weft.core import apply, lift
from weft.errors import TransformArgumentError
from weft.hierarchy import transforms
from weft.hierarchy import transforms as derivatives
from weft.lifting import CARRY, DIFF
from weft.lifting.signature import named_after

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
def test_name_of_user_function(fn, name):
    pure = named_after(fn, lambda *args: args, leading=("static",))
    assert pure.__name__ == name
    assert inspect.signature(pure).parameters


def test_argument_order():
    def fn(static, b, /, _static, c=1, *, d, **rest):
        del static, b, _static, c, d, rest

    def shown(**kwargs):
        return str(inspect.signature(named_after(fn, lambda: None, **kwargs)))

    assert shown(leading=("x", "y")) == "(x, y, static, b, /, _static, c=1, *, d, **rest)"
    assert shown(leading=("static",)).startswith("(__static, static, b, /, _static")
    assert shown(leading=(), left_out=(0, 3, "d")) == "(b, /, _static, **rest)"
    assert shown() == "(*args, **kwargs)"


def test_jitted_function_keeps_its_names():
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
def test_traced_functions_have_user_names(of_name, monkeypatch):
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


def test_custom_rules_keep_their_names():
    def forward(x):
        return of_one(x), None

    def tangent(t, x):
        return of_one(x), of_one(t)

    with_vjp = lifting.custom_vjp(KIND, of_one, forward, lambda _, g: (g,), wrt=DIFF)
    with_jvp = lifting.custom_jvp(KIND, of_one, tangent, wrt=DIFF)
    for call in (with_vjp, with_jvp):
        assert "name=of_one" in str(jax.make_jaxpr(call)(1.0))


class Layer(linen.Module):
    def __call__(self, x):
        return x


def of_scope(scope, x):
    return x


def of_array(x, y):
    return x


def rule(*args):
    raise AssertionError


# Each with the name of its parameter; all functions take two arguments.
TRANSFORMATIONS = {
    "nnx.jit": (functools.partial(nnx.jit, of_array), "static", "donate"),
    "nnx.remat": (functools.partial(nnx.remat, of_array), "static"),
    "lift.jit": (functools.partial(lift.jit, of_scope), "static", "donate"),
    "lift.remat": (functools.partial(lift.remat, of_scope), "static"),
    "lift.custom_vjp": (functools.partial(lift.custom_vjp, of_scope, rule, rule), "nondiff"),
    "lift.custom_jvp": (functools.partial(lift.custom_jvp, of_scope, rule), "nondiff"),
    "linen.jit of a class": (functools.partial(linen.jit, Layer), "static", "donate"),
    "linen.jit": (functools.partial(linen.jit, of_scope), "static", "donate"),
    "linen.checkpoint": (functools.partial(linen.remat, Layer), "static"),
    "linen.custom_vjp": (functools.partial(linen.custom_vjp, of_scope, rule, rule), "nondiff"),
    "linen.custom_jvp": (functools.partial(linen.custom_jvp, of_scope, rule), "nondiff"),
    "jit": (functools.partial(transforms.jit, of_array), "static", "donate"),
}
CASES = [(title, what) for title, (_, *whats) in TRANSFORMATIONS.items() for what in whats]


@pytest.mark.parametrize("position", [2, -3])
@pytest.mark.parametrize(("title", "what"), CASES)
def test_invalid_argnums(title, what, position):
    title, made = title.split(" ")[0], TRANSFORMATIONS[title][0]
    words = rf"^{title}\(.*{what}_argnums has {position}, and the function takes 2 arguments"
    with pytest.raises(TransformArgumentError, match=words):
        Made = made(**{f"{what}_argnums": (position,)})
        if isinstance(Made, type):  # which is made at the first use
            Made().init(jax.random.key(0), jnp.ones(2))


@pytest.mark.parametrize(
    ("transformed", "what"),
    [
        (derivatives.value_and_grad(of_array, argnums=2), "argnums"),
        (derivatives.grad(of_array, argnums=(0, -3)), "argnums"),
        (derivatives.custom_vjp(of_array, rule, rule, nondiff_argnums=(2,)), "nondiff_argnums"),
        (derivatives.custom_jvp(of_array, rule, nondiff_argnums=(-3,)), "nondiff_argnums"),
    ],
)
def test_argnums_out_of_range(transformed, what):
    with pytest.raises(TransformArgumentError, match=f" {what} has -?[23], .* called with 2 arg"):
        transformed(1.0, 2.0)


def test_varargs_accept_any_position():
    assert lift.jit(lambda scope, *xs: xs[0], static_argnums=9) is not None


@pytest.mark.parametrize("position", [2, -1])
def test_negative_nondiff_argnums(position):
    def scaled(scope, x, factor):
        return x * factor

    def forward(scope, x, factor):
        return x * factor, None

    def backward(factor, needed, cotangent):
        return {}, cotangent * 10 * factor

    f = apply(lift.custom_vjp(scaled, forward, backward, nondiff_argnums=(position,)))
    assert jax.grad(lambda x: f({}, x, 3.0))(1.0) == 30
