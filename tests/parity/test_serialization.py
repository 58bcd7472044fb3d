"""The same trees through weft.serialization and flax.serialization; bytes cross both ways."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import serialization as weft_serialization
from weft import struct as weft_struct
from weft.core import frozen_dict as weft_frozen

flax_serialization = pytest.importorskip("flax.serialization")
flax_struct = pytest.importorskip("flax.struct")
flax_frozen = pytest.importorskip("flax.core.frozen_dict")

Pair = collections.namedtuple("Pair", "first second")


def point(struct):
    @struct.dataclass
    class Point:
        x: Any
        y: Any
        name: str = struct.field(pytree_node=False, default="p")

    return Point


POINTS = {weft_serialization: point(weft_struct), flax_serialization: point(flax_struct)}
FREEZE = {weft_serialization: weft_frozen.freeze, flax_serialization: flax_frozen.freeze}
DTYPES = ["bool", "int8", "uint32", "float16", "float32", "float64", "complex64", "bfloat16",
          "float8_e4m3fn", "float8_e5m2", "int4", "uint2"]  # fmt: skip


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.sampled_from([(), (0, 2), (3,), (2, 3)]))
    x = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
    kinds = ["numpy", "fortran", "scalar"] + ["jax"] * (dtype.itemsize <= 4)
    kind = draw(st.sampled_from(kinds))
    if kind == "jax":
        return jnp.asarray(x)
    if kind == "scalar":
        return np.asarray(x.flat[0] if x.size else 1).astype(dtype)[()]
    return np.asarray(x, order="F" if kind == "fortran" else "C")


leaves = st.one_of(
    arrays(), st.integers(-9, 2**40), st.floats(-1, 1), st.booleans(), st.none(), st.text("ab"),
    st.binary(max_size=3), st.just(1 + 2j),
)  # fmt: skip
names = st.text("abc", min_size=1, max_size=2)
# Description of a tree, built by either library with its own classes.
plans = st.recursive(
    st.tuples(st.just("leaf"), leaves),
    lambda inner: st.one_of(
        st.tuples(st.just("dict"), st.dictionaries(names, inner, max_size=3)),
        st.tuples(st.just("frozen"), st.dictionaries(names, inner, max_size=3)),
        st.tuples(st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=2)),
        st.tuples(st.sampled_from(["pair", "point"]), st.tuples(inner, inner)),
    ),
    max_leaves=6,
)


def made(lib, plan):
    kind, parts = plan
    if kind == "leaf":
        return parts
    if kind in ("dict", "frozen"):
        tree = {name: made(lib, inner) for name, inner in parts.items()}
        return FREEZE[lib](tree) if kind == "frozen" else tree
    parts = [made(lib, inner) for inner in parts]
    if kind == "point":
        return POINTS[lib](*parts)
    return Pair(*parts) if kind == "pair" else {"list": list, "tuple": tuple}[kind](parts)


def plain(x):
    """Returns a tree of either library as one that `==` compares, dtypes and types included."""
    if isinstance(x, dict | weft_frozen.FrozenDict | flax_frozen.FrozenDict):
        return type(x).__name__, {key: plain(value) for key, value in x.items()}
    if isinstance(x, tuple(POINTS.values())):
        return "Point", plain(x.x), plain(x.y), x.name
    if isinstance(x, list | tuple):
        return type(x).__name__, [plain(value) for value in x]
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return isinstance(x, np.generic), x.shape, str(x.dtype), np.asarray(x).tobytes()
    return type(x).__name__, x


@given(plans)
@settings(deadline=None, max_examples=25)
def test_state_dicts_and_bytes_are_interchangeable(plan):
    weft_tree, flax_tree = made(weft_serialization, plan), made(flax_serialization, plan)
    assert plain(weft_serialization.to_state_dict(weft_tree)) == plain(
        flax_serialization.to_state_dict(flax_tree)
    )
    for limit in (2**30, 8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weft_serialization, "MAX_CHUNK_SIZE", limit)
            patch.setattr(flax_serialization, "MAX_CHUNK_SIZE", limit)
            encoded = weft_serialization.to_bytes(weft_tree)
            assert encoded == flax_serialization.to_bytes(flax_tree)
        read = weft_serialization.from_bytes(weft_tree, encoded)
        assert plain(read) == plain(flax_serialization.from_bytes(flax_tree, encoded))
        assert plain(weft_serialization.msgpack_restore(encoded)) == plain(
            flax_serialization.msgpack_restore(encoded)
        )


def test_optimizer_state_is_interchangeable():
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.zeros(3)}
    tx = optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-3), {"w": True, "b": False}))
    state = tx.init(params)
    _, trained = tx.update(params, state, params)
    encoded = flax_serialization.to_bytes(trained)
    assert encoded == weft_serialization.to_bytes(trained)
    assert plain(weft_serialization.from_bytes(state, encoded)) == plain(
        flax_serialization.from_bytes(state, encoded)
    )


@pytest.mark.parametrize(
    "value",
    [np.array(["a", "bcd"]), np.array([b"ab"]), np.array(["2020-01-01"], "datetime64[D]"),
     np.float32(1.5), ml_dtypes.bfloat16(1.5), np.bool_(True), 1 - 1j, bytearray(b"x")],
)  # fmt: skip
def test_rare_values_have_the_same_bytes(value):
    assert weft_serialization.to_bytes(value) == flax_serialization.to_bytes(value)


def test_flax_key_data_becomes_a_key():
    key = jax.random.key(7)
    encoded = flax_serialization.to_bytes({"rng": jax.random.key_data(key)})
    assert weft_serialization.from_bytes({"rng": jax.random.key(0)}, encoded)["rng"] == key


@pytest.mark.parametrize("lib", [weft_serialization, flax_serialization])
def test_mismatch_is_a_value_error_with_path(lib):
    Point = POINTS[lib]
    for target, state in [
        ({"a": {"b": 1}}, {"a": {"c": 1}}),
        ({"a": [1, 2]}, {"a": {"0": 1}}),
        ({"a": Pair(1, 2)}, {"a": {"first": 1}}),
        ({"a": Pair(1, 2)}, {"a": {"first": 1, "second": 2, "third": 3}}),
        ({"a": Point(1, 2)}, {"a": {"x": 1}}),
        ({"a": Point(1, 2)}, {"a": {"x": 1, "y": 2, "name": "q"}}),
    ]:
        with pytest.raises(ValueError, match=r"\./a"):
            lib.from_state_dict(target, state)
        with pytest.raises(ValueError, match="root/a"):
            lib.from_state_dict(target, state, name="root")
    with pytest.raises(ValueError, match="'1'"):
        lib.to_state_dict({1: 0, "1": 0})
    for encoded in (b"", lib.to_bytes({"a": 1})[:-1], lib.to_bytes(1) + b"x"):
        with pytest.raises(ValueError):
            lib.msgpack_restore(encoded)
    for value in ((1,), {1}, Point(1, 2), np.array([None])):
        with pytest.raises((TypeError, ValueError)):
            lib.msgpack_serialize(value)


@pytest.mark.parametrize("lib", [weft_serialization, flax_serialization])
def test_targets_match_loosely(lib):
    assert lib.from_state_dict({"a": 1}, {"a": 2, "b": 3}) == {"a": 2}
    assert lib.from_state_dict(None, {"a": 2}) == {"a": 2}
    assert lib.from_state_dict({1: 2}, {"1": 5}) == {1: 5}
    old = {"name": "Pair", "fields": {"0": "first", "1": "second"}, "values": {"0": 5, "1": 6}}
    assert lib.from_state_dict(Pair(0, 0), old) == Pair(5, 6)
    partial = jax.tree_util.Partial(divmod, 7)
    state = {"args": {"0": 9}, "keywords": {}}
    assert lib.from_state_dict(partial, state)(2) == (4, 1)


@pytest.mark.parametrize("lib", [weft_serialization, flax_serialization])
def test_registration_api_agrees(lib):
    class Own:
        def __init__(self, held):
            self.held = held

    paths = []

    def from_state(own, state):
        paths.append(lib.current_path())
        return Own(lib.from_state_dict(own.held, state["held"], name="held"))

    def to_state(own):
        return {"held": lib.to_state_dict(own.held)}

    assert not lib.is_serializable(Own)
    lib.register_serialization_state(Own, to_state, from_state)
    assert lib.is_serializable(Own) and lib.is_serializable(Own([1]))
    with pytest.raises(ValueError, match="already"):
        lib.register_serialization_state(Own, to_state, from_state)
    lib.register_serialization_state(Own, to_state, from_state, override=True)
    tree = {"a": [Own([1])]}
    encoded = lib.to_bytes(tree)
    assert encoded == lib.to_bytes({"a": [{"held": [1]}]})
    assert lib.from_bytes(tree, encoded)["a"][0].held == [1]
    assert paths == ["./a/0"] and lib.current_path() == ""
    for value in (1, None, np.ones(2), {1}):
        assert not lib.is_serializable(value)
    for value in ({}, [], (), FREEZE[lib]({}), POINTS[lib](1, 2)):
        assert lib.is_serializable(value)
