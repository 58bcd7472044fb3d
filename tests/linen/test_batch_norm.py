import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ModifyScopeVariableError, ParameterGivenTwiceError
from weft.linen.batch_norm import BatchNorm

KEY = jax.random.key(0)
X = draw(0, 8, 5, 6) * 3 + 2


def close(x, y, tolerance=1e-4):
    np.testing.assert_allclose(x, y, atol=tolerance)


def test_averages_follow_the_batches_and_are_used_in_evaluation():
    layer = BatchNorm(momentum=0.9, epsilon=0.0)
    variables = layer.init(KEY, X, False)
    stats = variables["batch_stats"]
    assert (stats["mean"].tolist(), stats["var"].tolist()) == ([0.0] * 6, [1.0] * 6)
    y, updates = layer.apply(variables, X, False, mutable=["batch_stats"])
    close(y.mean((0, 1)), np.zeros(6))
    close(y.std((0, 1)), np.ones(6))
    mean, var = 0.1 * X.mean((0, 1)), 0.9 + 0.1 * X.var((0, 1))
    close(updates["batch_stats"]["mean"], mean)
    close(updates["batch_stats"]["var"], var)
    y, kept = layer.apply({**variables, **updates}, X, True, mutable=["batch_stats"])
    close(y, (X - np.asarray(mean)[None, None]) / np.sqrt(var)[None, None])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, kept, updates))


def test_what_is_masked_does_not_count():
    x = X.at[5:].set(jnp.nan)
    mask = (jnp.arange(8) < 5)[:, None, None]
    layer = BatchNorm(False, momentum=0.0)
    variables = layer.init(KEY, X)
    _, updates = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
    close(updates["batch_stats"]["mean"], X[:5].mean((0, 1)))
    close(updates["batch_stats"]["var"], X[:5].var((0, 1)), 1e-3)


def test_parts_of_a_batch_weigh_as_much_as_counts_in_them():
    mask = (jnp.arange(8)[None] % 4 < jnp.array([1, 4])[:, None]).reshape(2, -1)[:, :4, None, None]
    parts = X.reshape(2, 4, 5, 6)
    layer = BatchNorm(False, momentum=0.0, axis_name="parts")
    variables = layer.init(KEY, X)

    def apply(x, mask):
        return layer.apply(variables, x, mask=mask, mutable=["batch_stats"])[1]["batch_stats"]

    stats = jax.vmap(apply, axis_name="parts")(parts, mask)
    counted = np.concatenate([X[:1], X[4:]])
    for part in range(2):
        close(stats["mean"][part], counted.mean((0, 1)))
        close(stats["var"][part], counted.var((0, 1)), 1e-3)


def test_averages_keep_their_dtype():
    layer = BatchNorm(False, force_float32_reductions=False, param_dtype=jnp.bfloat16)
    variables = layer.init(KEY, X)
    _, updates = layer.apply(variables, X, mutable=["batch_stats"])
    assert updates["batch_stats"]["mean"].dtype == jnp.bfloat16


def test_mode_is_given_once():
    with pytest.raises(ParameterGivenTwiceError, match="'use_running_average' was given "):
        BatchNorm().init(KEY, X)
    with pytest.raises(ParameterGivenTwiceError, match="twice, as True and as False"):
        BatchNorm(True).init(KEY, X, False)


def test_averages_that_cannot_be_kept_are_named():
    layer = BatchNorm(False)
    with pytest.raises(ModifyScopeVariableError, match="batch_stats"):
        layer.apply(layer.init(KEY, X), X)
