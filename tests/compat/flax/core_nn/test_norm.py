import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.core import apply, init
from weft.core.nn import batch_norm, dropout, group_norm, layer_norm
from weft.errors import ArgumentShapeError, ArgumentValueError, InvalidRngError

KEY = quick_key(0)
X = 3 + 2 * draw(0, 8, 5, 6)


def test_average_follows_the_batches():
    _, variables = init(batch_norm)(KEY, X)
    stats = variables["batch_stats"]
    assert (stats["mean"].tolist(), stats["var"].tolist()) == ([0] * 6, [1] * 6)
    norm = apply(batch_norm, mutable=["batch_stats"])
    y, changed = norm(variables, X, momentum=0.9)
    np.testing.assert_allclose(y.mean((0, 1)), np.zeros(6), atol=1e-5)
    np.testing.assert_allclose(y.std((0, 1)), np.ones(6), rtol=1e-4)
    mean = 0.1 * X.mean((0, 1))
    np.testing.assert_allclose(changed["batch_stats"]["mean"], mean, rtol=1e-5)
    variables = {**variables, **changed}
    y = apply(batch_norm)(variables, X, use_running_average=True)
    expected = np.asarray(X - mean[None, None]) / np.sqrt(changed["batch_stats"]["var"] + 1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_groups_of_a_mapped_axis_have_their_own_statistics():
    _, variables = init(batch_norm)(KEY, X[0])

    def norm(x):
        groups = [[0, 1], [2, 3]]
        return apply(batch_norm, mutable=["batch_stats"])(
            variables, x, axis_name="i", axis_index_groups=groups
        )[0]

    y = jax.pmap(norm, axis_name="i")(X[:4]) if len(jax.devices()) >= 4 else None
    if y is None:
        pytest.skip("needs four devices")
    np.testing.assert_allclose(y[:2].mean((0, 1)), np.zeros(6), atol=1e-5)
    np.testing.assert_allclose(y[2:].mean((0, 1)), np.zeros(6), atol=1e-5)


def test_positions_are_normalised_separately():
    y, _ = init(layer_norm)(KEY, X)
    np.testing.assert_allclose(y.mean(-1), np.zeros((8, 5)), atol=1e-5)
    np.testing.assert_allclose(y.std(-1), np.ones((8, 5)), rtol=1e-4)


def test_channel_groups_are_normalised_separately():
    by_number, variables = init(group_norm)(KEY, X, num_groups=2)
    by_size, _ = init(group_norm)(KEY, X, num_groups=None, group_size=3)
    np.testing.assert_array_equal(by_number, by_size)
    assert variables["params"]["scale"].shape == (1, 1, 6)
    grouped = by_number.reshape(8, 5, 2, 3)
    np.testing.assert_allclose(grouped.mean((1, 3)), np.zeros((8, 2)), atol=1e-5)


def test_bad_groups():
    with pytest.raises(ArgumentShapeError, match="cannot be cut into 4 equal groups"):
        init(group_norm)(KEY, X, num_groups=4)
    with pytest.raises(ArgumentValueError, match="num_groups=2 and group_size=3: give one"):
        init(group_norm)(KEY, X, num_groups=2, group_size=3)
    with pytest.raises(ArgumentValueError, match="num_groups=None and group_size=None"):
        init(group_norm)(KEY, jnp.ones((2, 4)), num_groups=None)
    with pytest.raises(ArgumentShapeError, match=r"6 channels, .* into groups of group_size=4"):
        init(group_norm)(KEY, X, num_groups=None, group_size=4)
    with pytest.raises(ArgumentValueError, match=r"num_groups=0 .* expected a positive number"):
        init(group_norm)(KEY, X, num_groups=0)


ONES = jnp.ones((1000,))
RNGS = {"dropout": jax.random.key(0)}


def test_kept_values_are_scaled():
    y = apply(dropout)({}, ONES, 0.25, rngs=RNGS)
    assert set(y.tolist()) == {0.0, float(jnp.float32(1 / 0.75))}
    assert abs(float(y.mean()) - 1) < 0.1


def test_each_call_differs():
    def twice(scope, x):
        return dropout(scope, x, 0.5), dropout(scope, x, 0.5)

    a, b = apply(twice)({}, ONES, rngs=RNGS)
    assert (a != b).any()


def test_no_key_is_needed_if_deterministic():
    for kwargs in ({"rate": 0.0}, {"rate": 0.5, "deterministic": True}):
        assert (apply(dropout)({}, ONES, **kwargs) == ONES).all()
    assert (apply(dropout)({}, ONES, 1.0) == 0).all()
    with pytest.raises(InvalidRngError, match="needs a key of the PRNG stream 'dropout'"):
        apply(dropout)({}, ONES, 0.5)


def test_rate_is_between_0_and_1():
    for rate in (-0.5, 1.5):
        with pytest.raises(ArgumentValueError, match=rf"rate={rate} must be in \[0, 1"):
            apply(dropout)({}, ONES, rate, rngs=RNGS)
