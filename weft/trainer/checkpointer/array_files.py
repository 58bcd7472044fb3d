"""Files with the arrays of a checkpoint: where each value is, and how arrays are read from them.

Orbax writes arrays in the zarr format, without compression, and all values of a process into a few
files, with a tree that says where each value is (OCDBT, of the TensorStore library):

    arrays/manifest.ocdbt                     the root of the tree
    arrays/d/96c88824c0aa519694090965c43eef3e
    arrays/ocdbt.process_0/d/b4549df08824c3e70ff3f6e50743a23c

    decoder-emb-weight/.zarray    shape, dtype, and the shape of a chunk
    decoder-emb-weight/0.0        the first chunk: the bytes of its elements, row by row
    decoder-emb-weight/0.1        the chunk to the right of it

Checkpoints of Weft 0.2 have a file of this name for each value instead.

A process reads only the chunks that overlap its devices' shards, array by array, so a host never
holds more than those shards and the few chunks being read. Each chunk is read once, for all devices
of the process and for both its values and its digest.
"""

import dataclasses
import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft._lazy import import_extra
from weft.errors import FileRefusedError
from weft.serialization.directory import Directory
from weft.serialization.untrusted import (
    MAX_JSON_BYTES,
    check_json,
    parse_json,
)
from weft.trainer.checkpointer import index as index_lib
from weft.trainer.checkpointer import retries
from weft.trainer.checkpointer.dirs import list_files
from weft.trainer.checkpointer.manifest import (
    Block,
    Manifest,
    find_file_damage,
)

Array = jax.Array | np.ndarray
Target = jax.ShapeDtypeStruct | np.ndarray | np.generic
"""What to read an array as: its shape, dtype, and sharding unless it is one of NumPy."""

_THREADS = 4
_MAX_HEADER_BYTES = 2**16
# That of a zarr array, also of one that Weft has not written.
_HEADER_FORM = {
    "chunks": [int],
    "shape": [int],
    "dtype": str,
    "compressor": (None, dict),
    "filters": (None, list),
    "order": str,
}
_ALIGNMENT = (
    64  # JAX uses memory at such an address in place and copies any other
)
TREE = "manifest.ocdbt"
"""File with the root of a tree."""
# Names that Orbax gives to files, so that no tree leads to others: "value:ocdbt.process_0/:d/…:0:4"
_LOCATION = re.compile(
    r"(value|btreenode):(ocdbt\.process_\d+/)?:(d/[0-9a-f]{32}):(\d+):(\d+)"
)


# The first element and the end of a region, along each axis.
_Region = tuple[tuple[int, int], ...]


class ArrayFileError(Exception):
    """Damage of a file; the message names the file and the fault."""


class Value(NamedTuple):
    """Place of a header or of a chunk.

    Attributes:
        path: of its file, relative to the directory of the checkpoint.
        content: its bytes, if the tree holds them itself.
    """

    path: str
    offset: int
    size: int
    content: bytes | None = None


def process_folder() -> str:
    """Returns the name of the folder to which Orbax writes the values of this process."""
    return f"ocdbt.process_{jax.process_index()}"


def read_tree(ckpt_dir: str, folder: str) -> dict[str, Value]:
    """Returns the values below a folder of a checkpoint, as its tree has them, by name.

    Raises ArrayFileError if the tree cannot be read.
    """
    tensorstore: Any = import_extra(
        "tensorstore", "train", needed_by="a checkpoint"
    )
    values: dict[str, Value] = {}
    try:
        path = os.path.join(os.path.abspath(ckpt_dir), folder, "")
        store = tensorstore.KvStore.open(
            {"driver": "file", "path": path}
        ).result()
        dump = functools.partial(tensorstore.ocdbt.dump, store)
        root = dump().result()["versions"][-1]["root"]
        pending_nodes = [(b"", root["location"])]
        while pending_nodes:
            prefix, location = pending_nodes.pop()
            _parse_location(folder, location)
            for entry in dump(location).result()["entries"]:
                key = prefix + entry["key"]
                if "location" in entry:
                    child_prefix = prefix + entry["subtree_common_prefix"]
                    pending_nodes.append((child_prefix, entry["location"]))
                elif "inline_value" in entry:
                    content = entry["inline_value"]
                    values[key.decode()] = Value("", 0, len(content), content)
                else:
                    values[key.decode()] = _parse_location(
                        folder, entry["indirect_value"]
                    )
    except (ValueError, LookupError, TypeError) as error:
        text = str(error).partition(" [")[0]
        raise ArrayFileError(
            f"{folder}/{TREE}: does not lead to the arrays ({text})"
        ) from error
    return values


def _parse_location(folder: str, text: str) -> Value:
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a place in a file of Orbax")
    _, subfolder, name, offset, size = match.groups()
    # One string for all values of a file: there are some 400,000 of 4,096 processes.
    path = sys.intern(f"{folder}/{subfolder or ''}{name}")
    return Value(path, int(offset), int(size))


def block_sizes(
    values: Mapping[str, Value], ckpt_dir: str
) -> dict[str, list[int]]:
    """Returns by path how files are to be cut into blocks, so that each value is a block."""
    values_of_file: dict[str, list[Value]] = {}
    for value in values.values():
        if value.content is None:
            values_of_file.setdefault(value.path, []).append(value)
    sizes: dict[str, list[int]] = {}
    for path, file_values in values_of_file.items():
        end = os.path.getsize(os.path.join(ckpt_dir, path))
        bounds = {0, end}
        for value in file_values:
            bounds |= {value.offset, value.offset + value.size}
        ordered_bounds = sorted(bounds)
        sizes[path] = [
            stop - start for start, stop in itertools.pairwise(ordered_bounds)
        ]
    return sizes


class ReadArrays(NamedTuple):
    """Result of reading arrays.

    Attributes:
        arrays: the undamaged ones, by name.
        damage: a line for each damaged file.
    """

    arrays: dict[str, Array]
    damage: list[str]


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

    @functools.cached_property
    def values(self) -> dict[str, Value]:
        """The headers and chunks of all arrays by name, such as "w/0.0".

        Raises ArrayFileError if the tree that says where they are is damaged.
        """
        directory = Directory(self.ckpt_dir)
        tree = f"{self.within}/{TREE}"
        try:
            has_tree = retries.read(tree, lambda: directory.has_file(tree))
        except FileRefusedError as error:
            raise ArrayFileError(f"{tree}: cannot be read ({error})") from error
        if has_tree or (self.manifest and tree in self.manifest.files):
            self._check_tree()
            return read_tree(self.ckpt_dir, self.within)
        values: dict[str, Value] = {}
        for path in self._paths():
            if self.manifest is not None:
                size = self.manifest.size_of(path)
            else:
                with directory.open(path) as file:
                    size = os.fstat(file.fileno()).st_size
            name = path.removeprefix(f"{self.within}/")
            values[name] = Value(path, 0, size)
        return values

    def _paths(self) -> list[str]:
        if self.manifest is not None:
            paths = list(self.manifest.files)
        else:
            paths = list_files(self.ckpt_dir)
        return [path for path in paths if path.startswith(f"{self.within}/")]

    def _is_of_tree(self, path: str) -> bool:
        return path.startswith((f"{self.within}/{TREE}", f"{self.within}/d/"))

    def check_tree_sizes(self) -> None:
        """Raises ArrayFileError if a file of the tree is too large to be read."""
        for path in filter(self._is_of_tree, self._paths()):
            if self.manifest is not None:
                size = self.manifest.size_of(path)
            else:
                size = os.path.getsize(os.path.join(self.ckpt_dir, path))
            if size > MAX_JSON_BYTES:
                raise ArrayFileError(
                    f"{path}: has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read"
                )

    def _check_tree(self) -> None:
        if self.manifest is None:
            return
        self.check_tree_sizes()
        for path in filter(self._is_of_tree, self._paths()):
            damage = self.manifest.damage_of(path)
            if damage is not None:
                raise ArrayFileError(f"{path}: {damage}")

    def read(self, targets: Mapping[str, Target]) -> ReadArrays:
        """Reads arrays, several at a time.

        Args:
            targets: by name, NumPy arrays or objects with shape, dtype and sharding.
        """
        result = ReadArrays({}, [])
        try:
            _ = self.values  # before several threads need them
        except ArrayFileError as error:
            result.damage.append(str(error))
            return result

        def read_array(name: str) -> None:
            try:
                result.arrays[name] = _Reader(self, name).read(targets[name])
            except ArrayFileError as error:
                result.damage.append(str(error))

        largest_first = sorted(
            targets, key=lambda name: -math.prod(targets[name].shape)
        )
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read_array, largest_first))
        result.damage.sort()
        return result

    def damage_of_others(
        self, read_names: Set[str], saved_names: Set[str]
    ) -> list[str]:
        """Checks what `read` does not, as no process needs it; each process checks a share.

        Args:
            read_names: of the arrays that are read. Each part of them is read by a process.
            saved_names: of all arrays.
        """
        if self.manifest is None:
            return []
        read_places: set[tuple[str, int]] = set()
        saved_places: set[tuple[str, int]] = set()
        for name, value in self.values.items():
            array_name = name.split("/")[0]
            if array_name in read_names:
                read_places.add((value.path, value.offset))
            if array_name in saved_names:
                saved_places.add((value.path, value.offset))
        other_blocks: list[tuple[str, Block]] = []
        foreign_bytes: dict[str, int] = {}
        for path in self._paths():
            for block in self.manifest.files[path]:
                place = (path, block.offset)
                if place not in read_places and not self._is_of_tree(path):
                    other_blocks.append((path, block))
                if place not in saved_places:
                    size = foreign_bytes.get(path, 0) + block.size
                    foreign_bytes[path] = size
        # A stranger's manifest may name anything, of any size. The trees of the processes are among
        # these files; they are smaller than the chunks that they lead to, or not large.
        num_foreign_bytes = sum(foreign_bytes.values())
        num_array_bytes = (
            sum(map(self.manifest.size_of, self._paths())) - num_foreign_bytes
        )
        if num_foreign_bytes > max(MAX_JSON_BYTES, num_array_bytes):
            largest = max(foreign_bytes, key=lambda path: foreign_bytes[path])
            return [
                f"{largest}: of no array; such files have {num_foreign_bytes:,} bytes in all"
            ]
        share = other_blocks[jax.process_index() :: jax.process_count()]
        return self.manifest.damage_of_blocks(share)


class _Reader:
    """Reader of one array."""

    def __init__(self, files: ArrayFiles, array_name: str):
        self._files = files
        self._array_name = array_name
        size = self._value(".zarray").size
        if size > _MAX_HEADER_BYTES:
            raise self._fault(
                ".zarray", f"has {size:,} bytes, more than any that Weft writes"
            )
        header = bytearray(size)
        self._fill(".zarray", memoryview(header))
        try:
            content = parse_json(header)
            check_json(content, _HEADER_FORM)
            # "<f4", or a name such as "bfloat16" that NumPy lacks.
            dtype_name = content["dtype"]
            if dtype_name.startswith(("<", ">", "|", "=")):
                self._dtype = np.dtype(dtype_name)
            else:
                self._dtype = jnp.dtype(dtype_name)
        except (ValueError, TypeError) as error:
            raise self._fault(
                ".zarray", f"does not describe an array ({error})"
            ) from error
        self._chunk_shape = tuple(content["chunks"])
        self._shape = tuple(content["shape"])
        self._separator = content.get("dimension_separator", ".")
        encoding = (
            content["compressor"],
            content["filters"],
            content["order"],
        )
        same_rank = len(self._chunk_shape) == len(self._shape)
        chunks_fit = same_rank and all(
            0 < chunk_size <= max(size, 1)
            for chunk_size, size in zip(
                self._chunk_shape, self._shape, strict=True
            )
        )
        is_plain = encoding == (None, None, "C") and self._separator in (
            ".",
            "/",
        )
        if not is_plain or not chunks_fit or self._dtype.hasobject:
            raise self._fault(
                ".zarray", "describes an array that was not written by Weft"
            )

    def read(self, target: Target) -> Array:
        """Returns the array with the dtype and layout of the target."""
        if index_lib.is_key_dtype(target.dtype):
            impl = index_lib.key_implementation(target.dtype)
            data_spec = jax.eval_shape(
                lambda: jax.random.key_data(jax.random.key(0, impl=impl))
            )
            data_shape = (*target.shape, *data_spec.shape)
            sharding: Any = getattr(target, "sharding", None)
            data_target = jax.ShapeDtypeStruct(
                data_shape, data_spec.dtype, sharding=sharding
            )
            data: Any = self.read(data_target)
            return jax.random.wrap_key_data(data, impl=impl)
        shape = tuple(target.shape)
        if shape != self._shape:
            raise self._fault(
                ".zarray", f"has the shape {self._shape}, the index {shape}"
            )
        if isinstance(target, np.ndarray | np.generic):
            whole = tuple((0, size) for size in shape)
            ((_, array),) = self._read_regions([whole], target.dtype)
            return array
        sharding = target.sharding
        # Devices may have the same region.
        places: dict[_Region, list[jax.sharding.Sharding]] = {}
        for device, slices in sharding.addressable_devices_indices_map(
            shape
        ).items():
            bounds: list[tuple[int, int]] = []
            for axis_slice, size in zip(slices, shape, strict=True):
                start, stop, _ = axis_slice.indices(size)
                bounds.append((start, stop))
            place = jax.sharding.SingleDeviceSharding(
                device, memory_kind=sharding.memory_kind
            )
            places.setdefault(tuple(bounds), []).append(place)
        shards: list[jax.Array] = []
        for region, values in self._read_regions([*places], target.dtype):
            for place in places[region]:
                shards.append(jax.device_put(values, place))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _read_regions(
        self, regions: Sequence[_Region], dtype: np.dtype
    ) -> Iterator[tuple[_Region, np.ndarray]]:
        """Yields regions with their elements, each as soon as its chunks are read."""
        overlaps: dict[str, list[_Overlap]] = {}  # by chunk
        chunks: dict[_Region, list[str]] = {}
        for region in regions:
            region_overlaps = list(self._overlaps(region))
            chunks[region] = [x.chunk_name for x in region_overlaps]
            for overlap in region_overlaps:
                overlaps.setdefault(overlap.chunk_name, []).append(overlap)
        results: dict[_Region, np.ndarray] = {}
        for region in regions:
            for chunk_name in chunks[region]:
                if chunk_name in overlaps:  # not read yet
                    self._read_chunk(
                        chunk_name, overlaps.pop(chunk_name), results
                    )
            result = results.pop(region)
            if result.dtype != dtype:
                result = result.astype(dtype)
            yield region, result

    def _read_chunk(
        self,
        name: str,
        overlaps: Sequence["_Overlap"],
        results: dict[_Region, np.ndarray],
    ) -> None:
        """Reads a chunk into all regions that it overlaps."""
        # Checked before memory is allocated for it.
        size = self._value(name).size
        expected_size = math.prod(self._chunk_shape) * self._dtype.itemsize
        if size != expected_size:
            raise self._fault(
                name, f"has {size} bytes instead of {expected_size}"
            )
        parts: list[np.ndarray] = []
        for overlap in overlaps:
            region = overlap.region
            if region not in results:
                region_shape = tuple(stop - start for start, stop in region)
                results[region] = _aligned(region_shape, self._dtype)
            parts.append(results[region][overlap.in_region])
        first = parts[0]
        if (
            len(parts) == 1
            and first.shape == self._chunk_shape
            and first.flags.c_contiguous
        ):
            self._fill(name, _bytes_of(first))
            return
        chunk = _aligned(self._chunk_shape, self._dtype)
        self._fill(name, _bytes_of(chunk))
        for part, overlap in zip(parts, overlaps, strict=True):
            part[...] = chunk[overlap.in_chunk]

    def _overlaps(self, region: _Region) -> Iterator["_Overlap"]:
        """Yields what each chunk has in common with a region.

        Along an axis, chunk i has the elements from i * size to (i + 1) * size, beyond the array,
        too, whose last chunk is filled up.
        """
        chunk_ranges: list[range] = []
        for (start, stop), size in zip(region, self._chunk_shape, strict=True):
            chunk_ranges.append(range(start // size, math.ceil(stop / size)))
        for chunk_index in itertools.product(*chunk_ranges):
            in_region: list[slice] = []
            in_chunk: list[slice] = []
            for i, size, (start, stop) in zip(
                chunk_index, self._chunk_shape, region, strict=True
            ):
                chunk_start = i * size
                first = max(start, chunk_start)
                last = min(stop, chunk_start + size)
                in_region.append(slice(first - start, last - start))
                in_chunk.append(slice(first - chunk_start, last - chunk_start))
            name = self._separator.join(map(str, chunk_index)) or "0"
            # With an ellipsis, the elements of an array without axes are one, too.
            yield _Overlap(name, region, (*in_region, ...), (*in_chunk, ...))

    def _value(self, name: str) -> Value:
        full_name = f"{self._array_name}/{name}"
        value = self._files.values.get(full_name)
        if value is None:
            path = f"{self._files.within}/{full_name}"
            raise ArrayFileError(f"{path}: is missing")
        return value

    def _fill(self, name: str, buffer: memoryview) -> None:
        """Reads a value into a buffer, and compares its digest."""
        value = self._value(name)
        if value.content is not None:  # checked with the tree
            buffer[:] = value.content
            return
        manifest = self._files.manifest
        if manifest is not None:
            damage = manifest.damage_of_block(value.path, value.offset, buffer)
        else:
            block = Block(value.offset, value.size, "")
            damage = find_file_damage(
                self._files.ckpt_dir, value.path, [block], buffer
            )
        if damage is not None:
            raise self._fault(name, damage)

    def _fault(self, name: str, fault: str) -> ArrayFileError:
        full_name = f"{self._array_name}/{name}"
        path = self._value(name).path or f"{self._files.within}/{TREE}"
        if path.endswith(f"/{full_name}"):
            return ArrayFileError(f"{path}: {fault}")
        return ArrayFileError(f"{path}: {fault}, in {full_name}")


class _Overlap(NamedTuple):
    """Overlap of a chunk and a region, as an index into each."""

    chunk_name: str
    region: _Region
    in_region: tuple[Any, ...]
    in_chunk: tuple[Any, ...]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
