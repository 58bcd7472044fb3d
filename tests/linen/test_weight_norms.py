import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen.conv import Conv
from weft.linen.linear import Dense
from weft.linen.weight_norms import SpectralNorm, WeightNorm

KEY = jax.random.key(0)
X = draw(0, 4, 6)


def test_a_spectral_norm_is_found_step_by_step():
    layer = SpectralNorm(Dense(5, use_bias=False))
    variables = layer.init(KEY, X, update_stats=False)
    kernel = 3 * jax.random.normal(KEY, (6, 5))
    variables["params"]["layer_instance"]["kernel"] = kernel
    for _ in range(50):
        y, updates = layer.apply(variables, X, update_stats=True, mutable=["batch_stats"])
        variables = {**variables, **updates}
    sigma = np.linalg.svd(kernel, compute_uv=False)[0]
    stats = variables["batch_stats"]
    np.testing.assert_allclose(stats["layer_instance/kernel/sigma"], sigma, rtol=1e-4)
    np.testing.assert_allclose(y, X @ kernel / sigma, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.apply(variables, X, update_stats=False), y, atol=1e-4)


def test_norms_of_weights_are_parameters():
    layer = WeightNorm(Dense(5))
    variables = layer.init(KEY, X)
    params = variables["params"]
    doubled = {**params, "layer_instance/kernel/scale": 2 * jnp.ones(5)}
    longer = jax.tree.map(lambda w: 7 * w, params["layer_instance"])
    once, twice = layer.apply(variables, X), layer.apply({"params": doubled}, X)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)
    same = layer.apply({"params": {**params, "layer_instance": longer}}, X)
    np.testing.assert_allclose(same, once, rtol=1e-5)


def test_layers_under_jit_compile_once():
    layer = WeightNorm(Dense(5))
    variables = layer.init(KEY, X)
    traces = []

    @jax.jit
    def step(variables, x):
        traces.append(x)
        return layer.apply(variables, x)

    np.testing.assert_allclose(step(variables, X), layer.apply(variables, X), rtol=1e-5)
    step(variables, 2 * X)
    assert len(traces) == 1


def test_what_does_not_fit_is_named():
    with pytest.raises(ArgumentShapeError, match=r"layer_instance/kernel has shape \(3, 6, 5\)"):
        layer = SpectralNorm(Conv(5, (3,)), error_on_non_matrix=True)
        layer.init(KEY, X[None], update_stats=True)
    with pytest.raises(ArgumentValueError, match="feature_axes=4"):
        WeightNorm(Dense(5), feature_axes=4).init(KEY, X)
