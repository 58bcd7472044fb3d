import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.module import Module
from weft.nnx.nn.normalization import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from weft.nnx.rngs import Rngs

X = draw(0, 4, 5, 6) * 3 + 2
RNGS = Rngs(0)


def standardized(x, axes):
    x = np.asarray(x).astype(np.float64)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-6)


def close(x, y):
    np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_each_layer_normalises_its_axes(fast):
    options = {"use_fast_variance": fast, "rngs": RNGS}
    close(LayerNorm(6, **options)(X), standardized(X, -1))
    close(
        LayerNorm(5, reduction_axes=(0, 2), feature_axes=1, **options)(X), standardized(X, (0, 2))
    )
    close(InstanceNorm(6, **options)(X), standardized(X, 1))
    groups = standardized(X.reshape(4, 5, 2, 3), (1, 3)).reshape(X.shape)
    close(GroupNorm(6, 2, **options)(X), groups)
    together = standardized(X.reshape(4, 5, 2, 3), (0, 1, 3)).reshape(X.shape)
    close(GroupNorm(6, None, 3, reduction_axes=(0, 1, -1), **options)(X), together)
    rms = X / np.sqrt(np.mean(np.square(X), -1, keepdims=True))
    close(RMSNorm(6, **options)(X), rms)


def test_scale_and_bias_are_per_feature():
    layer = LayerNorm(5, feature_axes=1, rngs=RNGS)
    layer.scale[...] = jnp.arange(5)
    layer.bias[...] = 10 * jnp.arange(5)
    close(layer(X), standardized(X, -1) * np.arange(5)[:, None] + 10 * np.arange(5)[:, None])
    layer = LayerNorm(30, feature_axes=(-1, 1), rngs=RNGS)
    layer.scale[...] = jnp.arange(30)
    close(layer(X), standardized(X, -1) * np.arange(30).reshape(5, 6))


def test_parameters_that_are_left_out():
    layer = GroupNorm(6, 2, use_bias=False, use_scale=False, rngs=RNGS)
    assert layer.scale is None and layer.bias is None
    assert jax.tree.leaves(layer) == []


@pytest.mark.parametrize("name", ["num_groups", "group_size"])
def test_groups_say_how_many_and_how_large_they_are(name):
    layer = GroupNorm(6, **{"num_groups": None, name: 2}, rngs=RNGS)
    assert layer.num_groups * layer.group_size == 6 and getattr(layer, name) == 2


def test_what_is_masked_does_not_count():
    x = X.at[:, 3:].set(jnp.nan)
    mask = (jnp.arange(5) < 3)[:, None]
    y = InstanceNorm(6, rngs=RNGS)(x, mask=mask)
    close(y[:, :3], standardized(X[:, :3], 1))
    y = GroupNorm(6, 2, rngs=RNGS)(x, mask=mask)
    close(y[:, :3], standardized(X[:, :3].reshape(4, 3, 2, 3), (1, 3)).reshape(4, 3, 6))


def test_statistics_of_half_precision_are_single():
    x = (X * 300).astype(jnp.float16)
    layer = LayerNorm(6, use_scale=False, use_bias=False, rngs=RNGS)
    assert layer(x).dtype == jnp.float16
    np.testing.assert_allclose(layer(x).astype(float), standardized(x, -1), atol=2e-3)


def test_they_go_through_jax_as_pytrees():
    class Model(Module):
        def __init__(self):
            self.norms = [
                LayerNorm(6, rngs=RNGS),
                RMSNorm(6, rngs=RNGS),
                GroupNorm(6, 2, rngs=RNGS),
            ]

        def __call__(self, x):
            for norm in self.norms:
                x = norm(x)
            return x

    model = Model()
    close(jax.jit(lambda model, x: model(x))(model, X), model(X))
    grads = jax.grad(lambda model: (model(X) ** 3).mean())(model)
    assert grads.norms[0].scale.shape == (6,) and grads.norms[2].bias.shape == (6,)


@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, InstanceNorm])
def test_another_number_of_features_is_refused(cls):
    message = rf"{cls.__name__} with num_features=7 .*\(4, 5, 6\), .* are 6; make .*num_features=6"
    with pytest.raises(ArgumentShapeError, match=message):
        cls(7, rngs=RNGS)(X)


def test_bad_axes_and_groups_are_named():
    with pytest.raises(
        ArgumentShapeError, match=r"2 groups of 4 .*\(4, 5, 6\); expected \(..., 8\)"
    ):
        GroupNorm(8, 2, rngs=RNGS)(X)
    with pytest.raises(ArgumentValueError, match=r"reduction_axes=\(1,\) .* add -1"):
        GroupNorm(6, 2, reduction_axes=(1,), rngs=RNGS)(X)
    with pytest.raises(ArgumentValueError, match=r"feature_axes=0 .*\(4, 5, 6\) include the first"):
        InstanceNorm(4, feature_axes=0, rngs=RNGS)(X)
    with pytest.raises(ArgumentShapeError, match=r"6 channels, .* into 4 equal groups"):
        GroupNorm(6, 4, rngs=RNGS)
    with pytest.raises(ArgumentValueError, match="num_groups=2 and group_size=3: give one"):
        GroupNorm(6, 2, 3, rngs=RNGS)
