import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from weft.functional import arrays, cast_floats, stochastic_round

KEY = jax.random.key(0)


def from_bits(bits):
    return jax.lax.bitcast_convert_type(jnp.array(bits, jnp.uint32), jnp.float32)


def bits_of(x):
    return np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint16))


@pytest.mark.parametrize("bits", [0x3F801234, 0xBF80FFFF, 0x42C80001, 0x00004000, 0x80018000])
def test_rounds_up_as_often_as_the_lower_bits_say(bits, monkeypatch):
    every = jnp.arange(2**16, dtype=jnp.uint32)
    monkeypatch.setattr(arrays, "_random_half", lambda key, shape: every)
    rounded = bits_of(stochastic_round(jnp.broadcast_to(from_bits(bits), 2**16), KEY))
    neighbors, counts = np.unique(rounded, return_counts=True)
    assert neighbors.tolist() == [bits >> 16, (bits >> 16) + 1]
    assert counts.tolist() == [2**16 - (bits & 0xFFFF), bits & 0xFFFF]


def test_mean_is_unbiased():
    x = jnp.array([1.001, -0.3337, 1e-30, 7e5])
    rounded = stochastic_round(jnp.broadcast_to(x, (40_000, 4)), KEY).astype(jnp.float32)
    # Each error is at most 2**-7 of the number, and its deviation at most half of that.
    np.testing.assert_allclose(rounded.mean(0), x, rtol=5 * 2**-8 / 200, atol=0)
    assert len(np.unique(rounded)) == 8


def test_bits_are_independent_of_each_other():
    n = 2**18
    x = jnp.full((2, n // 2), 1 + 2**-8)  # halfway between two numbers
    ups = [
        np.asarray(stochastic_round(x, jax.random.key(seed)) > 1).ravel() * 2.0 - 1
        for seed in (0, 1)
    ]
    one, other = ups
    for lag in (1, 2, 3, 64, n // 2):
        assert abs(np.mean(one[lag:] * one[:-lag])) < 5 / np.sqrt(n - lag)
    for of_other in (other, other[::-1], np.roll(other, 1)):
        assert abs(np.mean(one * of_other)) < 5 / np.sqrt(n)
    drawn = np.asarray(arrays._random_half(KEY, (n,)))
    counts = np.bincount(drawn, minlength=2**16)
    assert len(counts) == 2**16
    # The deviation of the counts, whose mean is 4, is at most that of independent draws.
    assert 1.8 < counts.std() < 2.2
    for bit in range(16):
        assert abs((drawn >> bit & 1).mean() - 0.5) < 5 / np.sqrt(4 * n)


def test_representable_numbers_and_their_signs_stay():
    upper = np.arange(2**16, dtype=np.uint32)
    exact = from_bits(upper << 16)
    rounded = bits_of(stochastic_round(exact, KEY))
    is_nan = np.isnan(np.asarray(exact))
    np.testing.assert_array_equal(rounded[~is_nan], upper[~is_nan])
    assert np.isnan(np.asarray(from_bits(rounded[is_nan].astype(np.uint32) << 16))).all()


def test_what_is_finite_stays_finite_and_nan_stays_nan():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    finite = stochastic_round(jnp.full(100, jnp.finfo(jnp.float32).max), KEY)
    assert finite.tolist() == [largest] * 100
    assert stochastic_round(-jnp.full(100, 3.4e38), KEY).tolist() == [-largest] * 100
    # Adding to their bits would make these infinite, or negative zeros.
    nans = from_bits([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
    assert jnp.isnan(stochastic_round(nans, KEY)).all()


def test_numbers_drawn_do_not_depend_on_the_mesh():
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    x = jax.random.normal(KEY, (16, 12))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    sharded = jax.device_put(x, NamedSharding(mesh, P("model", "data")))
    rounded = jax.jit(stochastic_round)(sharded, KEY)
    assert rounded.sharding.is_equivalent_to(sharded.sharding, 2)
    np.testing.assert_array_equal(bits_of(rounded), bits_of(stochastic_round(x, KEY)))
    other = stochastic_round(x, jax.random.key(1))
    assert (bits_of(rounded) != bits_of(other)).any()


def test_cast_floats_leaves_what_is_no_array_of_floats():
    tree = {"x": np.ones(2), "n": jnp.arange(2), "number": 1.5, "name": "a", "none": None}
    cast = cast_floats(tree, jnp.bfloat16)
    assert cast["x"].dtype == jnp.bfloat16
    assert cast["n"].dtype == jnp.int32
    assert {k: cast[k] for k in ("number", "name", "none")} == {
        "number": 1.5,
        "name": "a",
        "none": None,
    }
    assert cast_floats(tree, None) is tree
