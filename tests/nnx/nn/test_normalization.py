import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError, MissingModeError
from weft.nnx.filters import PathContains
from weft.nnx.module import Module, view
from weft.nnx.nn.linear import Linear, LinearGeneral
from weft.nnx.nn.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
    SpectralNorm,
    WeightNorm,
    matching_params,
)
from weft.nnx.rngs import Rngs
from weft.nnx.split_merge import clone, merge, split
from weft.nnx.state import to_pure_dict
from weft.nnx.variables import BatchStat, Param

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


def test_omitted_parameters():
    layer = GroupNorm(6, 2, use_bias=False, use_scale=False, rngs=RNGS)
    assert layer.scale is None and layer.bias is None
    assert jax.tree.leaves(layer) == []


@pytest.mark.parametrize("name", ["num_groups", "group_size"])
def test_num_groups_and_group_size(name):
    layer = GroupNorm(6, **{"num_groups": None, name: 2}, rngs=RNGS)
    assert layer.num_groups * layer.group_size == 6 and getattr(layer, name) == 2


def test_norms_ignore_masked_values():
    x = X.at[:, 3:].set(jnp.nan)
    mask = (jnp.arange(5) < 3)[:, None]
    y = InstanceNorm(6, rngs=RNGS)(x, mask=mask)
    close(y[:, :3], standardized(X[:, :3], 1))
    y = GroupNorm(6, 2, rngs=RNGS)(x, mask=mask)
    close(y[:, :3], standardized(X[:, :3].reshape(4, 3, 2, 3), (1, 3)).reshape(4, 3, 6))


def test_half_precision_statistics_are_float32():
    x = (X * 300).astype(jnp.float16)
    layer = LayerNorm(6, use_scale=False, use_bias=False, rngs=RNGS)
    assert layer(x).dtype == jnp.float16
    np.testing.assert_allclose(layer(x).astype(float), standardized(x, -1), atol=2e-3)


def test_pytree_round_trip():
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
    grads = jax.jit(jax.grad(lambda model: (model(X) ** 3).mean()))(model)
    assert grads.norms[0].scale.shape == (6,) and grads.norms[2].bias.shape == (6,)


@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, InstanceNorm])
def test_wrong_number_of_features_fails(cls):
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


BATCH = draw(0, 8, 5, 6) * 3 + 2


def close_to(x, y, tolerance=1e-4):
    np.testing.assert_allclose(x, y, atol=tolerance)


def test_running_averages_update_and_are_used_in_eval():
    layer = BatchNorm(6, momentum=0.9, epsilon=0.0, rngs=RNGS)
    y = layer(BATCH)
    close_to(y.mean((0, 1)), np.zeros(6))
    close_to(y.std((0, 1)), np.ones(6))
    mean, var = 0.1 * BATCH.mean((0, 1)), 0.9 + 0.1 * BATCH.var((0, 1))
    close_to(layer.mean[...], mean)
    close_to(layer.var[...], var)
    layer.eval()
    close_to(layer(BATCH), (BATCH - np.asarray(mean)[None, None]) / np.sqrt(var)[None, None])
    close_to(layer.mean[...], mean)


def test_call_overrides_attribute():
    layer = BatchNorm(6, use_running_average=True, rngs=RNGS)
    np.testing.assert_array_equal(layer(BATCH), layer(BATCH, True))
    close_to(layer(BATCH, False), BatchNorm(6, rngs=RNGS)(BATCH))
    assert (layer.mean[...] != 0).all()


def test_view_shares_the_averages():
    layer = BatchNorm(6, momentum=0.0, rngs=RNGS)
    evaluated = view(layer, use_running_average=True)
    layer(BATCH)
    close_to(evaluated(BATCH).mean((0, 1)), np.zeros(6))
    evaluated.set_view()
    assert evaluated.use_running_average is True and layer.use_running_average is False


def test_batch_norm_ignores_masked_values():
    x = BATCH.at[5:].set(jnp.nan)
    layer = BatchNorm(6, momentum=0.0, rngs=RNGS)
    layer(x, mask=(jnp.arange(8) < 5)[:, None, None])
    close_to(layer.mean[...], BATCH[:5].mean((0, 1)))
    close_to(layer.var[...], BATCH[:5].var((0, 1)), 1e-3)


def test_batch_shards_are_weighted_by_count():
    mask = (jnp.arange(4)[None] < jnp.array([1, 4])[:, None])[:, :, None, None]
    layer = BatchNorm(6, momentum=0.0, axis_name="parts", rngs=RNGS)
    graphdef, state = split(layer)

    def apply(x, mask, state):
        inner = merge(graphdef, state)
        y = inner(x, mask=mask)
        return y, to_pure_dict(split(inner)[1])

    mapped = jax.jit(jax.vmap(apply, (0, 0, None), axis_name="parts"))
    y, state = mapped(BATCH.reshape(2, 4, 5, 6), mask, state)
    counted = np.concatenate([BATCH[:1], BATCH[4:]])
    for part in range(2):
        close_to(state["mean"][part], counted.mean((0, 1)))
        close_to(state["var"][part], counted.var((0, 1)), 1e-3)
    close_to(y[1], (np.asarray(BATCH[4:]) - counted.mean((0, 1))) / counted.std((0, 1)), 1e-3)


def test_statistics_along_several_axes():
    layer = BatchNorm(30, axis=(1, -1), momentum=0.0, rngs=RNGS)
    y = layer(BATCH)
    close_to(y.mean(0), np.zeros((5, 6)))
    close_to(layer.mean[...], BATCH.mean(0).ravel())
    layer.eval()
    close_to(layer(BATCH), y)


def test_averages_keep_their_dtype():
    layer = BatchNorm(6, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=RNGS)
    assert layer(BATCH.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer.mean.dtype == layer.var.dtype == jnp.float32
    layer.mean.set_value(layer.mean.astype(jnp.float16))
    layer(BATCH)
    assert layer.mean.dtype == jnp.float16


def test_errors():
    with pytest.raises(ArgumentShapeError, match=r"num_features=7 .*\(4, 5, 6\)|\(8, 5, 6\)"):
        BatchNorm(7, rngs=RNGS)(BATCH)
    layer = BatchNorm(5, rngs=RNGS)
    with pytest.raises(ArgumentShapeError, match=r"features \(axis 2\) are 6; make the layer with"):
        layer(BATCH)
    assert (layer.mean[...] == 0).all()
    with pytest.raises(MissingModeError, match=r"BatchNorm .*use_running_average=None itself; set"):
        BatchNorm(6, use_running_average=None, rngs=RNGS)(BATCH)


WEIGHT_NORM_X = draw(3, 4, 3)


def linear():
    return Linear(3, 2, rngs=Rngs(0))


class Model(Module):
    def __init__(self):
        self.first = Linear(3, 3, rngs=Rngs(0))
        self.repeated = self.first
        self.layers = [LinearGeneral(3, (2, 2), rngs=Rngs(1))]

    def __call__(self, x):
        return self.layers[0](self.repeated(self.first(x)))


def test_largest_singular_value_is_one():
    layer = SpectralNorm(linear(), n_steps=30, rngs=Rngs(1))
    layer(WEIGHT_NORM_X)
    values = np.linalg.svd(layer.layer_instance.kernel[...], compute_uv=False)
    np.testing.assert_allclose(values[0], 1, rtol=1e-5)
    u = layer.batch_stats["kernel", "u"]
    assert isinstance(u, BatchStat) and u.shape == (1, 2)


def test_each_parameter_is_normalised_once():
    layer = SpectralNorm(Model(), rngs=Rngs(1))
    paths = {path[:-1] for path in layer.batch_stats}
    assert paths == {("first", "kernel"), ("layers", 0, "bias"), ("layers", 0, "kernel")}
    assert layer(WEIGHT_NORM_X).shape == (4, 2, 2)
    assert [path for path, _ in matching_params(Model(), PathContains("bias"))] == [
        ("first", "bias"),
        ("layers", 0, "bias"),
    ]


def test_statistics_are_fixed_in_eval():
    layer = SpectralNorm(linear(), rngs=Rngs(1))
    u = layer.batch_stats["kernel", "u"]
    before = u[...]
    layer.eval()
    layer(WEIGHT_NORM_X)
    np.testing.assert_array_equal(u[...], before)
    layer(WEIGHT_NORM_X, update_stats=True)
    assert (u[...] != before).any()
    layer.train()
    before = u[...]
    layer(WEIGHT_NORM_X, update_stats=False)
    np.testing.assert_array_equal(u[...], before)
    assert SpectralNorm(linear(), update_stats=False, rngs=Rngs(1)).use_running_average is True


def test_zero_steps_do_not_normalise():
    inner = linear()
    kernel = inner.kernel[...]
    layer = SpectralNorm(inner, n_steps=0, rngs=Rngs(1))
    layer(WEIGHT_NORM_X)
    assert inner.kernel[...] is kernel and not layer.batch_stats


@pytest.mark.parametrize("wrapper", [SpectralNorm, WeightNorm])
def test_weights_keep_their_dtype(wrapper):
    layer = wrapper(linear(), dtype=jnp.bfloat16, rngs=Rngs(1))
    layer(WEIGHT_NORM_X)
    kernel = layer.layer_instance.kernel[...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, kernel.astype(jnp.bfloat16).astype(jnp.float32))


def test_error_on_non_matrix():
    layer = SpectralNorm(Model(), error_on_non_matrix=True, rngs=Rngs(1))
    message = (
        r"layers/0/kernel of the Model in a SpectralNorm has shape \(3, 2, 2\) .* give error_on"
    )
    with pytest.raises(ArgumentShapeError, match=message):
        layer(WEIGHT_NORM_X)


def test_scales_are_the_norms_and_parameters():
    layer = WeightNorm(linear(), scale_init=jax.nn.initializers.uniform(), rngs=Rngs(1))
    scale = layer.scales["kernel",]
    assert isinstance(scale, Param) and scale.shape == (2,)
    layer(WEIGHT_NORM_X)
    norms = jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0)
    np.testing.assert_allclose(norms, scale[...], rtol=1e-5)
    scale[...] = 3 * jnp.ones(2)
    layer(WEIGHT_NORM_X)
    norms = jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0)
    np.testing.assert_allclose(norms, 3, rtol=1e-5)
    grads = jax.jit(jax.grad(lambda layer: (layer(WEIGHT_NORM_X) ** 2).sum()))(layer)
    assert (jnp.abs(grads.scales["kernel",][...]) > 0).all()


def test_scales_have_their_own_dtype():
    layer = WeightNorm(linear(), param_dtype=jnp.bfloat16, rngs=Rngs(1))
    assert layer.scales["kernel",].dtype == jnp.bfloat16
    assert layer(WEIGHT_NORM_X).dtype == jnp.float32


@pytest.mark.parametrize("axes, shape", [(None, ()), (0, (3,)), ((-1, 0), (3, 2))])
def test_axes_with_separate_norms(axes, shape):
    layer = WeightNorm(linear(), feature_axes=axes, rngs=Rngs(1))
    assert layer.scales["kernel",].shape == shape
    assert layer(WEIGHT_NORM_X).shape == (4, 2)


def test_without_scales_and_other_parameters():
    layer = WeightNorm(linear(), use_scale=False, rngs=Rngs(1))
    assert layer.scales is None
    layer(WEIGHT_NORM_X)
    norms = jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)
    both = WeightNorm(linear(), variable_filter=Param, rngs=Rngs(1))
    assert set(both.scales) == {("bias",), ("kernel",)}


def test_they_are_cloned():
    for wrapper in (SpectralNorm, WeightNorm):
        layer = wrapper(linear(), rngs=Rngs(1))
        copy = clone(layer)
        np.testing.assert_array_equal(copy(WEIGHT_NORM_X), layer(WEIGHT_NORM_X))


def test_invalid_feature_axes():
    with pytest.raises(ArgumentValueError, match=r"feature_axes=5 are not all axes .*\(3, 2\)"):
        WeightNorm(linear(), feature_axes=5, rngs=Rngs(1))
    with pytest.raises(ArgumentValueError, match=r"feature_axes=5 are not all axes"):
        WeightNorm(linear(), feature_axes=5, use_scale=False, rngs=Rngs(1))(WEIGHT_NORM_X)
