"""Reader of a checkpoint's array files that checks each file while it reads it.

    arrays/decoder-emb-weight/.zarray    shape, dtype, and the shape of a chunk
    arrays/decoder-emb-weight/0.0        the first chunk: the bytes of its elements, row by row
    arrays/decoder-emb-weight/0.1        the chunk to the right of it

The format is zarr's, written by Orbax without compression. A process reads only the chunks that
overlap its devices' shards, array by array, so a host never holds more than those shards and the
few chunks being read. Each file is read once, for both its values and its digest.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.serialization.foreign import parse_json
from weft.trainer.checkpoint_index import is_key_dtype, key_implementation
from weft.trainer.checkpoint_manifest import Manifest

_THREADS = 4
_ALIGNMENT = 64  # JAX uses memory at such an address in place and copies any other


class ArrayFileError(Exception):
    """Damage of a file; the message names the file and the fault."""


@dataclasses.dataclass(frozen=True)
class ArrayFiles:
    """Location of the arrays of a checkpoint.

    Attributes:
        within: the directory of the arrays, relative to `ckpt_dir`.
        manifest: the digests; None to read unchecked.
    """

    ckpt_dir: str
    within: str
    manifest: Manifest | None

    def read(self, targets: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], list[str]]:
        """Reads arrays, several at a time.

        Args:
            targets: by name, NumPy arrays or objects with shape, dtype and sharding.

        Returns:
            The undamaged arrays by name; the paths of the files that were read; and one line for
            each damaged array.
        """
        arrays, seen, faults = {}, set(), []

        def read_one(name: str) -> None:
            try:
                arrays[name] = _Reader(self, name, seen).read(targets[name])
            except ArrayFileError as error:
                faults.append(str(error))

        largest_first = sorted(targets, key=lambda name: -math.prod(targets[name].shape))
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(read_one, largest_first):
                pass
        return arrays, seen, sorted(faults)


class _Reader:
    def __init__(self, files: ArrayFiles, name: str, seen: set[str]):
        self._files, self._name, self._seen = files, name, seen
        header = bytearray(self._size(".zarray"))
        self._fill(".zarray", memoryview(header))
        try:
            content = parse_json(header)
            self._chunk = tuple(map(int, content["chunks"]))
            self._shape = tuple(map(int, content["shape"]))
            self._dtype = _stored_dtype(content["dtype"])
            plain = (content["compressor"], content["filters"], content["order"])
            self._separator = content.get("dimension_separator", ".")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise self._fault(".zarray", f"does not describe an array ({error})") from error
        chunks_fit = len(self._chunk) == len(self._shape) and min(self._chunk, default=1) > 0
        if plain != (None, None, "C") or not chunks_fit or self._dtype.hasobject:
            raise self._fault(".zarray", "describes an array that was not written by Weft")

    def read(self, target: Any) -> Any:
        """Returns the array with the dtype and layout of the target."""
        impl, shape, dtype = None, tuple(target.shape), target.dtype
        if is_key_dtype(dtype):
            impl = key_implementation(dtype)
            data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
            shape, dtype = shape + data.shape, data.dtype
        if shape != self._shape:
            raise self._fault(".zarray", f"has the shape {self._shape}, the index {shape}")
        if isinstance(target, np.ndarray | np.generic):
            return self._region(tuple(slice(0, n) for n in shape), dtype)
        regions: dict[Any, np.ndarray] = {}
        parts = []
        for device, index in target.sharding.addressable_devices_indices_map(shape).items():
            region = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
            key = tuple((s.start, s.stop) for s in region)
            if key not in regions:
                regions[key] = self._region(region, dtype)
            parts.append(jax.device_put(regions[key], _one(device, target.sharding)))
        sharding = target.sharding
        array = jax.make_array_from_single_device_arrays(shape, sharding, parts)
        return array if impl is None else jax.random.wrap_key_data(array, impl=impl)

    def _region(self, region: tuple[slice, ...], dtype: Any) -> np.ndarray:
        """Returns the elements of a region of the array, assembled from its chunks."""
        whole = _aligned(tuple(s.stop - s.start for s in region), self._dtype)
        for at, within, chunk_name in self._chunks(region):
            place = whole[at]
            if place.shape == self._chunk and place.flags.c_contiguous:
                self._fill(chunk_name, _bytes_of(place))
            else:
                self._check_size(chunk_name)
                chunk = _aligned(self._chunk, self._dtype)
                self._fill(chunk_name, _bytes_of(chunk))
                whole[at] = chunk[within]
        return whole if whole.dtype == dtype else whole.astype(dtype)

    def _chunks(self, region: tuple[slice, ...]) -> Iterator[tuple[Any, Any, str]]:
        """Yields for each chunk its place in the region, its part of the region, and its name."""
        numbers = [
            range(s.start // c, -(-s.stop // c)) for s, c in zip(region, self._chunk, strict=True)
        ]
        for number in itertools.product(*numbers):
            at, within = [], []
            for i, c, s in zip(number, self._chunk, region, strict=True):
                first, last = max(s.start, i * c), min(s.stop, (i + 1) * c)
                at.append(slice(first - s.start, last - s.start))
                within.append(slice(first - i * c, last - i * c))
            name = self._separator.join(map(str, number)) or "0"
            yield (*at, ...), (*within, ...), name

    def _path(self, name: str) -> str:
        return f"{self._files.within}/{self._name}/{name}"

    def _check_size(self, name: str) -> None:
        """Checks the size of a chunk's file before memory is allocated for it."""
        size, expected = self._size(name), math.prod(self._chunk) * self._dtype.itemsize
        if size != expected:
            raise self._fault(name, f"has {size} bytes instead of {expected}")

    def _size(self, name: str) -> int:
        try:
            return os.path.getsize(os.path.join(self._files.ckpt_dir, self._path(name)))
        except OSError:
            self._seen.add(self._path(name))
            raise self._fault(name, "is missing") from None

    def _fill(self, name: str, into: memoryview) -> None:
        path, manifest = self._path(name), self._files.manifest
        self._seen.add(path)
        if manifest is not None:
            fault = manifest.damage_of(path, into)
        else:
            fault = _read_unchecked(os.path.join(self._files.ckpt_dir, path), into)
        if fault is not None:
            raise self._fault(name, fault)

    def _fault(self, name: str, fault: str) -> ArrayFileError:
        return ArrayFileError(f"{self._path(name)}: {fault}")


def _read_unchecked(path: str, into: memoryview) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            read = at = file.readinto(into) if len(into) else 0
            while read and at < len(into):
                read = file.readinto(into[at:])
                at += read
    except OSError as error:
        return f"cannot be read ({error})"
    return None if at == len(into) else f"has {at} bytes instead of {len(into)}"


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _stored_dtype(name: str) -> np.dtype:
    """Returns the dtype of a header: "<f4", or a name such as "bfloat16" that NumPy lacks."""
    return np.dtype(name) if name[0] in "<>|=" else jnp.dtype(name)


def _one(device: Any, sharding: Any) -> Any:
    return jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
