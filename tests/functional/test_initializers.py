import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional import initializers
from weft.functional.initializers import DISTRIBUTIONS, draw, fan_sizes, variance_scaling

KEY = jax.random.key(0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_draw_scale(distribution):
    x = np.array(draw(KEY, (200, 200), distribution=distribution, scale=0.3))
    np.testing.assert_allclose(x.mean(), 0, atol=0.01)
    std = 0.3 / np.sqrt(3) if distribution == "uniform" else 0.3
    np.testing.assert_allclose(x.std(), std, rtol=0.02)
    if distribution == "uniform":
        assert abs(x).max() <= 0.3
    if distribution == "truncated_normal":
        np.testing.assert_allclose(abs(x).max(), 2 * 0.3 / 0.8796, rtol=0.01)


@pytest.mark.parametrize(
    "fan, distribution",
    [("fan_in", "uniform"), ("fan_out", "normal"), ("fan_avg", "truncated_normal")],
)
def test_fans_and_draw_match_variance_scaling(fan, distribution):
    shape = (3, 5, 4, 6)
    sizes = fan_sizes(shape, in_axes=(-2,), out_axes=(-1,), batch_axes=(0,))
    scale = (2.0 / sizes[fan]) ** 0.5 * (3**0.5 if distribution == "uniform" else 1)
    ours = draw(KEY, shape, distribution=distribution, scale=scale)
    jaxs = variance_scaling(2.0, fan, distribution, batch_axis=0)(KEY, shape)
    np.testing.assert_allclose(ours, jaxs, rtol=1e-4)


def test_several_axes_may_be_inputs_or_outputs():
    sizes = fan_sizes((8, 4, 2), in_axes=(0,), out_axes=(1, 2))
    assert sizes == {"fan_in": 8.0, "fan_out": 8.0, "fan_avg": 8.0}


def test_draw_dtype():
    for distribution in DISTRIBUTIONS:
        x = draw(KEY, (3,), jnp.bfloat16, distribution=distribution, scale=1.0)
        assert x.dtype == jnp.bfloat16


def test_unknown_distribution_is_named():
    with pytest.raises(ArgumentValueError, match="distribution='gaussian' is unknown"):
        draw(KEY, (3,), distribution="gaussian", scale=1.0)


def test_jax_initializers_are_reexported():
    names = [name for name in vars(jax.nn.initializers) if not name.startswith("_")]
    assert "orthogonal" in names
    for name in names:
        assert getattr(initializers, name) is getattr(jax.nn.initializers, name)


def test_constants_have_factories_like_others():
    assert initializers.ones_init()(KEY, (2,), jnp.bfloat16).tolist() == [1, 1]
    assert initializers.zeros_init()(KEY, (2,), jnp.int32).tolist() == [0, 0]
