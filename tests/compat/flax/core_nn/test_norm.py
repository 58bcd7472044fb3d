import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw, quick_key
from weft.core import apply, init
from weft.core.nn import dropout, group_norm
from weft.errors import ArgumentShapeError, ArgumentValueError, InvalidRngError

KEY = quick_key(0)
X = 3 + 2 * draw(0, 8, 5, 6)


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
