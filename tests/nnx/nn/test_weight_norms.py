import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.filters import PathContains
from weft.nnx.kinds import BatchStat, Param
from weft.nnx.module import Module
from weft.nnx.nn.linear import Linear, LinearGeneral
from weft.nnx.nn.weight_norms import SpectralNorm, WeightNorm, params
from weft.nnx.rngs import Rngs
from weft.nnx.splitting import clone

X = draw(3, 4, 3)


def linear():
    return Linear(3, 2, rngs=Rngs(0))


class Model(Module):
    def __init__(self):
        self.first = Linear(3, 3, rngs=Rngs(0))
        self.again = self.first
        self.layers = [LinearGeneral(3, (2, 2), rngs=Rngs(1))]

    def __call__(self, x):
        return self.layers[0](self.again(self.first(x)))


def test_the_largest_singular_value_is_one():
    layer = SpectralNorm(linear(), n_steps=30, rngs=Rngs(1))
    layer(X)
    values = np.linalg.svd(layer.layer_instance.kernel[...], compute_uv=False)
    np.testing.assert_allclose(values[0], 1, rtol=1e-5)
    u = layer.batch_stats["kernel", "u"]
    assert isinstance(u, BatchStat) and u.shape == (1, 2)


def test_each_parameter_is_normalised_once():
    layer = SpectralNorm(Model(), rngs=Rngs(1))
    paths = {path[:-1] for path in layer.batch_stats}
    assert paths == {("again", "kernel"), ("layers", 0, "bias"), ("layers", 0, "kernel")}
    assert layer(X).shape == (4, 2, 2)
    assert [path for path, _ in params(Model(), PathContains("bias"))] == [
        ("again", "bias"),
        ("layers", 0, "bias"),
    ]


def test_statistics_stay_in_evaluation():
    layer = SpectralNorm(linear(), rngs=Rngs(1))
    u = layer.batch_stats["kernel", "u"]
    before = u[...]
    layer.eval()
    layer(X)
    np.testing.assert_array_equal(u[...], before)
    layer(X, update_stats=True)
    assert (u[...] != before).any()
    layer.train()
    before = u[...]
    layer(X, update_stats=False)
    np.testing.assert_array_equal(u[...], before)
    assert SpectralNorm(linear(), update_stats=False, rngs=Rngs(1)).use_running_average is True


def test_without_steps_nothing_is_normalised():
    inner = linear()
    kernel = inner.kernel[...]
    layer = SpectralNorm(inner, n_steps=0, rngs=Rngs(1))
    layer(X)
    assert inner.kernel[...] is kernel and not layer.batch_stats


@pytest.mark.parametrize("wrapper", [SpectralNorm, WeightNorm])
def test_weights_keep_their_dtype(wrapper):
    layer = wrapper(linear(), dtype=jnp.bfloat16, rngs=Rngs(1))
    layer(X)
    kernel = layer.layer_instance.kernel[...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, kernel.astype(jnp.bfloat16).astype(jnp.float32))


def test_what_is_no_matrix_can_be_refused():
    layer = SpectralNorm(Model(), error_on_non_matrix=True, rngs=Rngs(1))
    message = (
        r"layers/0/kernel of the Model in a SpectralNorm has shape \(3, 2, 2\) .* give error_on"
    )
    with pytest.raises(ArgumentShapeError, match=message):
        layer(X)


def test_scales_are_the_norms_and_parameters():
    layer = WeightNorm(linear(), scale_init=jax.nn.initializers.uniform(), rngs=Rngs(1))
    scale = layer.scales["kernel",]
    assert isinstance(scale, Param) and scale.shape == (2,)
    layer(X)
    norms = jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0)
    np.testing.assert_allclose(norms, scale[...], rtol=1e-5)
    scale[...] = 3 * jnp.ones(2)
    layer(X)
    norms = jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0)
    np.testing.assert_allclose(norms, 3, rtol=1e-5)
    grads = jax.grad(lambda layer: (layer(X) ** 2).sum())(layer)
    assert (jnp.abs(grads.scales["kernel",][...]) > 0).all()


def test_scales_have_a_dtype_of_their_own():
    layer = WeightNorm(linear(), param_dtype=jnp.bfloat16, rngs=Rngs(1))
    assert layer.scales["kernel",].dtype == jnp.bfloat16
    assert layer(X).dtype == jnp.float32


@pytest.mark.parametrize("axes, shape", [(None, ()), (0, (3,)), ((-1, 0), (3, 2))])
def test_axes_with_norms_of_their_own(axes, shape):
    layer = WeightNorm(linear(), feature_axes=axes, rngs=Rngs(1))
    assert layer.scales["kernel",].shape == shape
    assert layer(X).shape == (4, 2)


def test_without_scales_and_other_parameters():
    layer = WeightNorm(linear(), use_scale=False, rngs=Rngs(1))
    assert layer.scales is None
    layer(X)
    norms = jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)
    both = WeightNorm(linear(), variable_filter=Param, rngs=Rngs(1))
    assert set(both.scales) == {("bias",), ("kernel",)}


def test_they_are_cloned():
    for wrapper in (SpectralNorm, WeightNorm):
        layer = wrapper(linear(), rngs=Rngs(1))
        copy = clone(layer)
        np.testing.assert_array_equal(copy(X), layer(X))


def test_axes_that_a_parameter_has_not():
    with pytest.raises(ArgumentValueError, match=r"feature_axes=5 are not all axes .*\(3, 2\)"):
        WeightNorm(linear(), feature_axes=5, rngs=Rngs(1))
    with pytest.raises(ArgumentValueError, match=r"feature_axes=5 are not all axes"):
        WeightNorm(linear(), feature_axes=5, use_scale=False, rngs=Rngs(1))(X)
