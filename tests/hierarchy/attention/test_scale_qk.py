import jax.numpy as jnp
import numpy as np

from weft.config import config_for_function
from weft.hierarchy.attention.qkv_linear import (
    PerDimScale,
    ScaleKey,
    ScaleQuery,
    constant_scale_fn,
    pow_scale_fn,
)
from weft.hierarchy.layers.normalization import RMSNorm
from weft.hierarchy.module import functional as F


def run(cls, x, state=None, **fields):
    cfg = cls.default_config().set(name="scale", per_head_dim=4, **fields)
    layer = cfg.instantiate(parent=None)
    return F(layer, None, state or {}, {"proj": x, "positions": None}, is_training=False)[0]


def test_factors(wave):
    x = wave((1, 2, 3, 4))
    np.testing.assert_allclose(run(ScaleQuery, x), x / 2, rtol=1e-6)
    np.testing.assert_allclose(run(ScaleKey, x), x, rtol=1e-6)
    factor = config_for_function(constant_scale_fn).set(value=3.0)
    np.testing.assert_allclose(run(ScaleKey, x, scale_factor=factor), 3 * x, rtol=1e-6)
    factor = config_for_function(pow_scale_fn).set(exp=2)
    np.testing.assert_allclose(run(ScaleQuery, x, scale_factor=factor), 16 * x, rtol=1e-6)
    assert ScaleQuery.default_scale_factor_config().instantiate()(64) == 1 / 8
    assert ScaleKey.default_scale_factor_config().instantiate()(64) == 1


def test_order_is_norm_dimensions_factor(wave):
    x, scale, param = 5 * wave((1, 2, 3, 4)), jnp.arange(1.0, 5.0), jnp.array([0.0, 1.0, -1.0, 2.0])
    state = {"norm": {"scale": scale}, "per_dim_scale": {"param": param}}
    fields = {"norm": RMSNorm.default_config(), "per_dim_scale": PerDimScale.default_config()}
    normed = np.multiply(x / np.sqrt(np.mean(np.square(x), -1, keepdims=True)), scale)
    expected = np.multiply(normed, np.log1p(np.exp(param))) / np.log(2) / 2
    np.testing.assert_allclose(run(ScaleQuery, x, state, **fields), expected, rtol=1e-4)
    key = run(ScaleKey, x, {"norm": {"scale": scale}}, norm=RMSNorm.default_config())
    np.testing.assert_allclose(key, normed, rtol=1e-4)


def test_per_dim_scale_starts_at_1_without_weight_decay():
    layer = PerDimScale.default_config().set(name="scale", dim=3).instantiate(parent=None)
    spec = layer.create_parameter_specs_recursively()["param"]
    assert spec.shape == (3,) and spec.weight_decay_scale == 0
    state = layer.initialize_parameters_recursively(jnp.array([0, 0], jnp.uint32))
    np.testing.assert_array_equal(state["param"], 0.0)
