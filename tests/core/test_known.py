import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.core.known import known_or_shape, known_part
from weft.errors import LazyInitError

SHAPE = jax.ShapeDtypeStruct((2, 3), "float32")


def test_what_needs_only_shapes_is_computed():
    def fn(x, y):
        return {"ones": jnp.ones(x.shape, x.dtype), "twice": 2 * y}

    result = known_part(fn, SHAPE, np.arange(2.0, dtype="float32"))
    assert jax.tree.map(lambda v: (v.shape, v.dtype.name), result) == {
        "ones": ((2, 3), "float32"),
        "twice": ((2,), "float32"),
    }
    assert result["twice"].tolist() == [0.0, 2.0]


def test_a_result_that_needs_a_value_is_named():
    def fn(x):
        return {"a": {"b": jnp.zeros(3), "c": x.sum(), "d": x + 1}}

    with pytest.raises(
        LazyInitError, match="lazy_init cannot compute a/c: its initial value depend"
    ):
        known_part(fn, SHAPE)


def test_what_is_computed_beside_is_not_computed():
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), "float32")

    def fn(x, y):
        return y + 1 + 0 * (jnp.ones_like(x) @ x).ndim

    assert known_part(fn, huge, jnp.float32(1)) == 2


def test_what_is_no_array_comes_through():
    def fn(x, n, *, name):
        return {"n": n, "half": 0.5, "name": name, "array": np.ones(2), "none": None, "x": x[:n]}

    result = known_part(fn, jnp.arange(3), 2, name="dense")
    assert type(result["n"]) is int and type(result["half"]) is float
    assert type(result["array"]) is np.ndarray
    assert result["x"].tolist() == [0, 1]
    assert (result["name"], result["none"]) == ("dense", None)


def test_keys_are_known_values():
    key = jax.random.key(3)
    assert known_part(lambda key, x: jax.random.normal(key), key, SHAPE) == jax.random.normal(key)


def test_an_unknown_value_that_is_a_result_itself():
    with pytest.raises(
        LazyInitError, match="1: its initial value depends on the value of an input"
    ):
        known_part(lambda x: (jnp.ones(2), x), SHAPE)


def test_what_is_not_known_has_a_shape():
    result = known_or_shape(lambda x, y: {"a": x.sum(), "b": (y + 1, 2), "x": x}, SHAPE, np.ones(3))
    assert result["b"][0].tolist() == [2, 2, 2] and result["b"][1] == 2
    assert result["a"] == jax.ShapeDtypeStruct((), "float32") and result["x"] == SHAPE
