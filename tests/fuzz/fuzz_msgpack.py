"""Bytes of MessagePack: `msgpack_restore` returns a tree, or raises DamagedBytesError."""

from typing import Any

import jax
import msgpack
import numpy as np

from tests.fuzz.readers import any_of, read, source_of
from weft import serialization
from weft.errors import DamagedBytesError
from weft.serialization import msgpack_restore, msgpack_serialize

_TREES = [
    {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [1, 2.5, "x", None, True, b"y"]},
    {"key": jax.random.key(0), "z": 1j, "s": np.array(["ab", "c"]), "e": np.zeros((0, 3))},
    {
        "scalar": np.int8(3),
        "half": np.ones(2, jax.numpy.bfloat16),
        "day": np.array(["2020"], "M8[D]"),
    },
]


def _chunked() -> bytes:
    before, serialization.MAX_CHUNK_SIZE = serialization.MAX_CHUNK_SIZE, 8
    try:
        return msgpack_serialize({"large": np.arange(6.0).reshape(2, 3)})
    finally:
        serialization.MAX_CHUNK_SIZE = before


VALID = [*map(msgpack_serialize, _TREES), _chunked()]


def _array(shape: object, dtype: object, data: object, code: int = 1) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb((shape, dtype, data))))


_SHAPES = [[0, 2**62], [2**62, 0], [2**63], [-1], [1.5], "2", None, [[2]], [0] * 70, {}, [True]]
_DTYPES = [
    "object",
    "O",
    "V8",
    "f4,f4",
    "str",
    "str0",
    "str99999999999",
    "bytes7",
    "x",
    "",
    5,
    None,
]
_DTYPES += ["datetime64[", "float32\0", "f4" * 99, "i4, (2,2)f8", "str-1", "key<fry>"]
CRAFTED = [
    b"",
    b"\x91" * 1_200,
    b"\x81\xa1a" * 1_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    msgpack.packb({"a": 1}) * 2,
    b"\x81\x90\x01",  # a list as a key
    *(_array(shape, "float32", b"") for shape in _SHAPES),
    *(_array([2], dtype, bytes(16)) for dtype in _DTYPES),
    *(_array([2], "float32", data) for data in (b"1", "text", None, [])),
    *(_array([0], "float32", b"", code) for code in (2, 3, 4)),
    b"\xd6\xff\0\0\0\0",  # a time
    *map(msgpack.packb, ({"__msgpack_chunked_array__": x} for x in (True, 1, None))),
    msgpack.packb({"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}),
    msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": {"0": 1}}),
    msgpack.packb({"__msgpack_chunked_array__": True, "shape": [1], "chunks": [1]}),
    *map(msgpack.packb, ({"__msgpack_prng_key__": x} for x in ("rbg", "x", 1, [], None))),
    msgpack.packb({"__msgpack_prng_key__": "rbg", "data": msgpack.ExtType(1, VALID[0])}),
]
CASES = any_of(VALID, CRAFTED)
SHORT = 200


def _arrays(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, dict | list):
        values = tree.values() if isinstance(tree, dict) else tree
        return [array for value in values for array in _arrays(value)]
    return [tree] if isinstance(tree, np.ndarray) else []


def check(case: bytes) -> None:
    returned, tree = read(lambda: msgpack_restore(case), DamagedBytesError)
    if returned:
        assert sum(len(x.tobytes()) for x in _arrays(tree)) <= len(case)
    assert returned or case not in VALID


def source(case: bytes) -> str:
    return source_of("fuzz_msgpack", case)
