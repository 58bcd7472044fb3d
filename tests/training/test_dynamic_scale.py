import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.training.dynamic_scale import DynamicScale

X = jnp.arange(3.0)


def loss(x, y=1.0):
    return jnp.sum(x**2) * y


def test_value_and_gradients_are_not_scaled():
    result = DynamicScale(scale=1024.0).value_and_grad(loss, argnums=(0, 1))(X, 2.0)
    assert result.finite and result.aux == 10.0
    np.testing.assert_array_equal(result.grad[0], 4 * X)
    assert result.grad[1] == 5.0


def test_the_rest_of_the_result_comes_with_the_value():
    def with_rest(x, y):
        return loss(x, y), {"x": x}

    value, rest = DynamicScale().value_and_grad(with_rest, has_aux=True)(X, y=2.0).aux
    assert value == 10.0 and rest["x"].tolist() == X.tolist()


def test_small_gradients_of_half_precision_survive():
    x = jnp.array(1e-4, jnp.float16)
    tiny = lambda x: x * jnp.float16(1e-2) * jnp.float16(1e-6)  # noqa: E731
    assert jax.grad(tiny)(x) == 0
    result = DynamicScale(scale=2.0**15).value_and_grad(tiny)(x)
    assert result.grad.dtype == jnp.float32
    assert result.grad == pytest.approx(1e-8, rel=0.1)


def test_the_scale_grows_after_finite_steps_and_falls_after_others():
    dynamic, scales = DynamicScale(growth_interval=2, scale=4.0), []
    step = jax.jit(lambda d, x: d.value_and_grad(loss)(x))
    for x in (X, X, X, jnp.inf * X, X, X, X):
        dynamic, finite, _, _ = step(dynamic, x)
        scales.append((float(dynamic.scale), int(dynamic.fin_steps), bool(finite)))
    assert scales == [
        (4, 1, True),
        (4, 2, True),
        (8, 0, True),
        (4, 0, False),
        (4, 1, True),
        (4, 2, True),
        (8, 0, True),
    ]


@pytest.mark.parametrize("minimum, expected", [(3.0, 3.0), (None, 2.0)])
def test_the_scale_falls_no_lower_than_asked(minimum, expected):
    dynamic = DynamicScale(scale=4.0, minimum_scale=minimum)
    assert dynamic.value_and_grad(loss)(jnp.nan * X).dynamic_scale.scale == expected


def test_the_scale_does_not_overflow():
    dynamic = DynamicScale(scale=3e38, growth_interval=0)
    scale = dynamic.value_and_grad(jnp.sum)(X).dynamic_scale.scale
    assert scale == jnp.finfo(jnp.float32).max


def test_gradients_are_averaged_and_judged_over_an_axis():
    def step(x):
        return DynamicScale(scale=4.0).value_and_grad(loss, axis_name="i")(x)

    result = jax.vmap(step, axis_name="i")(jnp.stack([X, X + 1]))
    np.testing.assert_allclose(result.grad, jnp.stack([2 * X + 1, 2 * X + 1]))
    result = jax.vmap(step, axis_name="i")(jnp.stack([X, X * jnp.inf]))
    assert not result.finite.any()
    assert result.dynamic_scale.scale.tolist() == [2.0, 2.0]
