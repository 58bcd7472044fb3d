import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen.normalization import GroupNorm, InstanceNorm, LayerNorm, RMSNorm

KEY = jax.random.key(0)
X = draw(0, 4, 5, 6) * 3 + 2


def standardized(x, axes):
    x = np.asarray(x).astype(np.float64)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-6)


def close(x, y):
    np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_each_layer_normalises_its_axes(fast):
    options = {"use_fast_variance": fast}
    close(LayerNorm(**options).init_with_output(KEY, X)[0], standardized(X, -1))
    layer = LayerNorm(reduction_axes=(0, 2), feature_axes=1, **options)
    close(layer.init_with_output(KEY, X)[0], standardized(X, (0, 2)))
    close(InstanceNorm(**options).init_with_output(KEY, X)[0], standardized(X, 1))
    groups = standardized(X.reshape(4, 5, 2, 3), (1, 3)).reshape(X.shape)
    close(GroupNorm(2, **options).init_with_output(KEY, X)[0], groups)
    rms = X / np.sqrt(np.mean(np.square(X), -1, keepdims=True))
    close(RMSNorm(**options).init_with_output(KEY, X)[0], rms)


def test_scale_and_bias_are_per_feature():
    params = {"scale": jnp.arange(5.0), "bias": jnp.arange(5.0) * 10}
    y = LayerNorm(feature_axes=1).apply({"params": params}, X)
    close(y, standardized(X, -1) * np.arange(5)[:, None] + 10 * np.arange(5)[:, None])


def test_statistics_keep_their_digits_far_from_zero():
    x = np.asarray(X + 1e4)
    close(LayerNorm(use_scale=False, use_bias=False).apply({}, x), standardized(x, -1))


def test_statistics_of_half_precision_are_single():
    x = (X * 300).astype(jnp.float16)
    layer = LayerNorm(use_scale=False, use_bias=False)
    assert layer.apply({}, x).dtype == jnp.float16
    np.testing.assert_allclose(layer.apply({}, x).astype(float), standardized(x, -1), atol=2e-3)


def test_what_is_masked_does_not_count():
    x = X.at[:, 3:].set(jnp.nan)
    mask = (jnp.arange(5) < 3)[:, None]
    y = InstanceNorm(use_scale=False, use_bias=False).apply({}, x, mask=mask)
    close(y[:, :3], standardized(X[:, :3], 1))
    y = GroupNorm(2, use_scale=False, use_bias=False).apply({}, x, mask=mask)
    close(y[:, :3], standardized(X[:, :3].reshape(4, 3, 2, 3), (1, 3)).reshape(4, 3, 6))


def test_where_nothing_counts_nothing_is_divided_by_zero():
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
