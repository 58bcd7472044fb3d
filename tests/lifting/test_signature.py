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
from weft.lifting import DIFF
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


def of_one(x):
    return 2 * x


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


@pytest.mark.parametrize("argnums", [2.0, ("x",), nnx.StateAxes({...: 0})], ids=str)
@pytest.mark.parametrize(("title", "what"), CASES)
def test_argnums_that_are_no_positions(title, what, argnums):
    title, transform = title.split(" ")[0], TRANSFORMATIONS[title][0]
    with pytest.raises(
        TransformArgumentError,
        match=rf"^{title}\(.*{what}_argnums has .*; give positions of arguments, such as 0",
    ):
        Transformed = transform(**{f"{what}_argnums": argnums})
        if isinstance(Transformed, type):
            Transformed().init(jax.random.key(0), jnp.ones(2))


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
