"""State dicts as bytes, and back.

The bytes are MessagePack in Flax's format: arrays are extension type 1 with shape, dtype name and
bytes in C order, complex numbers type 2, NumPy scalars type 3. An array of more than
`MAX_CHUNK_SIZE` bytes is a dict of parts. Typed PRNG keys, which Flax refuses, are a dict of
implementation name and data.
"""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from weft import errors, serialization
from weft.serialization import state_dicts, untrusted

if TYPE_CHECKING:
    import msgpack  # otherwise where it is used: few programs write or read bytes

T = TypeVar("T")

MAX_CHUNK_SIZE = 2**30
"""Bytes of an array that are written at once; MessagePack ends at 2**32."""

_CHUNKED = "__msgpack_chunked_array__"
_PRNG_KEY = "__msgpack_prng_key__"
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types
_DTYPE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}(\[[0-9A-Za-z]{1,8}\])?")
_STRING_DTYPE = re.compile(r"(str|bytes)([0-9]+)")
_KEY_TYPES = (str, bytes, int, float, bool)
_LEAF_TYPES = (*_KEY_TYPES, bytearray, memoryview, complex)

Packable = Any  # dicts and lists of arrays, numbers and strings, as MessagePack takes them
Unpacked = object  # what a stranger's bytes hold: nothing is known of it


def _path_text(*path: str) -> str:
    return repr("/".join((".", *path)))


def _to_numpy(
    x: jax.Array | np.ndarray | np.generic, path: tuple[str, ...]
) -> np.ndarray:
    try:
        array = np.asarray(x)
    except (TypeError, RuntimeError) as error:
        raise errors.UnserializableValueError(
            f"the array at {_path_text(*path)} has no values to write: {error}"
        ) from error
    dtype = array.dtype
    if (
        dtype.hasobject
        or dtype.names
        or dtype.type is np.void
        or isinstance(x, np.ma.MaskedArray)
    ):
        raise errors.UnserializableValueError(
            f"the array at {_path_text(*path)} is a {type(x).__name__} of dtype {dtype}, which "
            "has no form as bytes here; give arrays of numbers, of booleans or of strings."
        )
    return np.asarray(array, dtype.newbyteorder("="))


def _to_packable(x: PyTree, path: tuple[str, ...], in_place: bool) -> Packable:
    """Returns a tree of NumPy arrays, each small enough for one MessagePack object."""
    if type(x) is dict:
        packable_dict = x if in_place else {}
        for key, value in x.items():
            if key is not None and type(key) not in _KEY_TYPES:
                raise errors.UnserializableValueError(
                    f"the key {key!r} of the dict at {_path_text(*path)} is a "
                    f"{type(key).__name__}; use to_bytes or to_state_dict, which make strings of "
                    "keys."
                )
            packable_dict[key] = _to_packable(
                value, (*path, str(key)), in_place
            )
        return packable_dict
    if type(x) is list:
        packable_list = []
        for i, value in enumerate(x):
            packable_list.append(_to_packable(value, (*path, str(i)), in_place))
        if in_place:
            x[:] = packable_list
        return packable_list
    if state_dicts.is_prng_key(x):
        return _key_parts(x, path)
    if isinstance(x, jax.Array | np.ndarray):
        return _in_chunks(_to_numpy(x, path))
    if isinstance(x, np.generic):
        _to_numpy(x, path)
        return x
    if type(x) is int and not -(2**63) <= x < 2**64:
        raise errors.UnserializableValueError(
            f"the integer {x} at {_path_text(*path)} does not fit into 64 bits; store it as a "
            "string."
        )
    if x is None or type(x) in _LEAF_TYPES:
        return x
    raise errors.UnserializableValueError(
        f"the value at {_path_text(*path)} is a {type(x).__name__}, which has no form as bytes; "
        "give arrays, numbers and strings in dicts, use to_bytes for trees of other types, and "
        "register_serialization_state for types of your own."
    )


def _key_parts(key: jax.Array, path: tuple[str, ...]) -> dict[str, Any]:
    impl = jax.random.key_impl(key)
    if not isinstance(impl, str):
        raise errors.UnserializableValueError(
            f"the PRNG key at {_path_text(*path)} is of the implementation {impl}, which has no "
            "name to be read back by; store jax.random.key_data(key)."
        )
    return {_PRNG_KEY: impl, "data": _to_numpy(jax.random.key_data(key), path)}


def _in_chunks(array: np.ndarray) -> np.ndarray | dict[str, Packable]:
    """Returns the array, or a dict of its parts if it is too large for one MessagePack object."""
    if array.nbytes <= serialization.MAX_CHUNK_SIZE:
        return array
    flat = array.reshape(-1)
    chunk_length = max(1, serialization.MAX_CHUNK_SIZE // array.itemsize)
    chunks = []
    for start in range(0, flat.size, chunk_length):
        chunks.append(flat[start : start + chunk_length])
    return {
        _CHUNKED: True,
        "shape": _numbered(array.shape),
        "chunks": _numbered(chunks),
    }


def _numbered(values: Sequence[T]) -> dict[str, T]:
    return {str(i): value for i, value in enumerate(values)}


def _encode_ext(x: complex | np.ndarray | np.generic) -> "msgpack.ExtType":
    import msgpack

    # NumPy's complex128 is also a complex number of Python.
    if not isinstance(x, np.ndarray | np.generic):
        return msgpack.ExtType(_COMPLEX, msgpack.packb((x.real, x.imag)))
    code = _NDARRAY if isinstance(x, np.ndarray) else _SCALAR
    return msgpack.ExtType(
        code, msgpack.packb((x.shape, x.dtype.name, x.tobytes()))
    )


def _parse_dtype(name: Unpacked) -> np.dtype:
    if not (isinstance(name, str) and _DTYPE.fullmatch(name)):
        raise ValueError(f"{name!r} is not the name of a dtype")
    try:
        dtype = _dtype_named(name)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"they hold an array of an unknown dtype, {name!r}"
        ) from error
    if (
        dtype.hasobject
        or dtype.names
        or dtype.type is np.void
        or not dtype.itemsize
    ):
        raise ValueError(
            f"they hold an array of the dtype {name!r}, which has no form as bytes"
        )
    return dtype


def _dtype_named(name: str) -> np.dtype:
    # NumPy names its dtypes of strings by their bits, and does not know these names itself.
    string_dtype = _STRING_DTYPE.fullmatch(name)
    if string_dtype is None:
        return jnp.dtype(name)
    kind, num_bits = string_dtype[1], int(string_dtype[2])
    if kind == "str":
        return np.dtype(f"<U{num_bits // 32}")
    return np.dtype(f"S{num_bits // 8}")


def _check_shape(
    value: Unpacked, dtype: np.dtype, num_elements: int
) -> tuple[int, ...]:
    """Returns the value if it is the shape of an array with so many elements, and raises if not."""
    if not (
        isinstance(value, list | tuple)
        and all(type(n) is int and n >= 0 for n in value)
    ):
        raise ValueError(f"{value!r} is not the shape of an array")
    if (
        not untrusted.is_possible_shape(value, dtype.itemsize)
        or math.prod(value) != num_elements
    ):
        raise ValueError(
            f"an array of the shape {list(value)} is not made of {num_elements} items"
        )
    return tuple(value)


def _decode_ext(
    code: int, data: bytes
) -> "complex | np.ndarray | np.generic | msgpack.ExtType":
    import msgpack

    if code not in (_NDARRAY, _COMPLEX, _SCALAR):
        return msgpack.ExtType(code, data)
    parts = msgpack.unpackb(data)
    if code == _COMPLEX:
        if not (
            isinstance(parts, list) and list(map(type, parts)) == [float, float]
        ):
            raise ValueError(f"{parts!r} is not a complex number")
        return complex(*parts)
    if not (
        isinstance(parts, list)
        and len(parts) == 3
        and isinstance(parts[2], bytes)
    ):
        raise ValueError("an array consists of a shape, a dtype and bytes")
    shape, dtype_name, buffer = parts
    dtype = _parse_dtype(dtype_name)
    array = np.frombuffer(buffer, dtype) if buffer else np.empty(0, dtype)
    array = array.reshape(_check_shape(shape, dtype, array.size))
    if code == _SCALAR:
        return array[()]
    return array


def _decode_parts(x: Unpacked) -> Unpacked:
    """Returns a tree in which large arrays and PRNG keys are made of the dicts of their parts."""
    if isinstance(x, list):
        return [_decode_parts(value) for value in x]
    if not isinstance(x, dict):
        return x
    if _CHUNKED in x:
        return _join_chunks(
            _in_order(x.get("shape")), _in_order(x.get("chunks"))
        )
    if _PRNG_KEY in x:
        return _decode_key(x[_PRNG_KEY], x.get("data"))
    return {key: _decode_parts(value) for key, value in x.items()}


def _in_order(numbered: Unpacked) -> list[Unpacked]:
    """Returns the values of the keys "0", "1" and so on, and raises if there are others."""
    if not isinstance(numbered, dict):
        raise ValueError("the parts of a large array are not numbered")
    values = []
    for i in range(len(numbered)):
        if str(i) not in numbered:
            raise ValueError("the parts of a large array are not numbered")
        values.append(numbered[str(i)])
    return values


def _join_chunks(shape: list[Unpacked], parts: list[Unpacked]) -> np.ndarray:
    chunks = [
        part
        for part in parts
        if isinstance(part, np.ndarray) and part.ndim == 1
    ]
    dtypes = {chunk.dtype for chunk in chunks}
    if len(chunks) < len(parts) or len(dtypes) != 1:
        raise ValueError(
            "the parts of a large array are not arrays of one dtype"
        )
    array = np.concatenate(chunks)
    return array.reshape(_check_shape(shape, array.dtype, array.size))


def _decode_key(impl: Unpacked, data: Unpacked) -> jax.Array:
    if not (
        isinstance(impl, str)
        and isinstance(data, np.ndarray)
        and data.dtype == np.uint32
    ):
        raise ValueError(
            "a PRNG key has the name of an implementation, and data of uint32"
        )
    try:
        return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    except TypeError as error:
        raise ValueError(str(error)) from error


def msgpack_serialize(pytree: PyTree, in_place: bool = False) -> bytes:
    """Returns the bytes of a state dict.

    Args:
        pytree: nested dicts and lists of arrays, PRNG keys, numbers, strings and None.
        in_place: writes converted arrays into `pytree`, so that device arrays are freed in turn.

    Raises UnserializableValueError if a value cannot be converted to bytes.

    >>> msgpack_restore(msgpack_serialize({"w": np.arange(3)}))
    {'w': array([0, 1, 2])}
    """
    import msgpack

    tree = _to_packable(pytree, (), in_place)
    return cast(
        bytes, msgpack.packb(tree, default=_encode_ext, strict_types=True)
    )


def msgpack_restore(encoded_pytree: bytes) -> PyTree:
    """Returns the state dict of `msgpack_serialize`'s bytes, with NumPy arrays, perhaps read-only.

    Raises DamagedBytesError if the bytes are not in the format of `msgpack_serialize`.
    """
    import msgpack

    size = memoryview(
        encoded_pytree
    ).nbytes  # a TypeError for what is not bytes
    try:
        unpacked = msgpack.unpackb(
            encoded_pytree, ext_hook=_decode_ext, strict_map_key=False
        )
        return _decode_parts(unpacked)
    # TypeError: a list as the key of a dict. The rest is for `msgpack`, which has an error for each
    # way in which bytes can end.
    except (
        ValueError,
        TypeError,
        RecursionError,
        msgpack.UnpackException,
    ) as error:
        raise errors.DamagedBytesError(
            f"the {size} bytes are not what msgpack_serialize writes: {error}. "
            "Look whether the file was written and read as a whole, in binary mode."
        ) from error


def to_bytes(target: PyTree) -> bytes:
    """Returns the bytes of a tree's state dict, readable by `from_bytes` and Flax.

    Raises:
        StateDictKeyError: if keys of a dict are equal as strings.
        UnserializableValueError: if a leaf cannot be converted to bytes.
    """
    return msgpack_serialize(state_dicts.to_state_dict(target), in_place=False)


def from_bytes(target: PyTree, encoded_bytes: bytes) -> PyTree:
    """Returns a tree like `target` with the leaves written by `to_bytes`, of Weft or Flax.

    Args:
        target: a tree of the written structure; None returns the state dict.

    Raises:
        DamagedBytesError: if the bytes are not in the format of `to_bytes`.
        StateDictMismatchError: if the structures differ; the message names the path.

    >>> from_bytes((0, 0.0), to_bytes((1, 2.0)))
    (1, 2.0)
    """
    return state_dicts.from_state_dict(target, msgpack_restore(encoded_bytes))
