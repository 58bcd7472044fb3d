import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.errors import (
    ArgumentShapeError,
    ArgumentValueError,
    ModifyScopeVariableError,
)
from weft.linen.conv import Conv
from weft.linen.linear import Dense
from weft.linen.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    SpectralNorm,
    WeightNorm,
)

KEY = quick_key(0)
X = draw(0, 4, 5, 6) * 3 + 2


def standardized(x, axes):
    x = np.asarray(x).astype(np.float64)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-6)


def close(x, y):
    np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=1e-4)


def test_statistics_are_accurate_far_from_zero():
    x = np.asarray(X + 1e4)
    close(LayerNorm(use_scale=False, use_bias=False).apply({}, x), standardized(x, -1))


def test_fully_masked_input_stays_finite():
    y = LayerNorm(use_scale=False, use_bias=False).apply({}, X, mask=jnp.zeros((1, 1, 1), bool))
    assert jnp.isfinite(y).all()


def test_bad_axes_and_groups_are_named():
    with pytest.raises(ArgumentValueError, match=r"reduction_axes=\(1,\) .* add -1"):
        GroupNorm(2, reduction_axes=(1,)).init(KEY, X)
    with pytest.raises(ArgumentValueError, match=r"feature_axes=0 .*\(4, 5, 6\) include the first"):
        InstanceNorm(feature_axes=0).init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=r"6 channels, .* into 4 equal groups"):
        GroupNorm(4).init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=r"6 channels, .* groups of group_size=4"):
        GroupNorm(None, 4).init(KEY, X)
    with pytest.raises(ArgumentValueError, match="num_groups=2 and group_size=3: give one"):
        GroupNorm(2, 3).init(KEY, X)


BATCH = draw(0, 8, 5, 6) * 3 + 2


def test_immutable_averages_are_named():
    layer = BatchNorm(False)
    with pytest.raises(ModifyScopeVariableError, match="batch_stats"):
        layer.apply(layer.init(KEY, BATCH), BATCH)


INPUTS = draw(0, 4, 6)


def test_layers_under_jit_compile_once():
    layer = WeightNorm(Dense(5))
    variables = layer.init(KEY, INPUTS)
    traces = []

    @jax.jit
    def step(variables, x):
        traces.append(x)
        return layer.apply(variables, x)

    np.testing.assert_allclose(step(variables, INPUTS), layer.apply(variables, INPUTS), rtol=1e-5)
    step(variables, 2 * INPUTS)
    assert len(traces) == 1


def test_shape_errors_are_named():
    with pytest.raises(ArgumentShapeError, match=r"layer_instance/kernel has shape \(3, 6, 5\)"):
        layer = SpectralNorm(Conv(5, (3,)), error_on_non_matrix=True)
        layer.init(KEY, INPUTS[None], update_stats=True)
    with pytest.raises(ArgumentValueError, match="feature_axes=4"):
        WeightNorm(Dense(5), feature_axes=4).init(KEY, INPUTS)
