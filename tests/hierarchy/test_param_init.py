import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ParameterInitError
from weft.hierarchy.param_init import (
    ConstantInitializer,
    DefaultInitializer,
    FanAxes,
    GaussianInitializer,
    Initializer,
    PerGroupInitializer,
    WeightInitializer,
    constant_initializer,
    fans,
    gaussian_initializer,
    maybe_prepend_axis,
    truncated_normal,
    uniform,
)

KEY = jax.random.key(0)


def draw(cfg, shape=(4, 6), axes=None, name="weight", key=KEY):
    init = cfg.instantiate()
    return init.initialize(name, prng_key=key, shape=shape, dtype=jnp.float32, axes=axes)


@pytest.mark.parametrize("fan", ["fan_in", "fan_out", "fan_avg"])
@pytest.mark.parametrize("distribution", ["uniform", "normal", "truncated_normal"])
@pytest.mark.parametrize("batch", [(), (0,)])
def test_weights_match_variance_scaling(fan, distribution, batch):
    shape, axes = (5, 4, 3), FanAxes(-2, -1, batch)
    cfg = WeightInitializer.default_config().set(fan=fan, distribution=distribution, scale=2.0)
    expected = jax.nn.initializers.variance_scaling(
        2.0, fan, distribution, in_axis=-2, out_axis=-1, batch_axis=batch
    )(KEY, shape)
    np.testing.assert_allclose(draw(cfg, shape, axes), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("distribution", "spread"),
    [("uniform", 0.5 / 3**0.5), ("normal", 0.5), ("truncated_normal", 0.5)],
)
def test_no_fan_keeps_the_scale(distribution, spread):
    cfg = WeightInitializer.default_config().set(fan=None, scale=0.5, distribution=distribution)
    np.testing.assert_allclose(draw(cfg, (100, 100)).std(), spread, rtol=0.03)


def test_recorded_values_of_a_linear_layer():
    # A (4, 3) weight drawn from split(PRNGKey(0))[1], as users' checkpoints have it.
    key = jax.random.split(jax.random.PRNGKey(0))[1]
    weight = draw(DefaultInitializer.default_config(), (4, 3), FanAxes(-2, -1), key=key)
    np.testing.assert_allclose(
        weight.ravel()[:6],
        [-0.9123146, -0.8871372, 0.15077259, -0.25582635, -0.5128345, -0.70494103],
        rtol=1e-5,
    )


def test_default_depends_on_name():
    cfg = DefaultInitializer.default_config().set(
        init_by_param_name={".*gain_weight": GaussianInitializer.default_config().set(std=1e-3)}
    )
    assert jnp.all(draw(cfg, name="my_bias") == 0)
    assert jnp.all(draw(cfg, name="prescale") == 1)
    assert jnp.abs(draw(cfg, name="gain_weight")).max() < 0.01
    with pytest.raises(ParameterInitError, match=r"named 'bias2'; expected .*\.\*weight\$"):
        draw(cfg, name="bias2")
    assert cfg.instantiate().debug_string(name="bias") == "constant(0.0)"


def test_constants_and_gaussians():
    np.testing.assert_array_equal(
        draw(ConstantInitializer.default_config().set(value=[1.0, 2.0]), (3, 2)), [[1, 2]] * 3
    )
    got = draw(GaussianInitializer.default_config().set(std=2.0, mean=1.0))
    np.testing.assert_allclose(got, jax.random.normal(KEY, (4, 6)) * 2 + 1, rtol=1e-6)
    assert gaussian_initializer(0.5).debug_string() == "normal(0, 0.5^2)"
    assert constant_initializer(3).debug_string() == "constant(3)"


def test_groups_are_initialized_separately():
    cfg = PerGroupInitializer.default_config().set(num_groups=3)
    axes = FanAxes(-2, -1)
    got = draw(cfg, (4, 6), axes)
    keys = jax.random.split(KEY, 3)
    for i in range(3):
        part = draw(DefaultInitializer.default_config(), (4, 2), axes, key=keys[i])
        np.testing.assert_allclose(got[:, 2 * i : 2 * i + 2], part)
    with pytest.raises(ParameterInitError, match=r"cannot be drawn in 3 groups"):
        draw(cfg, (4, 5), axes)
    assert cfg.instantiate().debug_string(name="bias") == "3 * [constant(0.0)]"


def test_jax_initializer_functions():
    assert jnp.abs(uniform(0.1)(KEY, (50,))).max() <= 0.1
    assert truncated_normal(0.1)(KEY, (5,), jnp.bfloat16).dtype == jnp.bfloat16


@settings(deadline=None)
@given(st.integers(-3, 2), st.integers(-3, 2), st.permutations([2, 3, 5]))
def test_extra_axes_keep_the_fans(in_axis, out_axis, shape):
    if in_axis % 3 == out_axis % 3:
        return
    axes, before = FanAxes(in_axis, out_axis), fans(shape, FanAxes(in_axis, out_axis))
    batch = FanAxes.AxisType.BATCH_AXIS
    assert fans((7, *shape), axes.prepend_axis(axis_type=batch)) == before
    assert fans((*shape, 7), axes.append_axis(axis_type=batch)) == before
    grown = fans((7, *shape), axes.prepend_axis(axis_type=FanAxes.AxisType.IN_AXIS))
    assert grown["fan_in"] == 7 * before["fan_in"]
    assert maybe_prepend_axis(None, axis_type=batch) is None


def test_bad_initializers():
    with pytest.raises(
        ParameterInitError, match="distribution='gauss' is unknown; expected one of"
    ):
        WeightInitializer.default_config().set(distribution="gauss").instantiate()
    with pytest.raises(ParameterInitError, match="fan='in' is unknown"):
        WeightInitializer.default_config().set(fan="in").instantiate()
    with pytest.raises(ParameterInitError, match=r"'weight' of shape \(4,\) has no fan axes"):
        draw(WeightInitializer.default_config(), (4,))
    with pytest.raises(ParameterInitError, match="Initializer does not define `initialize`"):
        draw(Initializer.default_config())
    assert WeightInitializer.default_config().set(fan=None).instantiate().debug_string() == (
        "uniform(-1.0, 1.0)"
    )
