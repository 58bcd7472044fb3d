import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft.core import apply, init, lift, nn
from weft.errors import TransformArgumentError

KEY = quick_key(0)
VARIABLES = {"params": {"w": jnp.float32(2)}, "state": {"n": jnp.int32(0)}}


def scaled(scope, x, y=1.0):
    if scope.is_mutable_collection("state"):
        scope.put_variable("state", "n", scope.get_variable("state", "n") + 1)
    return scope.get_variable("params", "w") * x * y


def test_vjp_of_collections_and_arguments():
    def f(scope, x, y):
        value, pullback, aux = lift.vjp(
            lambda s, x, y: (scaled(s, x, y), "aux" and y), scope, x, y, has_aux=True
        )
        return value, pullback(1.0), aux

    (value, grads, aux), changed = apply(f, mutable=["state"])(VARIABLES, 3.0, 5.0)
    assert value == 30
    assert grads == ({"params": {"w": 15}}, 10, 6)
    assert aux == 5
    assert changed["state"]["n"] == 1


def test_vjp_variables_and_several_scopes():
    def f(scope):
        scopes = scope.push("a"), scope.push("b")

        def product(scopes):
            a, b = (s.get_variable("other", "v") for s in scopes)
            return a * b

        return lift.vjp(product, scopes, vjp_variables="other")[1](1.0)

    ((a, b),) = apply(f)({"other": {"a": {"v": 2.0}, "b": {"v": 3.0}}})
    assert (a, b) == ({"other": {"v": 3}}, {"other": {"v": 2}})


def test_gradients_of_arguments():
    f = apply(lambda s, x: lift.value_and_grad(scaled, s, x, 5.0), mutable=["state"])
    (value, grads), changed = f(VARIABLES, 3.0)
    assert (value, grads, changed["state"]["n"]) == (30, (10, 6), 1)
    with_aux = lambda s, x: (scaled(s, x), "aux" and x)  # noqa: E731
    g = apply(lambda s, x: lift.value_and_grad(with_aux, s, x, has_aux=True))
    assert g(VARIABLES, 3.0) == (6, 3, (2,))
    assert apply(lambda s, x: lift.grad(scaled, s, x))(VARIABLES, 3.0) == (2,)
    assert apply(lambda s, x: lift.grad(with_aux, s, x, has_aux=True))(VARIABLES, 3.0) == ((2,), 3)


def test_jvp_of_variables_and_arguments():
    def f(scope, x):
        return lift.jvp(scaled, scope, (x,), (1.0,), {"params": {"w": jnp.float32(10)}})

    (value, tangent), changed = apply(f, mutable=["state"])(VARIABLES, 3.0)
    assert (value, tangent) == (6, 2 * 1 + 10 * 3)
    assert changed["state"]["n"] == 1


def sign_gradients(dense):
    def forward(scope, x, features):
        return lift.vjp(lambda scope, x: dense(scope, x, features), scope, x)

    def backward(features, pullback, cotangent):
        params, *rest = pullback(cotangent)
        return jax.tree.map(jnp.sign, params), *rest

    return lift.custom_vjp(dense, forward, backward, nondiff_argnums=(2,))


@pytest.mark.parametrize("around", [lambda f: f, lift.jit, lift.remat], ids=["", "jit", "remat"])
def test_custom_backward_function(around):
    dense = sign_gradients(nn.dense)
    model = around(lambda scope, x: dense(scope, x, 4))
    x = jax.random.normal(KEY, (2, 3))
    y, variables = init(model)(KEY, x)
    plain, _ = init(around(lambda scope, x: nn.dense(scope, x, 4)))(KEY, x)
    np.testing.assert_allclose(y, plain, rtol=1e-6)
    grads = jax.grad(lambda v: apply(model)(v, x).sum())(variables)
    assert set(np.unique(np.abs(grads["params"]["kernel"]))) == {1}


def test_custom_backward_function_after_a_loop_that_stacks_state():
    def step(scope, x, _):
        scope.put_variable("state", "seen", x)
        return jnp.sin(x), None

    def model(scope, x):
        x, _ = lift.scan(step, variable_axes={"state": 0}, length=2)(scope, x, None)
        double = lift.custom_vjp(
            lambda scope, x: 2 * x, lambda scope, x: (2 * x, None), lambda _, g: ({}, 3 * g)
        )
        return double(scope, x)

    loss = lambda x: apply(model, mutable=["state"])({}, x)[0]  # noqa: E731
    expected = 3 * np.cos(1.0) * np.cos(np.sin(1.0))
    np.testing.assert_allclose(jax.grad(loss)(1.0), expected, rtol=1e-6)


@pytest.mark.parametrize("mutable", [False, ["params"]])
@pytest.mark.parametrize("is_backward", [True, False], ids=["backward", "tangent"])
def test_unchanged_variables_keep_own_gradients_after_custom_rules(mutable, is_backward):
    def read(scope):
        return scope.get_variable("params", "w")

    def loss(w):
        def body(scope):
            if is_backward:
                backward = lambda _, g: ({"params": {"w": 100 * g}},)  # noqa: E731
                f = lift.custom_vjp(read, lambda scope: (read(scope), None), backward)
            else:
                f = lift.custom_jvp(
                    read, lambda scope, primals, _, of: (read(scope), 100 * of["params"]["w"])
                )
            return f(scope) + 7 * read(scope)

        result = apply(body, mutable=mutable)({"params": {"w": w}})
        return result[0] if mutable else result

    assert jax.grad(loss)(2.0) == 107


def test_custom_tangent():
    def rule(scope, primals, tangents, variable_tangents):
        w = variable_tangents["params"]["w"]
        return scaled(scope, *primals), 100.0 * tangents[0] + 1000.0 * w

    model = lift.custom_jvp(scaled, rule)
    value, changed = apply(model, mutable=["state"])(VARIABLES, 3.0)
    assert (value, changed["state"]["n"]) == (6, 1)
    of_x = jax.grad(lambda x: apply(model)(VARIABLES, x))(3.0)
    of_w = jax.grad(lambda w: apply(model)({**VARIABLES, "params": {"w": w}}, 3.0))(2.0)
    assert (of_x, of_w) == (100, 1000)
    vmapped = lift.vmap(model, {"params": None, "state": None}, {})
    np.testing.assert_array_equal(apply(vmapped)(VARIABLES, jnp.arange(3.0)), [0, 2, 4])


def test_reduce_axes_is_rejected():
    with pytest.raises(TransformArgumentError, match=r"sum the gradients with jax\.lax\.psum"):
        apply(lambda s: lift.vjp(scaled, s, 1.0, reduce_axes=("batch",)))(VARIABLES)
