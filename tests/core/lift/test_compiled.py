import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify as jax_checkify

from tests.keys import draw
from weft.core import apply, init, lift, nn
from weft.errors import TransformArgumentError

KEY = jax.random.key(0)
X = draw(0, 2, 3)


def counted():
    traces = []

    def block(scope, x, *args, **kwargs):
        traces.append(1)
        return nn.dense(scope, x, 3)

    return block, traces


def test_all_layers_share_one_trace():
    block, traces = counted()
    jitted = lift.jit(block)

    def model(scope, x):
        for i in range(5):
            x = jitted(scope.push(f"layer{i}"), x)
        return x

    _, variables = init(model)(KEY, X)
    kernels = [variables["params"][f"layer{i}"]["kernel"] for i in range(5)]
    assert len({float(k[0, 0]) for k in kernels}) == 5
    assert len(traces) == 1
    traces.clear()
    x = X
    for i in range(5):
        x = apply(block)({"params": variables["params"][f"layer{i}"]}, x)
    traces.clear()
    np.testing.assert_allclose(apply(model)(variables, X), x, rtol=1e-5)
    assert len(traces) == 1


def test_functions_made_anew_are_compiled_once_and_closures_keep_their_values():
    def run(scale):
        return apply(lift.jit(lambda scope, x: x * scale))({}, X)

    for scale in (2.0, 3.0, 2.0):
        np.testing.assert_allclose(run(scale), X * scale, rtol=1e-6)
    for i in range(20):
        np.testing.assert_allclose(run(float(i)), X * i, rtol=1e-6)
        array = jnp.full((1, 3), i)
        np.testing.assert_allclose(apply(lift.jit(lambda s, x, a=array: x * a))({}, X), X * i)


def test_what_differed_is_said():
    f = lift.jit(lambda scope, x: x + scope.get_variable("params", "w", 0.0))
    apply(f)({}, X)
    assert "nothing was compiled again" in f.explain_recompile()
    apply(f)({}, X[0])
    assert "float32[2,3] before, float32[3]" in f.explain_recompile()
    apply(f)({"params": {"w": 1.0}}, X[0])
    assert "'params'" in f.explain_recompile()
    apply(f, mutable=["params"])({"params": {"w": 1.0}}, X[0])
    assert "mutable" in f.explain_recompile()


def test_static_arguments_and_names():
    def f(scope, x, power, *, negate):
        assert isinstance(power, int)
        return (-1 if negate else 1) * x**power

    jitted = lift.jit(f, static_argnums=2, static_argnames="negate")
    np.testing.assert_allclose(apply(jitted)({}, X, 2, negate=True), -(X**2), rtol=1e-5)
    rematted = lift.remat(functools.partial(f, negate=False), static_argnums=(2,))
    np.testing.assert_allclose(apply(rematted)({}, X, 2), X**2, rtol=1e-5)


def test_jit_runs_where_it_is_told_to():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    f = lift.jit(lambda scope: jnp.ones(3), device=jax.devices()[1])
    assert apply(f)({}).devices() == {jax.devices()[1]}
    assert apply(lift.jit(lambda scope: jnp.ones(3), backend="cpu"))({}).shape == (3,)


def test_lowering_commits_nothing():
    f = lift.jit(lambda scope, x: scope.put_variable("state", "n", x))

    def lower(scope, x):
        return f.lower(scope, x).as_text(), scope.has_variable("state", "n")

    text, there = apply(lower, mutable=["state"])({}, X)[0]
    assert "func.func" in text
    assert not there


def test_state_crosses_jit():
    def f(scope, x):
        n = scope.variable("state", "n", lambda: jnp.int32(0))
        n.value += 1
        return x * scope.get_variable("params", "w")

    y, changed = apply(lift.jit(f), mutable=["state"])({"params": {"w": 2.0}}, 3.0)
    assert (y, changed) == (6, {"state": {"n": 1}})


def test_remat_computes_again_in_the_backward_pass():
    def f(scope, x):
        return jnp.sin(nn.dense(scope, x, 3)).sum()

    _, variables = init(f)(KEY, X)
    plain = jax.grad(lambda v: apply(f)(v, X))(variables)
    again = jax.grad(lambda v: apply(lift.remat(f))(v, X))(variables)
    np.testing.assert_allclose(again["params"]["kernel"], plain["params"]["kernel"], rtol=1e-5)
    jaxpr = jax.make_jaxpr(jax.grad(lambda v: apply(lift.checkpoint(f))(v, X)))(variables)
    assert "remat" in str(jaxpr)
    with pytest.raises(TransformArgumentError, match="name the arguments that have to be concrete"):
        lift.remat(f, concrete=True)


def test_shapes_instead_of_arrays():
    f = lift.eval_shape(lambda scope, x: nn.dense(scope, x, 4))
    shape, variables = init(f)(KEY, X)
    assert shape.shape == (2, 4)
    assert variables["params"]["kernel"] == jax.ShapeDtypeStruct((3, 4), jnp.float32)


def test_failed_checks_come_back():
    def f(scope, x):
        jax_checkify.check(jnp.all(x > 0), "not all are positive")
        scope.put_variable("state", "x", x)
        return x

    checked = apply(lift.checkify(f), mutable=["state"])
    (error, _), changed = checked({}, jnp.ones(2))
    assert error.get() is None
    assert changed["state"]["x"].shape == (2,)
    (error, _), _ = checked({}, -jnp.ones(2))
    assert "not all are positive" in error.get()


def test_names_are_shown_in_profiles():
    f = lift.named_call(lambda scope, x: jnp.sin(x), "my_layer")
    text = jax.jit(lambda x: apply(f)({}, x)).lower(X).as_text(debug_info=True)
    assert "my_layer" in text
