import jax
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError, MissingModeError
from weft.nnx.filters import PathContains
from weft.nnx.module import Module
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
from weft.nnx.split_merge import clone

X = draw(0, 4, 5, 6) * 3 + 2
RNGS = Rngs(0)


def close(x, y):
    np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=1e-4)


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


def test_each_parameter_is_normalised_once():
    layer = SpectralNorm(Model(), rngs=Rngs(1))
    paths = {path[:-1] for path in layer.batch_stats}
    assert paths == {("first", "kernel"), ("layers", 0, "bias"), ("layers", 0, "kernel")}
    assert layer(WEIGHT_NORM_X).shape == (4, 2, 2)
    assert [path for path, _ in matching_params(Model(), PathContains("bias"))] == [
        ("first", "bias"),
        ("layers", 0, "bias"),
    ]


def test_error_on_non_matrix():
    layer = SpectralNorm(Model(), error_on_non_matrix=True, rngs=Rngs(1))
    message = (
        r"layers/0/kernel of the Model in a SpectralNorm has shape \(3, 2, 2\) .* give error_on"
    )
    with pytest.raises(ArgumentShapeError, match=message):
        layer(WEIGHT_NORM_X)


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
