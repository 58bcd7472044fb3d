import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.errors import (
    ArgumentShapeError,
    ArgumentValueError,
    ModifyScopeVariableError,
    ParameterGivenTwiceError,
)
from weft.linen.conv import Conv
from weft.linen.linear import Dense
from weft.linen.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
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


@pytest.mark.parametrize("fast", [True, False])
def test_each_layer_normalises_its_axes(fast):
    options = {"use_fast_variance": fast}
    close(LayerNorm(**options).init_with_output(KEY, X)[0], standardized(X, -1))
    layer = LayerNorm(reduction_axes=(0, 2), feature_axes=1, **options)
    close(layer.init_with_output(KEY, X)[0], standardized(X, (0, 2)))
    close(InstanceNorm(**options).init_with_output(KEY, X)[0], standardized(X, 1))
    groups = standardized(X.reshape(4, 5, 2, 3), (1, 3)).reshape(X.shape)
    close(GroupNorm(2, **options).init_with_output(KEY, X)[0], groups)
    wide = jnp.arange(64.0)[None]
    halves = standardized(wide.reshape(32, 2), 1).reshape(1, 64)
    close(GroupNorm(**options).init_with_output(KEY, wide)[0], halves)
    rms = X / np.sqrt(np.mean(np.square(X), -1, keepdims=True))
    close(RMSNorm(**options).init_with_output(KEY, X)[0], rms)


def test_scale_and_bias_are_per_feature():
    params = {"scale": jnp.arange(5.0), "bias": jnp.arange(5.0) * 10}
    y = LayerNorm(feature_axes=1).apply({"params": params}, X)
    close(y, standardized(X, -1) * np.arange(5)[:, None] + 10 * np.arange(5)[:, None])


def test_statistics_are_accurate_far_from_zero():
    x = np.asarray(X + 1e4)
    close(LayerNorm(use_scale=False, use_bias=False).apply({}, x), standardized(x, -1))


def test_half_precision_statistics_are_float32():
    x = (X * 300).astype(jnp.float16)
    layer = LayerNorm(use_scale=False, use_bias=False)
    assert layer.apply({}, x).dtype == jnp.float16
    np.testing.assert_allclose(layer.apply({}, x).astype(float), standardized(x, -1), atol=2e-3)


def test_masked_values_are_ignored():
    x = X.at[:, 3:].set(jnp.nan)
    mask = (jnp.arange(5) < 3)[:, None]
    y = InstanceNorm(use_scale=False, use_bias=False).apply({}, x, mask=mask)
    close(y[:, :3], standardized(X[:, :3], 1))
    y = GroupNorm(2, use_scale=False, use_bias=False).apply({}, x, mask=mask)
    close(y[:, :3], standardized(X[:, :3].reshape(4, 3, 2, 3), (1, 3)).reshape(4, 3, 6))


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


def batch_close(x, y, tolerance=1e-4):
    np.testing.assert_allclose(x, y, atol=tolerance)


def test_running_averages_update_and_are_used_in_eval():
    layer = BatchNorm(momentum=0.9, epsilon=0.0)
    variables = layer.init(KEY, BATCH, False)
    stats = variables["batch_stats"]
    assert (stats["mean"].tolist(), stats["var"].tolist()) == ([0.0] * 6, [1.0] * 6)
    y, updates = layer.apply(variables, BATCH, False, mutable=["batch_stats"])
    batch_close(y.mean((0, 1)), np.zeros(6))
    batch_close(y.std((0, 1)), np.ones(6))
    mean, var = 0.1 * BATCH.mean((0, 1)), 0.9 + 0.1 * BATCH.var((0, 1))
    batch_close(updates["batch_stats"]["mean"], mean)
    batch_close(updates["batch_stats"]["var"], var)
    y, kept = layer.apply({**variables, **updates}, BATCH, True, mutable=["batch_stats"])
    batch_close(y, (BATCH - np.asarray(mean)[None, None]) / np.sqrt(var)[None, None])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, kept, updates))


def test_batch_norm_ignores_masked_values():
    x = BATCH.at[5:].set(jnp.nan)
    mask = (jnp.arange(8) < 5)[:, None, None]
    layer = BatchNorm(False, momentum=0.0)
    variables = layer.init(KEY, BATCH)
    _, updates = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
    batch_close(updates["batch_stats"]["mean"], BATCH[:5].mean((0, 1)))
    batch_close(updates["batch_stats"]["var"], BATCH[:5].var((0, 1)), 1e-3)


def test_batch_shards_are_weighted_by_count():
    mask = (jnp.arange(8)[None] % 4 < jnp.array([1, 4])[:, None]).reshape(2, -1)[:, :4, None, None]
    parts = BATCH.reshape(2, 4, 5, 6)
    layer = BatchNorm(False, momentum=0.0, axis_name="parts")
    variables = layer.init(KEY, BATCH)

    def apply(x, mask):
        return layer.apply(variables, x, mask=mask, mutable=["batch_stats"])[1]["batch_stats"]

    stats = jax.jit(jax.vmap(apply, axis_name="parts"))(parts, mask)
    counted = np.concatenate([BATCH[:1], BATCH[4:]])
    for part in range(2):
        batch_close(stats["mean"][part], counted.mean((0, 1)))
        batch_close(stats["var"][part], counted.var((0, 1)), 1e-3)


def test_averages_keep_their_dtype():
    layer = BatchNorm(False, force_float32_reductions=False, param_dtype=jnp.bfloat16)
    variables = layer.init(KEY, BATCH)
    _, updates = layer.apply(variables, BATCH, mutable=["batch_stats"])
    assert updates["batch_stats"]["mean"].dtype == jnp.bfloat16


def test_mode_set_twice():
    with pytest.raises(ParameterGivenTwiceError, match="'use_running_average' was given "):
        BatchNorm().init(KEY, BATCH)
    with pytest.raises(ParameterGivenTwiceError, match="twice, as True and as False"):
        BatchNorm(True).init(KEY, BATCH, False)


def test_immutable_averages_are_named():
    layer = BatchNorm(False)
    with pytest.raises(ModifyScopeVariableError, match="batch_stats"):
        layer.apply(layer.init(KEY, BATCH), BATCH)


INPUTS = draw(0, 4, 6)


def test_spectral_norm_power_iteration():
    layer = SpectralNorm(Dense(5, use_bias=False))
    variables = layer.init(KEY, INPUTS, update_stats=False)
    kernel = 3 * jax.random.normal(KEY, (6, 5))
    variables["params"]["layer_instance"]["kernel"] = kernel
    step = jax.jit(functools.partial(layer.apply, update_stats=True, mutable=["batch_stats"]))
    for _ in range(50):
        y, updates = step(variables, INPUTS)
        variables = {**variables, **updates}
    sigma = np.linalg.svd(kernel, compute_uv=False)[0]
    stats = variables["batch_stats"]
    np.testing.assert_allclose(stats["layer_instance/kernel/sigma"], sigma, rtol=1e-4)
    np.testing.assert_allclose(y, INPUTS @ kernel / sigma, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.apply(variables, INPUTS, update_stats=False), y, atol=1e-4)


def test_norms_of_weights_are_parameters():
    layer = WeightNorm(Dense(5))
    variables = layer.init(KEY, INPUTS)
    params = variables["params"]
    doubled = {**params, "layer_instance/kernel/scale": 2 * jnp.ones(5)}
    longer = jax.tree.map(lambda w: 7 * w, params["layer_instance"])
    once, twice = layer.apply(variables, INPUTS), layer.apply({"params": doubled}, INPUTS)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)
    same = layer.apply({"params": {**params, "layer_instance": longer}}, INPUTS)
    np.testing.assert_allclose(same, once, rtol=1e-5)


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
