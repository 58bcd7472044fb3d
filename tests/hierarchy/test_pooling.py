import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import UnknownActivationError
from weft.hierarchy.module import functional as F
from weft.hierarchy.pooling import MaxPool2D, SqueezeExcitation

KEY = jax.random.key(0)
X = draw(1, 2, 5, 6, 4)


def make(cls, **kwargs):
    layer = cls.default_config().set(name="pool", **kwargs).instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(KEY)


def run(layer, params, x):
    return F(layer, None, params, (x,), is_training=True)[0]


@pytest.mark.parametrize("window, strides", [((2, 2), (1, 1)), ((3, 2), (2, 2))])
def test_max_pool_takes_the_largest_of_each_window(window, strides):
    layer, params = make(MaxPool2D, window=window, strides=strides)
    assert params == {}
    y = run(layer, params, X)
    view = np.lib.stride_tricks.sliding_window_view(np.array(X), window, axis=(1, 2))
    np.testing.assert_array_equal(y, view[:, :: strides[0], :: strides[1]].max((-1, -2)))
    assert tuple(layer.output_shape(input_shape=X.shape)) == y.shape
    assert layer.output_shape(input_shape=(None, None, 6, 4))[:2] == [None, None]


@pytest.mark.parametrize("size", [{"se_ratio": 0.5}, {"num_reduced_filters": 2}])
def test_squeeze_excitation_gates_channels_by_their_means(size):
    layer, params = make(SqueezeExcitation, input_dim=4, **size)
    assert jax.tree.map(jnp.shape, params) == {
        "reduce": {"weight": (1, 1, 4, 2), "bias": (2,)},
        "expand": {"weight": (1, 1, 2, 4), "bias": (4,)},
    }
    reduce, expand = params["reduce"]["weight"][0, 0], params["expand"]["weight"][0, 0]
    gate = jax.nn.sigmoid(jax.nn.relu(X.mean((1, 2)) @ reduce) @ expand)
    np.testing.assert_allclose(run(layer, params, X), X * gate[:, None, None], rtol=1e-4)
    grads = jax.jit(jax.grad(lambda params: run(layer, params, X).sum()))(params)
    assert all(jnp.abs(g).sum() > 0 for g in jax.tree.leaves(grads))


def test_squeeze_excitation_without_a_reduced_dimension_passes_on():
    layer, params = make(SqueezeExcitation, input_dim=4)
    assert params == {}
    np.testing.assert_array_equal(run(layer, params, X), X)


def test_squeeze_excitation_names_an_unknown_activation():
    with pytest.raises(UnknownActivationError, match=r"'nn\.relo'"):
        make(SqueezeExcitation, input_dim=4, se_ratio=0.5, activation="nn.relo")
