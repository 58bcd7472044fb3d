import jax
import jax.numpy as jnp
import pytest

from weft.core import apply
from weft.core.nn import dropout
from weft.errors import ArgumentValueError, InvalidRngError

X = jnp.ones((1000,))
RNGS = {"dropout": jax.random.key(0)}


def test_what_stays_is_scaled_up():
    y = apply(dropout)({}, X, 0.25, rngs=RNGS)
    assert set(y.tolist()) == {0.0, float(jnp.float32(1 / 0.75))}
    assert abs(float(y.mean()) - 1) < 0.1


def test_each_call_drops_others():
    def twice(scope, x):
        return dropout(scope, x, 0.5), dropout(scope, x, 0.5)

    a, b = apply(twice)({}, X, rngs=RNGS)
    assert (a != b).any()


def test_no_key_is_needed_where_nothing_is_random():
    for kwargs in ({"rate": 0.0}, {"rate": 0.5, "deterministic": True}):
        assert (apply(dropout)({}, X, **kwargs) == X).all()
    assert (apply(dropout)({}, X, 1.0) == 0).all()
    with pytest.raises(InvalidRngError, match="needs a key of the PRNG stream 'dropout'"):
        apply(dropout)({}, X, 0.5)


def test_a_rate_is_between_0_and_1():
    for rate in (-0.5, 1.5):
        with pytest.raises(ArgumentValueError, match=rf"rate={rate} must be in \[0, 1"):
            apply(dropout)({}, X, rate, rngs=RNGS)
