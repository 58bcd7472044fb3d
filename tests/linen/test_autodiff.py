from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft import linen as nn
from weft.errors import ScopeCollectionNotFound, TransformArgumentError

KEY = quick_key(0)
X = jnp.arange(6.0).reshape(2, 3)


class Linear(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        calls = self.variable("state", "calls", lambda: 0)
        if self.is_mutable_collection("state"):
            calls.value += 1
        return x @ self.param("w", jax.nn.initializers.normal(1.0), (x.shape[-1], self.features))


def model(body):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return body(self, *args)

    return Model()


def call(m, x):
    return m(x)


def both(ms, x):
    return ms["b"](ms["a"](x)).sum()


def test_custom_vjp_of_several_modules_with_nondiff_argument():
    def fwd(ms, factor, x):
        return nn.vjp(lambda ms, x: factor * both(ms, x), ms, x)

    def bwd(factor, pullback, cotangent):
        of_variables, of_x = pullback(cotangent)
        assert factor == 3
        return jax.tree.map(jnp.sign, of_variables), of_x

    def body(self, x):
        f = nn.custom_vjp(
            lambda ms, factor, x: factor * both(ms, x), fwd, bwd, nondiff_argnums=(1,)
        )
        return f({"a": Linear(2), "b": Linear(1)}, 3, x)

    m = model(body)
    variables = m.init(KEY, X)
    loss = lambda p: m.apply({**variables, "params": p}, X)  # noqa: E731
    grads = jax.grad(loss)(variables["params"])
    for g in jax.tree.leaves(grads):
        assert set(np.unique(g)) <= {-1.0, 0.0, 1.0}


def test_custom_jvp():
    def rule(m, primals, tangents, variable_tangents):
        y, tangent = nn.jvp(call, m, primals, tangents, variable_tangents)
        return y, 10 * tangent

    m = model(lambda self, x: nn.custom_jvp(call, rule)(Linear(2), x))
    variables = m.init(KEY, X)
    w = variables["params"]["Linear_0"]["w"]
    np.testing.assert_allclose(m.apply(variables, X), X @ w, rtol=1e-6)

    def loss(params, x):
        return m.apply({**variables, "params": params}, x).sum()

    of_w, of_x = jax.grad(loss, argnums=(0, 1))(variables["params"], X)
    ones = jnp.ones((2, 2))
    np.testing.assert_allclose(of_w["Linear_0"]["w"], 10 * X.T @ ones, rtol=1e-5)
    np.testing.assert_allclose(of_x, 10 * ones @ w.T, rtol=1e-5)
    _, tangent = jax.jvp(lambda x: loss(variables["params"], x), (X,), (jnp.ones_like(X),))
    np.testing.assert_allclose(tangent, 10 * (jnp.ones_like(X) @ w).sum(), rtol=1e-5)


def test_custom_jvp_without_a_tangent_of_an_argument():
    def rule(factor, m, primals, tangents, variable_tangents):
        (x,), (t,) = primals, tangents
        return factor * m(x), factor * 100 * t

    f = nn.custom_jvp(lambda m, factor, x: factor * m(x), rule, nondiff_argnums=(1,))
    m = model(lambda self, x: f(Linear(3), 2.0, x))
    variables = m.init(KEY, X)
    of_x = jax.grad(lambda x: m.apply(variables, x).sum())(X)
    np.testing.assert_allclose(of_x, jnp.full((2, 3), 200.0))


class Holder(nn.Module):
    """Modules: one is an argument, its parent and its sibling are captured."""

    take: Callable[..., Any]

    def setup(self):
        self.given, self.sibling = Linear(2), Linear(3)
        self.scale = self.param("scale", jax.nn.initializers.constant(2.0), ())

    def __call__(self, x):
        self.given(x), self.sibling(x)
        sibling = self.sibling
        return self.take(lambda m, x: self.scale * m(sibling(x)), self.given, x)


def take_vjp(fn, m, x):
    y, pullback = nn.vjp(fn, m, x)
    return y, pullback(jnp.ones_like(y))[0]["params"]["w"]


def take_jvp(fn, m, x):
    tangents = {"params": jax.tree.map(jnp.ones_like, m.variables["params"])}
    return nn.jvp(fn, m, (x,), (0 * x,), tangents)


def test_gradients_of_child_of_captured_module():
    m = Holder(take_vjp)
    variables = m.init(KEY, X)
    hidden = X @ variables["params"]["sibling"]["w"]
    y, of_w = m.apply(variables, X)
    np.testing.assert_allclose(y, 2 * hidden @ variables["params"]["given"]["w"], rtol=1e-5)
    np.testing.assert_allclose(of_w, 2 * hidden.T @ jnp.ones((2, 2)), rtol=1e-5)
    _, tangent = Holder(take_jvp).apply(variables, X)
    np.testing.assert_allclose(tangent, 2 * hidden @ jnp.ones((3, 2)), rtol=1e-5)


def take_custom_vjp(fn, m, x):
    def backward(pullback, cotangent):
        of_variables, of_x = pullback(cotangent)
        return jax.tree.map(lambda g: 10 * g, of_variables), of_x

    return nn.custom_vjp(fn, lambda m, x: nn.vjp(fn, m, x), backward)(m, x)


def take_custom_jvp(fn, m, x):
    def rule(m, primals, tangents, variable_tangents):
        variable_tangents = jax.tree.map(lambda t: 10 * t, variable_tangents)
        return nn.jvp(fn, m, primals, tangents, variable_tangents)

    return nn.custom_jvp(fn, rule)(m, x)


@pytest.mark.parametrize("take", [take_custom_vjp, take_custom_jvp])
def test_rules_of_child_of_captured_module(take):
    m = Holder(take)
    variables = m.init(KEY, X)
    hidden = X @ variables["params"]["sibling"]["w"]
    loss = lambda p: m.apply({**variables, "params": p}, X).sum()  # noqa: E731
    grads = jax.grad(loss)(variables["params"])
    expected = 20 * hidden.T @ jnp.ones((2, 2))
    np.testing.assert_allclose(grads["given"]["w"], expected, rtol=1e-5)
    assert grads["scale"] == 0
    assert not grads["sibling"]["w"].any()


@pytest.mark.parametrize(
    "take",
    [
        lambda m, x: nn.vjp(call, m, x, variables=False, vjp_variables="state"),
        lambda m, x: nn.value_and_grad(lambda m, x: m(x).sum(), m, x, variables="state"),
        lambda m, x: nn.jvp(call, m, (x,), (x,), {}, variables="state"),
    ],
)
def test_unlifted_collection_is_named(take):
    with pytest.raises(ScopeCollectionNotFound, match="does not lift the collection"):
        model(lambda self, x: take(Linear(), x)).init(KEY, X)


def test_reduce_axes_are_rejected():
    with pytest.raises(
        TransformArgumentError, match=r"reduce_axes=\('batch',\): JAX no longer reduces over"
    ):
        model(lambda self, x: nn.vjp(call, Linear(), x, reduce_axes=("batch",))).init(KEY, X)
