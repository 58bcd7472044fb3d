import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.extend.random import define_prng_impl

from weft import serialization, struct
from weft.errors import DamagedBytesError, StateDictMismatchError, UnserializableValueError
from weft.serialization import from_bytes, msgpack_restore, msgpack_serialize, to_bytes

DTYPES = ["bool", "int8", "uint64", "float16", "float64", "complex64", "complex128", ">i4", "<U3",
          "S2", "datetime64[D]", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn",
          "int4", "uint2"]  # fmt: skip


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_arrays_of_all_dtypes_round_trip(data):
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    values = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2)
    array = np.asarray(values.astype(dtype), order=data.draw(st.sampled_from("CF")))
    for limit in (2**30, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serialization, "MAX_CHUNK_SIZE", limit)
            back = msgpack_restore(msgpack_serialize({"a": [array]}))["a"][0]
        assert back.shape == shape and back.dtype == dtype.newbyteorder("=")
        assert back.tobytes() == array.astype(back.dtype).tobytes()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_round_trip(impl):
    keys = {"one": jax.random.key(1, impl=impl), "many": jax.random.split(jax.random.key(2), 3)}
    for back in (from_bytes(keys, to_bytes(keys)), msgpack_restore(msgpack_serialize(keys))):
        for name, key in keys.items():
            assert back[name].dtype == key.dtype and back[name].shape == key.shape
            assert jnp.array_equal(jax.random.key_data(back[name]), jax.random.key_data(key))


def test_key_data_becomes_a_key_if_target_has_one():
    key = jax.random.key(3)
    back = from_bytes({"key": jax.random.key(0)}, to_bytes({"key": jax.random.key_data(key)}))
    assert back["key"] == key


def test_only_in_place_mutates_the_input(monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 16)
    tree = {"a": {"b": jnp.arange(3)}, "c": [jnp.arange(5)]}
    encoded = msgpack_serialize(tree)
    assert isinstance(tree["a"]["b"], jax.Array) and isinstance(tree["c"][0], jax.Array)
    assert msgpack_serialize(tree, in_place=True) == encoded
    assert type(tree["a"]["b"]) is np.ndarray and set(tree["c"][0]["chunks"]) == {"0", "1"}
    np.testing.assert_array_equal(msgpack_restore(encoded)["c"][0], np.arange(5))


class Point(struct.PyTreeNode):
    x: int


@pytest.mark.parametrize(
    "value, message",
    [
        ({"a": [object()]}, "the value at './a/0' is a object, which has no form as bytes"),
        (
            {"a": Point(1)},
            "the value at './a' is a Point, which has no form as bytes; give .* to_b",
        ),
        ((1, 2), r"the value at '\.' is a tuple"),
        ({"a": 2**64}, "the integer 18446744073709551616 at './a' does not fit into 64 bits"),
        ({"a": {(1, 2): 3}}, r"the key \(1, 2\) of the dict at './a' is a tuple; use to_bytes"),
        ({"a": np.array([None])}, "the array at './a' is a ndarray of dtype object"),
        ({"a": np.zeros(1, "i4,f4")}, "the array at './a' is a ndarray of dtype"),
        ({"a": np.ma.array([1, 2])}, "the array at './a' is a MaskedArray of dtype int64"),
        ({"a": np.zeros(1, "i4,f4")[0]}, "the array at './a' is a void of dtype"),
    ],
)
def test_unserializable_value_names_the_path(value, message):
    with pytest.raises(UnserializableValueError, match=message):
        msgpack_serialize(value)


def test_arrays_without_values_are_rejected():
    def save(x):
        return to_bytes({"a": x})

    with pytest.raises(UnserializableValueError, match=r"array at '\./a' has no values to write: "):
        jax.jit(save)(1.0)
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(UnserializableValueError, match=r"has no values to write: .*deleted"):
        save(gone)


def test_keys_of_an_implementation_without_a_name_are_rejected():
    def split(key, shape):
        return jnp.broadcast_to(key, (*shape, 1))

    impl = define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.atleast_1d(seed).astype("uint32"),
        split=split,
        random_bits=lambda key, width, shape: jnp.zeros(shape, f"uint{width}"),
        fold_in=lambda key, data: key,
        name="none",
        tag="none",
    )
    with pytest.raises(UnserializableValueError, match=r"key at '\./a' is of the implementation"):
        to_bytes({"a": jax.random.key(0, impl=impl)})


good = msgpack_serialize({"a": np.arange(3), "b": "text"})


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        good[:-3],
        good + b"x",
        good.replace(b"int64", b"int63"),
        good.replace(b"int64", b"int16"),
        msgpack.packb({"__msgpack_chunked_array__": True, "shape": {}}),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb(((2,), "float32", b"")))),
    ],
)
def test_damaged_bytes_are_reported(encoded):
    with pytest.raises(DamagedBytesError, match=f"the {len(encoded)} bytes are not what msgpack"):
        msgpack_restore(encoded)


def test_structure_mismatch_names_the_path():
    with pytest.raises(StateDictMismatchError, match=r"'\./a'.* 2 entries, the state dict 1"):
        from_bytes({"a": [0, 0]}, to_bytes({"a": [1]}))


def test_unknown_extension_types_stay():
    other = msgpack.ExtType(9, b"abc")
    assert msgpack_restore(msgpack.packb({"a": other})) == {"a": other}


def test_unknown_dtype_is_named():
    with pytest.raises(DamagedBytesError, match="array of an unknown dtype, 'int63'"):
        msgpack_restore(good.replace(b"int64", b"int63"))
