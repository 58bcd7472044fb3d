import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError, InvalidRngError, ParameterGivenTwiceError
from weft.linen.stochastic import Dropout

RNGS = {"dropout": jax.random.key(0)}
X = jnp.ones((40, 50))


def test_the_mean_is_kept():
    y = Dropout(0.25, deterministic=False).apply({}, X, rngs=RNGS)
    np.testing.assert_allclose(sorted(set(np.ravel(y).tolist())), [0, 4 / 3], rtol=1e-6)
    assert y.mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes_along_which_all_or_nothing_is_dropped(axis):
    y = Dropout(0.5, (axis,), deterministic=False).apply({}, X, rngs=RNGS)
    assert (y == jnp.take(y, jnp.array([0]), axis)).all()
    assert 0 < y.mean() < 2


def test_nothing_is_dropped_where_it_is_deterministic():
    assert Dropout(0.5).apply({}, X, deterministic=True) is X
    assert Dropout(0.5).apply({}, X, True, rngs=RNGS) is X
    assert Dropout(0.0).apply({}, X, False) is X


def test_everything_is_dropped_at_one():
    assert not Dropout(1.0, deterministic=False).apply({}, X).any()


def test_a_key_of_ones_own():
    layer = Dropout(0.5, deterministic=False)
    one, same, other = (
        layer.apply({}, X, rng=jax.random.key(seed), rngs=RNGS) for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()


def test_a_stream_of_ones_own():
    layer = Dropout(0.5, deterministic=False, rng_collection="noise")
    layer.apply({}, X, rngs={"noise": jax.random.key(0)})
    with pytest.raises(InvalidRngError, match="noise"):
        layer.apply({}, X, rngs=RNGS)


def test_deterministic_is_given_once():
    with pytest.raises(ParameterGivenTwiceError, match="'deterministic' was given"):
        Dropout(0.5).apply({}, X, rngs=RNGS)
    with pytest.raises(ParameterGivenTwiceError, match="'deterministic' was given twice"):
        Dropout(0.5, deterministic=True).apply({}, X, False)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_rate_that_is_no_probability(rate):
    with pytest.raises(ArgumentValueError, match=f"rate={rate} must be in"):
        Dropout(rate, deterministic=False).apply({}, X, rngs=RNGS)
