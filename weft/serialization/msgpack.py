"""State dicts as bytes, and back.

The bytes are MessagePack in Flax's format: arrays are extension type 1 with shape, dtype name and
bytes in C order, complex numbers type 2, NumPy scalars type 3. An array of more than
`MAX_CHUNK_SIZE` bytes is a dict of parts. Typed PRNG keys, which Flax refuses, are a dict of
implementation name and data.
"""

import math
import re
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from weft import errors, serialization
from weft.serialization import state_dicts, untrusted

if TYPE_CHECKING:
    import msgpack  # otherwise where it is used: few programs write or read bytes

MAX_CHUNK_SIZE = 2**30
"""Bytes of an array that are written at once; MessagePack ends at 2**32."""

_CHUNKED = "__msgpack_chunked_array__"
_PRNG_KEY = "__msgpack_prng_key__"
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types
_DTYPE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}(\[[0-9A-Za-z]{1,8}\])?")
_STRING_DTYPE = re.compile(r"(str|bytes)([0-9]+)")


def _path_text(*path: str) -> str:
    return repr("/".join((".", *path)))


def _to_numpy(x: object, path: tuple[str, ...]) -> np.ndarray:
    try:
        array = np.asarray(x)
    except (TypeError, RuntimeError) as error:
        raise errors.UnserializableValueError(
            f"the array at {_path_text(*path)} has no values to write: {error}"
        ) from error
    dtype = array.dtype
    if dtype.hasobject or dtype.names or dtype.type is np.void or isinstance(x, np.ma.MaskedArray):
        raise errors.UnserializableValueError(
            f"the array at {_path_text(*path)} is a {type(x).__name__} of dtype {dtype}, which "
            "has no form as bytes here; give arrays of numbers, of booleans or of strings."
        )
    return np.asarray(array, dtype.newbyteorder("="))


def _to_msgpack(x: Any, path: tuple[str, ...], in_place: bool) -> Any:
    """Returns a tree of NumPy arrays, each small enough for one MessagePack object."""
    if type(x) is dict:
        made = x if in_place else {}
        for key, value in x.items():
            if key is not None and type(key) not in (str, bytes, int, float, bool):
                raise errors.UnserializableValueError(
                    f"the key {key!r} of the dict at {_path_text(*path)} is a "
                    f"{type(key).__name__}; use to_bytes or to_state_dict, which make strings of "
                    "keys."
                )
            made[key] = _to_msgpack(value, (*path, str(key)), in_place)
        return made
    if type(x) is list:
        entries = [_to_msgpack(value, (*path, str(i)), in_place) for i, value in enumerate(x)]
        if in_place:
            x[:] = entries
        return entries
    if state_dicts.is_prng_key(x):
        return _key_parts(x, path)
    if isinstance(x, jax.Array | np.ndarray):
        return _chunked(_to_numpy(x, path))
    if isinstance(x, np.generic):
        _to_numpy(x, path)
        return x
    if type(x) is int and not -(2**63) <= x < 2**64:
        raise errors.UnserializableValueError(
            f"the integer {x} at {_path_text(*path)} does not fit into 64 bits; store it as a "
            "string."
        )
    if x is None or type(x) in (str, bytes, bytearray, memoryview, int, float, bool, complex):
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


def _chunked(array: np.ndarray) -> Any:
    if array.nbytes <= serialization.MAX_CHUNK_SIZE:
        return array
    flat = array.reshape(-1)
    step = max(1, serialization.MAX_CHUNK_SIZE // array.itemsize)
    chunks = [flat[at : at + step] for at in range(0, flat.size, step)]
    return {
        _CHUNKED: True,
        "shape": {str(i): size for i, size in enumerate(array.shape)},
        "chunks": {str(i): chunk for i, chunk in enumerate(chunks)},
    }


def _encode_ext(x: Any) -> "msgpack.ExtType":
    import msgpack

    if isinstance(x, complex) and not isinstance(x, np.generic):
        return msgpack.ExtType(_COMPLEX, msgpack.packb((x.real, x.imag)))
    parts = (x.shape, x.dtype.name, x.tobytes())
    return msgpack.ExtType(_NDARRAY if isinstance(x, np.ndarray) else _SCALAR, msgpack.packb(parts))


def _parse_dtype(name: object) -> np.dtype:
    if not (isinstance(name, str) and _DTYPE.fullmatch(name)):
        raise ValueError(f"{name!r} is not the name of a dtype")
    # NumPy names its dtypes of strings by their bits, and does not know these names itself.
    kind = _STRING_DTYPE.fullmatch(name)
    try:
        if kind is not None:
            dtype = np.dtype(
                f"<U{int(kind[2]) // 32}" if kind[1] == "str" else f"S{int(kind[2]) // 8}"
            )
        else:
            dtype = jnp.dtype(name)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"they hold an array of an unknown dtype, {name!r}") from error
    if dtype.hasobject or dtype.names or dtype.type is np.void or not dtype.itemsize:
        raise ValueError(f"they hold an array of the dtype {name!r}, which has no form as bytes")
    return dtype


def _shape_of(value: object, dtype: np.dtype, num_elements: int) -> tuple[int, ...]:
    if not (isinstance(value, list | tuple) and all(type(n) is int and n >= 0 for n in value)):
        raise ValueError(f"{value!r} is not the shape of an array")
    if not untrusted.is_possible_shape(value, dtype.itemsize) or math.prod(value) != num_elements:
        raise ValueError(f"an array of the shape {list(value)} is not made of {num_elements} items")
    return tuple(value)


def _decode_ext(code: int, data: bytes) -> Any:
    import msgpack

    if code not in (_NDARRAY, _COMPLEX, _SCALAR):
        return msgpack.ExtType(code, data)
    parts = msgpack.unpackb(data)
    if code == _COMPLEX:
        if not (isinstance(parts, list) and [type(x) for x in parts] == [float, float]):
            raise ValueError(f"{parts!r} is not a complex number")
        return complex(*parts)
    if not (isinstance(parts, list) and len(parts) == 3 and isinstance(parts[2], bytes)):
        raise ValueError("an array consists of a shape, a dtype and bytes")
    shape, name, buffer = parts
    dtype = _parse_dtype(name)
    array = np.frombuffer(buffer, dtype) if buffer else np.empty(0, dtype)
    array = array.reshape(_shape_of(shape, dtype, array.size))
    return array if code == _NDARRAY else array[()]


def _joined(x: object) -> Any:
    if isinstance(x, list):
        return [_joined(value) for value in x]
    if not isinstance(x, dict):
        return x
    if _CHUNKED in x:
        return _joined_chunks(_numbered(x.get("shape")), _numbered(x.get("chunks")))
    if _PRNG_KEY in x:
        return _decode_key(x[_PRNG_KEY], x.get("data"))
    return {key: _joined(value) for key, value in x.items()}


def _numbered(x: object) -> list[Any]:
    if not (isinstance(x, dict) and all(str(i) in x for i in range(len(x)))):
        raise ValueError("the parts of a large array are not numbered")
    return [x[str(i)] for i in range(len(x))]


def _joined_chunks(shape: list[Any], chunks: list[Any]) -> np.ndarray:
    fits = chunks and all(isinstance(c, np.ndarray) and c.ndim == 1 for c in chunks)
    if not fits or len({chunk.dtype for chunk in chunks}) > 1:
        raise ValueError("the parts of a large array are not arrays of one dtype")
    size = sum(chunk.size for chunk in chunks)
    return np.concatenate(chunks).reshape(_shape_of(shape, chunks[0].dtype, size))


def _decode_key(impl: object, data: object) -> jax.Array:
    if not (isinstance(impl, str) and isinstance(data, np.ndarray) and data.dtype == np.uint32):
        raise ValueError("a PRNG key has the name of an implementation, and data of uint32")
    try:
        return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    except TypeError as error:
        raise ValueError(str(error)) from error


def msgpack_serialize(pytree: object, in_place: bool = False) -> bytes:
    """Returns the bytes of a state dict.

    Args:
        pytree: nested dicts and lists of arrays, PRNG keys, numbers, strings and None.
        in_place: writes converted arrays into `pytree`, so that device arrays are freed in turn.

    Raises UnserializableValueError if a value cannot be converted to bytes.

    >>> msgpack_restore(msgpack_serialize({"w": np.arange(3)}))
    {'w': array([0, 1, 2])}
    """
    import msgpack

    tree = _to_msgpack(pytree, (), in_place)
    return cast(bytes, msgpack.packb(tree, default=_encode_ext, strict_types=True))


def msgpack_restore(encoded_pytree: bytes) -> Any:
    """Returns the state dict of `msgpack_serialize`'s bytes, with NumPy arrays, perhaps read-only.

    Raises DamagedBytesError if the bytes are not in the format of `msgpack_serialize`.
    """
    import msgpack

    size = memoryview(encoded_pytree).nbytes  # a TypeError for what is not bytes
    try:
        return _joined(msgpack.unpackb(encoded_pytree, ext_hook=_decode_ext, strict_map_key=False))
    # TypeError: a list as the key of a dict. The rest is for `msgpack`, which has an error for each
    # way in which bytes can end.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise errors.DamagedBytesError(
            f"the {size} bytes are not what msgpack_serialize writes: {error}. "
            "Look whether the file was written and read as a whole, in binary mode."
        ) from error


def to_bytes(target: object) -> bytes:
    """Returns the bytes of a tree's state dict, readable by `from_bytes` and Flax.

    Raises:
        StateDictKeyError: if keys of a dict are equal as strings.
        UnserializableValueError: if a leaf cannot be converted to bytes.
    """
    return msgpack_serialize(state_dicts.to_state_dict(target), in_place=False)


def from_bytes(target: object, encoded_bytes: bytes) -> Any:
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
