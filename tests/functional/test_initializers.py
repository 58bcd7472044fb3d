import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional import initializers
from weft.functional.initializers import draw, fan_sizes, variance_scaling

KEY = jax.random.key(0)


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


def test_unknown_distribution_is_named():
    with pytest.raises(ArgumentValueError, match="distribution='gaussian' is unknown"):
        draw(KEY, (3,), distribution="gaussian", scale=1.0)


def test_constants_have_factories_like_others():
    assert initializers.ones_init()(KEY, (2,), jnp.bfloat16).tolist() == [1, 1]
    assert initializers.zeros_init()(KEY, (2,), jnp.int32).tolist() == [0, 0]
