"""State dicts as bytes, and back.

The bytes are MessagePack, in the form that Flax writes and reads: arrays are extension type 1 with
shape, name of dtype and bytes in C order, complex numbers type 2, NumPy scalars type 3. An array of
more than `MAX_CHUNK_SIZE` bytes is a dict of parts. Typed PRNG keys, which Flax refuses, are a dict
of the name of their implementation and their data.
"""

from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from weft.errors import DamagedBytesError, UnserializableValueError
from weft.serialization.state_dicts import from_state_dict, is_prng_key, to_state_dict

if TYPE_CHECKING:
    import msgpack  # otherwise where it is used: few programs write or read bytes

MAX_CHUNK_SIZE = 2**30  # bytes; MessagePack ends at 2**32

_CHUNKED = "__msgpack_chunked_array__"
_PRNG_KEY = "__msgpack_prng_key__"
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types


def _name(*path: str) -> str:
    return repr("/".join((".", *path)))


def _to_numpy(x: Any, path: tuple[str, ...]) -> np.ndarray:
    try:
        array = np.asarray(x)
    except (TypeError, RuntimeError) as error:
        raise UnserializableValueError(
            f"the array at {_name(*path)} has no values to write: {error}"
        ) from error
    dtype = array.dtype
    if dtype.hasobject or dtype.names or dtype.type is np.void or isinstance(x, np.ma.MaskedArray):
        raise UnserializableValueError(
            f"the array at {_name(*path)} is a {type(x).__name__} of dtype {dtype}, which has no "
            "form as bytes here; give arrays of numbers, of booleans or of strings."
        )
    return np.asarray(array, dtype.newbyteorder("="))


def _writable(x: Any, path: tuple[str, ...], in_place: bool) -> Any:
    """A tree in which every array is a NumPy array that fits into one piece of MessagePack."""
    if type(x) is dict:
        made = x if in_place else {}
        for key, value in x.items():
            if key is not None and type(key) not in (str, bytes, int, float, bool):
                raise UnserializableValueError(
                    f"the key {key!r} of the dict at {_name(*path)} is a {type(key).__name__}; "
                    "use to_bytes or to_state_dict, which make strings of keys."
                )
            made[key] = _writable(value, (*path, str(key)), in_place)
        return made
    if type(x) is list:
        entries = [_writable(value, (*path, str(i)), in_place) for i, value in enumerate(x)]
        if in_place:
            x[:] = entries
        return entries
    if is_prng_key(x):
        return _key_parts(x, path)
    if isinstance(x, jax.Array | np.ndarray):
        return _chunked(_to_numpy(x, path))
    if isinstance(x, np.generic):
        _to_numpy(x, path)
        return x
    if type(x) is int and not -(2**63) <= x < 2**64:
        raise UnserializableValueError(
            f"the integer {x} at {_name(*path)} does not fit into 64 bits; store it as a string."
        )
    if x is None or type(x) in (str, bytes, bytearray, memoryview, int, float, bool, complex):
        return x
    raise UnserializableValueError(
        f"the value at {_name(*path)} is a {type(x).__name__}, which has no form as bytes; give "
        "arrays, numbers and strings in dicts, use to_bytes for trees of other types, and "
        "register_serialization_state for types of your own."
    )


def _key_parts(key: jax.Array, path: tuple[str, ...]) -> dict[str, Any]:
    impl = jax.random.key_impl(key)
    if not isinstance(impl, str):
        raise UnserializableValueError(
            f"the PRNG key at {_name(*path)} is of the implementation {impl}, which has no name to "
            "be read back by; store jax.random.key_data(key)."
        )
    return {_PRNG_KEY: impl, "data": _to_numpy(jax.random.key_data(key), path)}


def _chunked(array: np.ndarray) -> Any:
    if array.nbytes <= MAX_CHUNK_SIZE:
        return array
    flat = array.reshape(-1)
    step = max(1, MAX_CHUNK_SIZE // array.itemsize)
    chunks = [flat[at : at + step] for at in range(0, flat.size, step)]
    return {
        _CHUNKED: True,
        "shape": {str(i): size for i, size in enumerate(array.shape)},
        "chunks": {str(i): chunk for i, chunk in enumerate(chunks)},
    }


def _ext_of(x: Any) -> "msgpack.ExtType":
    import msgpack

    if isinstance(x, complex) and not isinstance(x, np.generic):
        return msgpack.ExtType(_COMPLEX, msgpack.packb((x.real, x.imag)))
    parts = (x.shape, x.dtype.name, x.tobytes())
    return msgpack.ExtType(_NDARRAY if isinstance(x, np.ndarray) else _SCALAR, msgpack.packb(parts))


def _dtype_named(name: str) -> np.dtype:
    # NumPy names its dtypes of strings by their bits, and does not know these names itself.
    if name.startswith("str") and name != "str":
        return np.dtype(f"<U{int(name[3:]) // 32}")
    if name.startswith("bytes") and name != "bytes":
        return np.dtype(f"S{int(name[5:]) // 8}")
    try:
        return jnp.dtype(name)
    except TypeError as error:
        raise DamagedBytesError(f"they hold an array of an unknown dtype, {name!r}") from error


def _value_of(code: int, data: bytes) -> Any:
    import msgpack

    if code == _COMPLEX:
        return complex(*msgpack.unpackb(data))
    if code not in (_NDARRAY, _SCALAR):
        return msgpack.ExtType(code, data)
    shape, name, buffer = msgpack.unpackb(data)
    dtype = _dtype_named(name)
    array = np.frombuffer(buffer, dtype) if buffer else np.empty(0, dtype)
    array = array.reshape(shape)
    return array if code == _NDARRAY else array[()]


def _joined(x: Any) -> Any:
    """Undoes what `_writable` did to big arrays and PRNG keys."""
    if isinstance(x, list):
        return [_joined(value) for value in x]
    if not isinstance(x, dict):
        return x
    if _CHUNKED in x:
        shape = tuple(x["shape"][str(i)] for i in range(len(x["shape"])))
        chunks = [x["chunks"][str(i)] for i in range(len(x["chunks"]))]
        return np.concatenate(chunks).reshape(shape)
    if _PRNG_KEY in x:
        return jax.random.wrap_key_data(jnp.asarray(x["data"]), impl=x[_PRNG_KEY])
    return {key: _joined(value) for key, value in x.items()}


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    """The bytes of a state dict.

    Args:
        pytree: nested dicts and lists of arrays, PRNG keys, numbers, strings and None.
        in_place: writes what is made of the arrays (NumPy arrays, and parts of big ones) into the
          dicts and lists of `pytree` itself, so that arrays on devices can be freed one by one.

    Raises:
        UnserializableValueError: if a value has no form as bytes.

    Example:
        >>> msgpack_restore(msgpack_serialize({"w": np.arange(3)}))
        {'w': array([0, 1, 2])}
    """
    import msgpack

    tree = _writable(pytree, (), in_place)
    return cast(bytes, msgpack.packb(tree, default=_ext_of, strict_types=True))


def msgpack_restore(encoded_pytree: bytes) -> Any:
    """What `msgpack_serialize` was given; arrays are NumPy arrays, which may be read-only.

    Args:
        encoded_pytree: the bytes.

    Raises:
        DamagedBytesError: if they are not as `msgpack_serialize` writes them.
    """
    import msgpack

    try:
        return _joined(msgpack.unpackb(encoded_pytree, ext_hook=_value_of, strict_map_key=False))
    except (ValueError, KeyError) as error:
        raise DamagedBytesError(
            f"the {len(encoded_pytree)} bytes are not what msgpack_serialize writes: {error}. "
            "Look whether the file was written and read as a whole, in binary mode."
        ) from error


def to_bytes(target: Any) -> bytes:
    """The bytes of a tree's state dict, which `from_bytes` and Flax read.

    Args:
        target: a tree as `to_state_dict` takes it.

    Raises:
        StateDictKeyError: if keys of a dict are equal as strings.
        UnserializableValueError: if a leaf has no form as bytes.
    """
    return msgpack_serialize(to_state_dict(target), in_place=False)


def from_bytes(target: Any, encoded_bytes: bytes) -> Any:
    """A tree like `target` with the leaves that `to_bytes`, of Weft or Flax, wrote.

    Args:
        target: a tree of the structure that was written; None takes the state dict as it is.
        encoded_bytes: the bytes.

    Raises:
        DamagedBytesError: if the bytes are not as `to_bytes` writes them.
        StateDictMismatchError: if the structures differ; the message names the path.

    Example:
        >>> from_bytes((0, 0.0), to_bytes((1, 2.0)))
        (1, 2.0)
    """
    return from_state_dict(target, msgpack_restore(encoded_bytes))
