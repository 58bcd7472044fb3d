import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import LayerConfigError
from weft.hierarchy.layers.normalization import (
    BatchNorm,
    GroupNorm,
    LayerNorm,
    LayerNormStateless,
    MovingAverage,
    NormType,
    RMSNorm,
    RMSNormStateless,
)
from weft.hierarchy.module import functional as F

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, 4)).astype(np.float32) * 2 + 1

STATELESS = [LayerNormStateless, RMSNormStateless]
NORMS = [*STATELESS, LayerNorm, RMSNorm, GroupNorm, BatchNorm]


def make(cls, **kwargs):
    if cls in NORMS:
        kwargs.setdefault("input_dim", 4)
    if cls is GroupNorm:
        kwargs.setdefault("num_groups", 2)
    layer = cls.default_config().set(name="norm", **kwargs).instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(KEY)


def run(layer, params, x, is_training=True, **kwargs):
    return F(layer, None, params, dict(x=jnp.asarray(x), **kwargs), is_training=is_training)


def standardized(x, axis):
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-8)


def divided(x, axis=-1):
    return x / np.sqrt((x**2).mean(axis, keepdims=True) + 1e-8)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", NORMS)
def test_shapes_of_parameters_and_their_initial_values(cls):
    _, params = make(cls)
    ones = {"scale", "moving_variance"}
    names = {
        LayerNorm: {"scale", "bias"},
        RMSNorm: {"scale"},
        GroupNorm: {"scale", "bias"},
        BatchNorm: {"scale", "bias", "moving_mean", "moving_variance"},
    }
    assert set(params) == names.get(cls, set())
    for name, value in params.items():
        np.testing.assert_array_equal(value, np.full(4, float(name in ones)))


@pytest.mark.parametrize("cls", NORMS)
def test_output_has_the_dtype_of_the_input(cls):
    layer, params = make(cls)
    y, _ = run(layer, params, jnp.asarray(X, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    exact, _ = run(layer, params, jnp.asarray(X, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_zero_centered_rms_norm_subtracts_the_mean_of_the_result():
    layer, params = make(RMSNorm, zero_centered=True)
    np.testing.assert_array_equal(params["scale"], np.ones(4))
    close(run(layer, params, X)[0], divided(X) - divided(X).mean(-1, keepdims=True))
    # The mean square of 3 and 4, 12.5, is not that of the differences from their mean.
    x = jnp.array([[3.0, 3.0, 4.0, 4.0]])
    expected = np.array([[-0.5, -0.5, 0.5, 0.5]]) / np.sqrt(12.5)
    close(run(layer, {"scale": jnp.arange(4.0)}, x)[0], expected * np.arange(4))


def test_group_norm_by_root_mean_square():
    layer, params = make(GroupNorm, norm_type=NormType.RMSNORM)
    assert set(params) == {"scale"}
    close(run(layer, params, X)[0], divided(X.reshape(3, 5, 2, 2), (1, 3)).reshape(X.shape))


def test_indivisible_groups_are_rejected():
    with pytest.raises(LayerConfigError, match=r"norm: input_dim=4 cannot .*num_groups=3"):
        make(GroupNorm, num_groups=3)


def test_batch_norm_uses_batch_statistics_and_updates_averages():
    layer, params = make(BatchNorm, decay=0.9)
    y, collection = run(layer, params, X)
    close(y, standardized(X, (0, 1)))
    updates = collection.state_updates
    assert set(updates) == {"moving_mean", "moving_variance"}
    close(updates["moving_mean"], 0.1 * X.mean((0, 1)))
    close(updates["moving_variance"], 0.9 + 0.1 * X.var((0, 1)))


def test_batch_norm_uses_its_averages_otherwise():
    layer, params = make(BatchNorm)
    mean, variance = jnp.arange(4.0), jnp.arange(1.0, 5.0)
    y, collection = run(
        layer, {**params, "moving_mean": mean, "moving_variance": variance}, X, is_training=False
    )
    close(y, np.subtract(X, mean) / np.sqrt(variance + 1e-8))
    assert not collection.state_updates


def test_batch_norm_averages_do_not_decay_as_weights():
    layer, _ = make(BatchNorm, dtype=jnp.bfloat16)
    specs = layer.create_parameter_specs_recursively()
    assert specs["scale"].dtype == jnp.bfloat16
    for name in ("moving_mean", "moving_variance"):
        assert specs[name].weight_decay_scale == 0
        assert specs[name].dtype == jnp.float32


@pytest.mark.parametrize("min_weight, expected", [(0.0, 5.0), (0.5, 6.0)])
def test_moving_average_weights_values_by_count(min_weight, expected):
    layer, params = make(MovingAverage, min_weight=min_weight, shape=(2,))
    for value in (2.0, 4.0, 9.0):
        y, collection = run(layer, params, jnp.full(2, value))
        params = collection.state_updates
    # Weights 1, 1/2, 1/3; or 1, 1/2, 1/2.
    close(y, np.full(2, expected))
    assert params["count"] == 3
    y, collection = run(layer, params, jnp.full(2, 1.0), is_training=False)
    assert not collection.state_updates
