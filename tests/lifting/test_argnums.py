"""Positions that a function does not have are refused in all ways of writing."""

import functools

import jax
import jax.numpy as jnp
import pytest

from weft import linen, nnx
from weft.core import apply, lift
from weft.errors import TransformArgumentError
from weft.hierarchy import derivatives, transforms


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
def test_positions_that_there_are_not(title, what, position):
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
def test_positions_that_a_call_has_not(transformed, what):
    with pytest.raises(TransformArgumentError, match=f" {what} has -?[23], .* called with 2 arg"):
        transformed(1.0, 2.0)


def test_a_function_of_any_arguments_may_have_any():
    assert lift.jit(lambda scope, *xs: xs[0], static_argnums=9) is not None


@pytest.mark.parametrize("position", [2, -1])
def test_arguments_without_a_derivative_from_the_end(position):
    def scaled(scope, x, factor):
        return x * factor

    def forward(scope, x, factor):
        return x * factor, None

    def backward(factor, needed, cotangent):
        return {}, cotangent * 10 * factor

    f = apply(lift.custom_vjp(scaled, forward, backward, nondiff_argnums=(position,)))
    assert jax.grad(lambda x: f({}, x, 3.0))(1.0) == 30
