"""Derivatives of Linen modules: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp

from tests.parity.linen import KEY
from tests.parity.linen_transforms import (
    Programs,
    X,
    pair,
)

programs = Programs()


@programs.body()
def vjp_of_a_module(nn, self, x):
    y, pullback = nn.vjp(lambda dense, x: dense(x), nn.Dense(2), x)
    return y, pullback(jnp.ones_like(y))


@programs.body()
def vjp_with_more_results(nn, self, x):
    f = lambda m, x: (m.encode(x), {"rest": x})  # noqa: E731
    y, pullback, rest = nn.vjp(f, pair(nn)(), x, has_aux=True, vjp_variables=["params"])
    return y, pullback(y), rest


@programs.body()
def value_and_grad_of_a_module(nn, self, x):
    return nn.value_and_grad(lambda m, x, y: (m(x) * y).sum(), pair(nn)(), x, 2.0)


@programs.body()
def value_and_grad_with_the_rest(nn, self, x):
    loss = lambda m, x, y: ((m(x) * y).sum(), {"rest": x})  # noqa: E731
    (value, rest), (of_x, of_y) = nn.value_and_grad(loss, pair(nn)(), x, 2.0, has_aux=True)
    return value, rest, of_x, of_y


@programs.body()
def grad_of_a_module(nn, self, x):
    return nn.grad(lambda m, x: (m(x).sum(), x), pair(nn)(), x, has_aux=True)


@programs.body()
def jvp_of_a_module(nn, self, x):
    dense = nn.Dense(2)
    dense(x)
    tangents = {"params": jax.tree.map(jnp.ones_like, dense.variables["params"])}
    return nn.jvp(lambda dense, x: dense(x), dense, (x,), (2 * x,), tangents)


@programs.body()
def jvp_before_there_are_variables(nn, self, x):
    dense = nn.Dense(2)
    tangents = {"params": jax.tree.map(jnp.ones_like, dense.variables.get("params", {}))}
    return nn.jvp(lambda dense, x: dense(x), dense, (x,), (2 * x,), tangents)


@programs.program
def custom_vjp_of_a_module(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            def forward(dense, x):
                return nn.vjp(lambda dense, x: dense(x), dense, x)

            def backward(pullback, cotangent):
                of_params, of_x = pullback(cotangent)
                return jax.tree.map(jnp.sign, of_params), 3 * of_x

            f = nn.custom_vjp(lambda dense, x: dense(x), forward, backward)
            return nn.Dense(1)(f(nn.Dense(2), x))

    variables = Model().init(KEY, X)
    loss = lambda v, x: Model().apply(v, x).sum()  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1))(variables, X), variables


@programs.program
def custom_vjp_without_gradients_of_an_argument(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            def run(dense, act, x):
                return act(dense(x))

            def forward(dense, act, x):
                return nn.vjp(lambda dense, x: act(dense(x)), dense, x)

            def backward(act, pullback, cotangent):
                of_params, of_x = pullback(cotangent)
                return jax.tree.map(jnp.sign, of_params), of_x

            f = nn.custom_vjp(run, forward, backward, nondiff_argnums=(1,))
            return f(nn.Dense(2), nn.tanh, x)

    variables = Model().init(KEY, X)
    return jax.grad(lambda v: Model().apply(v, X).sum())(variables), variables


@programs.program
def derivatives_of_bound_methods(nn):
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(2)

        def loss(self, x):
            return self.dense(x).sum(), x

        def rest(self, x):
            return self.dense(x)

        def __call__(self, x):
            y, pullback, rest = nn.vjp(self.loss, self, x, has_aux=True)
            tangents = {"params": jax.tree.map(jnp.ones_like, self.variables["params"])}
            of_jvp = nn.jvp(self.rest, self, (x,), (x,), tangents)
            return y, pullback(y), rest, nn.grad(self.loss, self, x, has_aux=True), of_jvp

    return Model().init_with_output(KEY, X)


test_variables_agree = programs.test()
