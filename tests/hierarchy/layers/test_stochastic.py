import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError, MissingPrngKeyError
from weft.hierarchy.layers.linear import Dropout, DropToken, StochasticDepth
from weft.hierarchy.module import functional as F

KEY = jax.random.key(0)
LAYERS = [Dropout, StochasticDepth, DropToken]


def run(cls, x, *, is_training=True, prng_key=KEY, **kwargs):
    layer = cls.default_config().set(name="layer", **kwargs).instantiate(parent=None)
    assert layer.initialize_parameters_recursively(KEY) == {}
    return F(layer, prng_key, {}, (x,), is_training=is_training)[0]


@pytest.mark.parametrize("cls", LAYERS)
def test_identity_in_evaluation_or_with_zero_rate(cls):
    x = jnp.ones((4, 6, 3))
    assert run(cls, x, rate=0.5, is_training=False, prng_key=None) is x
    assert run(cls, x, rate=0.0, prng_key=None) is x
    assert run(cls, x, prng_key=None) is x


@pytest.mark.parametrize("cls", LAYERS)
def test_missing_key_is_named(cls):
    with pytest.raises(MissingPrngKeyError, match="of layer needs a PRNG key"):
        run(cls, jnp.ones((4, 6, 3)), rate=0.5, prng_key=None)


@pytest.mark.parametrize("cls", LAYERS)
def test_dropping_depends_on_key(cls):
    x = jax.random.normal(KEY, (16, 6, 3))
    first, again = (run(cls, x, rate=0.5) for _ in range(2))
    other = run(cls, x, rate=0.5, prng_key=jax.random.key(7))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_rate_of_one_is_rejected():
    with pytest.raises(ArgumentValueError, match="rate=1"):
        run(Dropout, jnp.ones(3), rate=1.0)
