import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import LayerConfigError
from weft.hierarchy.layers.normalization import (
    BatchNorm,
    GroupNorm,
    L2Norm,
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


@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, GroupNorm, BatchNorm])
def test_scale_and_bias_have_gradients_under_jit(cls):
    layer, params = make(cls)
    g = RNG.normal(size=X.shape).astype(np.float32)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(g * run(layer, p, X)[0])))(params)
    close(grads["scale"], (g * run(layer, params, X)[0]).sum((0, 1)))
    if "bias" in params:
        close(grads["bias"], g.sum((0, 1)))
    if "moving_mean" in params:
        assert (grads["moving_mean"] == 0).all()


def test_layer_norm():
    layer, _params = make(LayerNorm)
    scale, bias = np.arange(4.0), np.arange(4.0) - 2
    close(
        run(layer, {"scale": jnp.array(scale), "bias": jnp.array(bias)}, X)[0],
        standardized(X, -1) * scale + bias,
    )
    close(run(*make(LayerNormStateless), X)[0], standardized(X, -1))


def test_rms_norm():
    layer, _ = make(RMSNorm)
    scale = np.arange(4.0)
    close(run(layer, {"scale": jnp.array(scale)}, X)[0], divided(X) * scale)
    close(run(*make(RMSNormStateless), X)[0], divided(X))


def test_zero_centered_rms_norm_subtracts_the_mean_of_the_result():
    layer, params = make(RMSNorm, zero_centered=True)
    np.testing.assert_array_equal(params["scale"], np.ones(4))
    close(run(layer, params, X)[0], divided(X) - divided(X).mean(-1, keepdims=True))
    # The mean square of 3 and 4, 12.5, is not that of the differences from their mean.
    x = jnp.array([[3.0, 3.0, 4.0, 4.0]])
    expected = np.array([[-0.5, -0.5, 0.5, 0.5]]) / np.sqrt(12.5)
    close(run(layer, {"scale": jnp.arange(4.0)}, x)[0], expected * np.arange(4))


def test_group_norm_by_mean_and_variance():
    layer, params = make(GroupNorm)
    grouped = X.reshape(3, 5, 2, 2)
    close(run(layer, params, X)[0], standardized(grouped, (1, 3)).reshape(X.shape))
    per_position, _ = make(GroupNorm, norm_axes=-1)
    close(run(per_position, params, X)[0], standardized(grouped, 3).reshape(X.shape))


def test_group_norm_by_root_mean_square():
    layer, params = make(GroupNorm, norm_type=NormType.RMSNORM)
    assert set(params) == {"scale"}
    close(run(layer, params, X)[0], divided(X.reshape(3, 5, 2, 2), (1, 3)).reshape(X.shape))


def test_group_norm_by_segment_ignores_padding():
    layer, params = make(GroupNorm)
    ids = jnp.array([[1, 1, 1, 0, 0]] * 3)
    noisy = X.copy()
    noisy[:, 3:] = 100
    y, _ = run(layer, params, noisy, segment_ids=ids)
    close(y[:, :3], run(layer, params, X[:, :3])[0])


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


def test_batch_norm_ignores_padding():
    layer, params = make(BatchNorm)
    ids = np.array([[1, 1, 1, 0, 0], [1, 1, 2, 2, 2], [1, 0, 0, 0, 0]])
    y, collection = run(layer, params, X, segment_ids=jnp.array(ids))
    live = X[ids > 0]
    close(y[ids > 0], standardized(live, 0))
    close(collection.state_updates["moving_mean"], 0.001 * live.mean(0))


def test_batch_norm_averages_do_not_decay_as_weights():
    layer, _ = make(BatchNorm, dtype=jnp.bfloat16)
    specs = layer.create_parameter_specs_recursively()
    assert specs["scale"].dtype == jnp.bfloat16
    for name in ("moving_mean", "moving_variance"):
        assert specs[name].weight_decay_scale == 0
        assert specs[name].dtype == jnp.float32


def test_l2_norm_gives_length_one():
    layer, params = make(L2Norm)
    close(run(layer, params, X)[0], X / np.linalg.norm(X, axis=-1, keepdims=True))
    assert run(layer, params, jnp.ones((2, 3), jnp.bfloat16))[0].dtype == jnp.bfloat16


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
