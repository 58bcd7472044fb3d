import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.keys import draw
from weft.hierarchy.base_layer import DefaultTensorStats
from weft.hierarchy.layers.linear import Linear, MultiLinear, UnitNormLinear, VariationalNoise
from weft.hierarchy.module import functional as F
from weft.hierarchy.parameter_spec import FactorizationSpec

KEY = jax.random.key(0)


def make(cls, **kwargs):
    layer = cls.default_config().set(name="layer", **kwargs).instantiate(parent=None)
    params = layer.initialize_parameters_recursively(KEY)
    # Biases start at 0, which would hide a bias that is left out.
    return layer, jax.tree.map(lambda x: x + 0.1, params)


def run(layer, params, x, is_training=True):
    return F(layer, KEY, params, (x,), is_training=is_training)


X = draw(1, 2, 5, 3)


def test_linear_specs():
    layer, _ = make(Linear, input_dim=3, output_dim=4)
    specs = layer.create_parameter_specs_recursively()
    assert specs["weight"].mesh_axes == PartitionSpec(None, None)
    assert specs["weight"].factorization == FactorizationSpec(("row", "col"))
    assert specs["bias"].mesh_axes == PartitionSpec(None)
    assert specs["weight"].fans() == {"fan_in": 3, "fan_out": 4, "fan_avg": 3.5}
    plain, _ = make(Linear, input_dim=3, output_dim=4, param_partition_spec=None)
    assert plain.create_parameter_specs_recursively()["bias"].mesh_axes == PartitionSpec(None)


def test_linear_shards_its_output():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layer, params = make(
        Linear, input_dim=3, output_dim=4, output_partition_spec=("data", None, "model")
    )
    with jax.set_mesh(mesh):
        y = jax.jit(lambda params, x: run(layer, params, x)[0])(params, X)
    assert y.sharding.spec == PartitionSpec("data", None, "model")
    np.testing.assert_allclose(y, run(layer, params, X)[0], rtol=1e-5, atol=1e-6)


def test_linear_reports_tensor_stats():
    layer, params = make(
        Linear, input_dim=3, output_dim=4, tensor_stats=DefaultTensorStats.default_config()
    )
    y, collection = run(layer, params, X)
    (stats,) = collection.summaries["tensor_stats"].values()
    np.testing.assert_allclose(stats["max_abs"], jnp.abs(y).max(), rtol=1e-6)


def test_unit_norm_linear_gives_cosines_for_unit_inputs():
    layer, params = make(UnitNormLinear, input_dim=3, output_dim=4, bias=False)
    x = X / jnp.linalg.norm(X, axis=-1, keepdims=True)
    y, _ = run(layer, params, x)
    columns = params["weight"] / jnp.linalg.norm(params["weight"], axis=0, keepdims=True)
    np.testing.assert_allclose(y, x @ columns, rtol=1e-4, atol=1e-6)
    assert jnp.abs(y).max() <= 1 + 1e-6


def test_fan_out_of_multi_linear_is_that_of_all_maps():
    layer, params = make(MultiLinear, input_dim=3, num_outputs=2, output_dim=4, bias=False)
    specs = layer.create_parameter_specs_recursively()
    assert set(specs) == set(params) == {"weight"}
    assert specs["weight"].mesh_axes == PartitionSpec(None, None, "model")
    assert specs["weight"].fans() == {"fan_in": 3, "fan_out": 8, "fan_avg": 5.5}


@pytest.mark.parametrize("std", [0.0, 0.5])
def test_variational_noise_has_its_standard_deviation(std):
    layer, params = make(
        Linear,
        input_dim=40,
        output_dim=50,
        param_noise=VariationalNoise.default_config().set(vn_std=std),
    )
    noisy = layer.apply_parameter_noise_recursively(KEY, params)
    difference = noisy["weight"] - params["weight"]
    np.testing.assert_allclose(difference.std(), std, rtol=0.1)
    assert noisy["weight"].dtype == params["weight"].dtype
    if std:
        of_bias = np.array(noisy["bias"] - params["bias"])
        assert abs(np.corrcoef(of_bias, difference[0])[0, 1]) < 0.6
