import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.core import apply, lift
from weft.errors import TransformArgumentError

VARIABLES = {"params": {"w": jnp.float32(2)}, "state": {"n": jnp.int32(0)}}


def scaled(scope, x, y=1.0):
    if scope.is_mutable_collection("state"):
        scope.put_variable("state", "n", scope.get_variable("state", "n") + 1)
    return scope.get_variable("params", "w") * x * y


def test_vjp_variables_and_several_scopes():
    def f(scope):
        scopes = scope.push("a"), scope.push("b")

        def product(scopes):
            a, b = (s.get_variable("other", "v") for s in scopes)
            return a * b

        return lift.vjp(product, scopes, vjp_variables="other")[1](1.0)

    ((a, b),) = apply(f)({"other": {"a": {"v": 2.0}, "b": {"v": 3.0}}})
    assert (a, b) == ({"other": {"v": 3}}, {"other": {"v": 2}})


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
