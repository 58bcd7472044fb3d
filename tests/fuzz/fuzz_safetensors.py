"""Files of safetensors and their indices: read, or refused with an error of weights."""

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np

from tests.fuzz.readers import ODD, damaged, damaged_json, read, source_of, untouched
from weft.errors import WeightsMismatchError, WeightsReadError
from weft.serialization import load_safetensors

_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a.w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "a.b": {"dtype": "I8", "shape": [0, 4], "data_offsets": [24, 24]},
    "c": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}
_INDEX = {
    "metadata": {"total_size": 26},
    "weight_map": dict.fromkeys(["a.w", "a.b", "c"], "m.safetensors"),
}


def _file(header: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + bytes(26)


def _with_entry(**entry: object) -> bytes:
    base = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return _file(json.dumps({"a": base | entry}).encode())


VALID = _file(json.dumps(_HEADER).encode())
CRAFTED = [
    b"",
    VALID[:8],
    _file(b"[" * 1_500),
    _file(b"{}", 2**63),
    _file(b"{}", 2**40),
    *(_with_entry(shape=shape) for shape in ([0, 2**62], [2**62, 0], [2**63], [2**62, 4], *ODD)),
    *(_with_entry(dtype=dtype) for dtype in ("F8_E4M3", "O", "X", "", *ODD)),
    *(_with_entry(data_offsets=pair) for pair in ([0, 25], [24, 0], [0, 2**62], [0], *ODD)),
    _with_entry(shape=[0, 2**62], data_offsets=[0, 0]),
    _with_entry(shape=[2**61, 0], data_offsets=[0, 0]),
]
_INDICES = [b"", b"[" * 1_500, b'{"weight_map": ' * 1_500, b"\xff\xfe{}", b"9" * 5_000]

_FILES = st.one_of(
    st.sampled_from([VALID, *CRAFTED]), damaged([VALID]), damaged_json([_HEADER]).map(_file)
)
_INDEX_TEXTS = st.one_of(
    st.sampled_from(_INDICES), damaged_json([_INDEX]), damaged([json.dumps(_INDEX).encode()])
)
# The file, and the index that leads to it if there is one.
CASES = st.tuples(_FILES, st.none()) | st.tuples(st.sampled_from([VALID, *CRAFTED]), _INDEX_TEXTS)
SHORT = 50


def check(case: tuple[bytes, bytes | None]) -> None:
    file, index = case
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "m.safetensors").write_bytes(file)
        os.mkfifo(folder / "x")
        os.mkfifo(folder / "model.safetensors")
        path = folder / "m.safetensors"
        if index is not None:
            path = folder / "m.safetensors.index.json"
            path.write_bytes(index)
        with untouched(folder):
            returned, tree = read(
                lambda: load_safetensors(path), (WeightsReadError, WeightsMismatchError)
            )
    if returned:
        assert sum(np.asarray(x).nbytes for x in _leaves(tree)) <= 8 * len(file)


def _leaves(tree: Any) -> list[Any]:
    return (
        [x for value in tree.values() for x in _leaves(value)] if isinstance(tree, dict) else [tree]
    )


def source(case: tuple[bytes, bytes | None]) -> str:
    return source_of("fuzz_safetensors", case)
