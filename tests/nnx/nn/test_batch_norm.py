import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, MissingModeError
from weft.nnx.module import view
from weft.nnx.nn.batch_norm import BatchNorm
from weft.nnx.rngs import Rngs
from weft.nnx.splitting import merge, split
from weft.nnx.state import to_pure_dict

X = draw(0, 8, 5, 6) * 3 + 2
RNGS = Rngs(0)


def close(x, y, tolerance=1e-4):
    np.testing.assert_allclose(x, y, atol=tolerance)


def test_averages_follow_the_batches_and_are_used_in_evaluation():
    layer = BatchNorm(6, momentum=0.9, epsilon=0.0, rngs=RNGS)
    y = layer(X)
    close(y.mean((0, 1)), np.zeros(6))
    close(y.std((0, 1)), np.ones(6))
    mean, var = 0.1 * X.mean((0, 1)), 0.9 + 0.1 * X.var((0, 1))
    close(layer.mean[...], mean)
    close(layer.var[...], var)
    layer.eval()
    close(layer(X), (X - np.asarray(mean)[None, None]) / np.sqrt(var)[None, None])
    close(layer.mean[...], mean)


def test_the_call_goes_before_the_attribute():
    layer = BatchNorm(6, use_running_average=True, rngs=RNGS)
    np.testing.assert_array_equal(layer(X), layer(X, True))
    close(layer(X, False), BatchNorm(6, rngs=RNGS)(X))
    assert (layer.mean[...] != 0).all()


def test_a_view_shares_the_averages():
    layer = BatchNorm(6, momentum=0.0, rngs=RNGS)
    evaluated = view(layer, use_running_average=True)
    layer(X)
    close(evaluated(X).mean((0, 1)), np.zeros(6))
    evaluated.set_view()
    assert evaluated.use_running_average is True and layer.use_running_average is False


def test_what_is_masked_does_not_count():
    x = X.at[5:].set(jnp.nan)
    layer = BatchNorm(6, momentum=0.0, rngs=RNGS)
    layer(x, mask=(jnp.arange(8) < 5)[:, None, None])
    close(layer.mean[...], X[:5].mean((0, 1)))
    close(layer.var[...], X[:5].var((0, 1)), 1e-3)


def test_parts_of_a_batch_weigh_as_much_as_counts_in_them():
    mask = (jnp.arange(4)[None] < jnp.array([1, 4])[:, None])[:, :, None, None]
    layer = BatchNorm(6, momentum=0.0, axis_name="parts", rngs=RNGS)
    graphdef, state = split(layer)

    def apply(x, mask, state):
        inner = merge(graphdef, state)
        y = inner(x, mask=mask)
        return y, to_pure_dict(split(inner)[1])

    mapped = jax.vmap(apply, (0, 0, None), axis_name="parts")
    y, state = mapped(X.reshape(2, 4, 5, 6), mask, state)
    counted = np.concatenate([X[:1], X[4:]])
    for part in range(2):
        close(state["mean"][part], counted.mean((0, 1)))
        close(state["var"][part], counted.var((0, 1)), 1e-3)
    close(y[1], (np.asarray(X[4:]) - counted.mean((0, 1))) / counted.std((0, 1)), 1e-3)


def test_statistics_along_several_axes():
    layer = BatchNorm(30, axis=(1, -1), momentum=0.0, rngs=RNGS)
    y = layer(X)
    close(y.mean(0), np.zeros((5, 6)))
    close(layer.mean[...], X.mean(0).ravel())
    layer.eval()
    close(layer(X), y)


def test_averages_keep_their_dtype():
    layer = BatchNorm(6, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=RNGS)
    assert layer(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer.mean.dtype == layer.var.dtype == jnp.float32
    layer.mean.set_value(layer.mean.astype(jnp.float16))
    layer(X)
    assert layer.mean.dtype == jnp.float16


def test_errors():
    with pytest.raises(ArgumentShapeError, match=r"num_features=7 .*\(4, 5, 6\)|\(8, 5, 6\)"):
        BatchNorm(7, rngs=RNGS)(X)
    layer = BatchNorm(5, rngs=RNGS)
    with pytest.raises(ArgumentShapeError, match=r"features \(axis 2\) are 6; make the layer with"):
        layer(X)
    assert (layer.mean[...] == 0).all()
    with pytest.raises(MissingModeError, match=r"BatchNorm .*use_running_average=None itself; set"):
        BatchNorm(6, use_running_average=None, rngs=RNGS)(X)
