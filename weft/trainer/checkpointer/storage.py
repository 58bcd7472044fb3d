"""Storages for the state of a checkpoint, one of them based on Orbax.

`save_to_dir` returns as soon as the state may change again; a separate thread writes it and runs a
callback when everything is on disk.

    arrays/decoder-emb-weight/.zarray    shape, dtype, and the shape of a chunk
    arrays/decoder-emb-weight/0.0        the first chunk: the bytes of its elements, row by row
    arrays/decoder-emb-weight/0.1        the chunk to the right of it

The format is zarr's, written by Orbax without compression. A process reads only the chunks that
overlap its devices' shards, array by array, so a host never holds more than those shards and the
few chunks being read. Each file is read once, for both its values and its digest.
"""

import asyncio
import dataclasses
import hashlib
import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import Configurable
from weft.core.spmd import get_concrete_mesh
from weft.distributed.preemption import max_over_processes
from weft.errors import CheckpointStateError, DamagedCheckpointError
from weft.hierarchy.parameter_spec import TensorSpec
from weft.serialization.directory import Directory
from weft.serialization.state_dicts import is_stored_dtype
from weft.serialization.untrusted import MAX_JSON_BYTES, parse_json
from weft.trainer.checkpointer import dirs, host_state, retries
from weft.trainer.checkpointer import index as index_lib
from weft.trainer.checkpointer.manifest import (
    Manifest,
    find_file_damage,
    has_manifest,
    read_manifest,
)
from weft.trainer.checkpointer.quiet_writes import quiet_writes
from weft.typing import Nested

Array = jax.Array | np.ndarray
Target = jax.ShapeDtypeStruct | np.ndarray | np.generic
"""What to read an array as: its shape, dtype, and sharding unless it is one of NumPy."""

_READER_THREADS = 4
# Before each removal of a failed save. After the first error, other files are still being written,
# which recreates their directories.
_REMOVAL_SECONDS = (0.0, 0.1, 0.4)
# Devices with the same values each write a slice of them, unless it is smaller. To cut a slice, JAX
# compiles a program for each shape and place.
_MIN_SLICE_BYTES = 2**20
_MAX_HEADER_BYTES = 2**16
_ALIGNMENT = (
    64  # JAX uses memory at such an address in place and copies any other
)


class StateStorageCommitCallback(Protocol):
    """Callback for a state that is on disk, called in the thread that wrote it."""

    def __call__(self, *, ckpt_dir: str, index: index_lib.Index) -> None:
        """Completes the checkpoint in a directory, given the entries of the state."""
        ...


class StateStorage(Configurable):
    """Base class of storages, which save one state at a time; all processes make the same calls.

    Attributes:
        checks_below: directory, with a trailing "/", whose files `restore_from_dir` compares with
            the manifest while it reads; None if it checks no digests.
    """

    checks_below: str | None = None

    def save_to_dir(
        self,
        *,
        step: int,
        state: Nested[Any],
        ckpt_dir: str,
        on_commit_callback: StateStorageCommitCallback,
    ) -> None:
        """Begins to save a state. When it returns, the state may be changed or donated.

        `ckpt_dir` is empty. `on_commit_callback` runs at the end; if it raises, the save failed.
        """
        raise NotImplementedError(type(self))

    def wait_until_finished(self) -> None:
        """Waits for the save in progress, and raises its exception if it failed."""
        raise NotImplementedError(type(self))

    def restore_from_dir(
        self,
        step: int,
        state: Nested[Any],
        *,
        ckpt_dir: str,
        validation: index_lib.CheckpointValidationType = index_lib.CheckpointValidationType.EXACT,
    ) -> Nested[Any]:
        """Reads a state.

        Args:
            state: A pytree of arrays, or `jax.ShapeDtypeStruct`s or `TensorSpec`s with the layouts
                to restore to, Python values and savable objects, which are changed in place.
            validation: The required similarity of the checkpoint and `state`.

        Raises:
            CheckpointStructureError: If the structures differ.
            DamagedCheckpointError: If a file has changed since it was written; raised in all
                processes, with savable objects as they were.
        """
        raise NotImplementedError(type(self))

    def stop(self) -> None:
        """Waits for the save in progress, and releases threads."""
        raise NotImplementedError(type(self))


class OrbaxStateStorage(StateStorage):
    """Storage that writes each array to its own directory in the zarr format, with Orbax.

    It uses neither ocdbt, which is five times slower, nor compression, which is three times slower
    and saves little on trained parameters. Restoring works on any mesh and with any number of
    processes; each reads only what its devices need.
    """

    class Config(StateStorage.Config):
        """Configures an OrbaxStateStorage."""

        max_chunk_bytes: int = 2**28
        """Size of the largest file. A process that needs a part of a file reads all of it, which
        bounds the extra memory for restoring."""

    _ARRAYS, _PYTHON = "arrays", "python"
    checks_below = f"{_ARRAYS}/"

    def __init__(self, config: StateStorage.Config):
        super().__init__(config)
        import orbax.checkpoint  # takes half a second to import
        from etils import epath

        self._ocp: Any = orbax.checkpoint
        self._path = epath.Path
        self._handler: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save_to_dir(
        self,
        *,
        step: int,
        state: Nested[Any],
        ckpt_dir: str,
        on_commit_callback: StateStorageCommitCallback,
    ) -> None:
        self.wait_until_finished()
        leaves = index_lib.flatten_state(state)
        index = index_lib.build_index(state)
        arrays: dict[str, Array] = {}
        for path, leaf in leaves:
            if _is_stored(leaf):
                arrays[_array_name(path)] = _to_save(path, leaf)
        processes = dirs.CommitGroup(ckpt_dir)
        copied = threading.Event()  # the state may change from now on

        def save() -> None:
            try:
                with processes.barrier(), quiet_writes():
                    python_dir = os.path.join(ckpt_dir, self._PYTHON)
                    host_state.maybe_save_python_savables(
                        dict(leaves), dir=python_dir
                    )
                    futures = self._start_write(
                        arrays, _array_folder(ckpt_dir, self._ARRAYS)
                    )
                    copied.set()
                    for future in futures:
                        future.result()
                on_commit_callback(ckpt_dir=ckpt_dir, index=index)
            except BaseException as error:
                self._error = error
                if jax.process_index() == 0:
                    _remove_partial(ckpt_dir)
            finally:
                copied.set()

        self._thread = threading.Thread(
            target=save, name=f"save of step {step}"
        )
        self._thread.start()
        copied.wait()
        if isinstance(
            self._error, CheckpointStateError
        ):  # the same in all processes
            self.wait_until_finished()

    def _start_write(self, arrays: dict[str, Any], directory: str) -> list[Any]:
        """Copies arrays to the host; returns futures of the writes."""
        if not arrays:
            return []
        if self._handler is None:
            handlers = self._ocp.type_handlers
            registry = handlers.create_type_handler_registry(
                (
                    jax.Array,
                    handlers.ArrayHandler(
                        min_slice_bytes_for_replica_parallel=_MIN_SLICE_BYTES
                    ),
                ),
                (np.ndarray, handlers.NumpyHandler()),
            )
            self._handler = self._ocp.PyTreeCheckpointHandler(
                use_ocdbt=False,
                use_compression=False,
                type_handler_registry=registry,
            )
        array_args = self._ocp.SaveArgs(
            chunk_byte_size=self.config.max_chunk_bytes
        )
        save_args = self._ocp.args.PyTreeSave(
            arrays, save_args=dict.fromkeys(arrays, array_args)
        )
        saving = self._handler.async_save(self._path(directory), args=save_args)
        return asyncio.run(saving) or []

    def wait_until_finished(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def restore_from_dir(
        self,
        step: int,
        state: Nested[Any],
        *,
        ckpt_dir: str,
        validation: index_lib.CheckpointValidationType = index_lib.CheckpointValidationType.EXACT,
    ) -> Nested[Any]:
        saved = index_lib.read_index_file(ckpt_dir)
        index_lib.check_state_structure(
            saved, index_lib.build_index(state), validation=validation
        )
        leaves = dict(index_lib.flatten_state(state))
        array_leaves = {
            path: leaf for path, leaf in leaves.items() if _is_stored(leaf)
        }
        arrays = self._read_arrays(step, array_leaves, ckpt_dir, saved)
        self._restore_objects(leaves, os.path.join(ckpt_dir, self._PYTHON))
        saved_values = dict(saved)
        restored_leaves = [
            _restored(path, leaf, arrays, saved_values)
            for path, leaf in leaves.items()
        ]
        tree = jax.tree.structure(state, is_leaf=index_lib.is_state_leaf)
        return jax.tree.unflatten(tree, restored_leaves)

    def _read_arrays(
        self,
        step: int,
        leaves: dict[str, Any],
        ckpt_dir: str,
        saved: index_lib.Index,
    ) -> dict[str, Array]:
        """Returns the arrays by path; raises if any file of an array is damaged, needed or not."""
        damage: list[str] = []
        manifest = None
        if has_manifest(ckpt_dir):
            manifest = read_manifest(ckpt_dir, step=step)
            if isinstance(manifest, str):
                damage.append(manifest)
                manifest = None
        targets = {
            _array_name(path): _with_layout(leaf)
            for path, leaf in leaves.items()
        }
        read = ArrayFiles(ckpt_dir, self._ARRAYS, manifest).read(targets)
        damage += read.damage
        if manifest is not None:
            array_names = {_array_name(path) for path, _ in saved}
            damage += self._damage_of_unread_files(
                manifest, read.paths, array_names
            )
        if max_over_processes(bool(damage)):
            damage = damage or [
                "another process, which names it, has found damage"
            ]
            raise DamagedCheckpointError(
                f"the checkpoint {ckpt_dir} is damaged: {'; '.join(damage[:8])}. Restore another.",
                damage=damage,
            )
        return {path: read.arrays[_array_name(path)] for path in leaves}

    def _damage_of_unread_files(
        self, manifest: Manifest, read_paths: set[str], array_names: set[str]
    ) -> list[str]:
        """Checks files that no process needs, too, each by one of the processes."""
        paths = sorted(
            path
            for path in manifest.files
            if path.startswith(f"{self._ARRAYS}/")
        )
        # A stranger's manifest may name anything, of any size.
        foreign_paths = [
            path for path in paths if path.split("/")[1] not in array_names
        ]
        foreign_bytes = sum(
            manifest.files[path]["size"] for path in foreign_paths
        )
        if foreign_bytes > MAX_JSON_BYTES:
            largest = max(
                foreign_paths, key=lambda path: manifest.files[path]["size"]
            )
            return [
                f"{largest}: of no array; such files have {foreign_bytes:,} bytes in all"
            ]
        process_paths = paths[jax.process_index() :: jax.process_count()]
        return manifest.damage_of_all(
            path for path in process_paths if path not in read_paths
        )

    def _restore_objects(self, leaves: dict[str, Any], directory: str) -> None:
        damage = None
        try:
            host_state.maybe_restore_python_savables(leaves, dir=directory)
        except DamagedCheckpointError as error:
            damage = error
        if max_over_processes(damage is not None):
            raise damage or DamagedCheckpointError(
                f"the states in {directory} are damaged, as another process says, which names the "
                "file. Restore another checkpoint.",
                damage=["another process, which names it, has found damage"],
            )

    def stop(self) -> None:
        try:
            self.wait_until_finished()
        finally:
            if self._handler is not None:
                self._handler.close()
            self._handler = None


def _array_folder(ckpt_dir: str, name: str) -> str:
    """Returns the path of the folder that array storage writes to; refuses a link in its place.

    It is not the path of a handle, `/proc/self/fd/N`: after an error, writes of array storage may
    still go on when the handle is closed, and N may be the folder of the next save by then.
    """
    parent, ckpt_name = os.path.split(os.path.abspath(ckpt_dir))
    directory = Directory(parent)
    directory.make_folder(f"{ckpt_name}/{name}")
    return directory.full_path(f"{ckpt_name}/{name}")


def _remove_partial(ckpt_dir: str) -> None:
    for seconds in _REMOVAL_SECONDS:
        time.sleep(seconds)
        shutil.rmtree(ckpt_dir, ignore_errors=True)


def _is_stored(leaf: object) -> bool:
    # Orbax refuses arrays without elements; the index has all the information about them.
    return index_lib.is_array(leaf) and 0 not in leaf.shape


def _restored(
    path: str,
    leaf: object,
    arrays: Mapping[str, Array],
    saved_values: Mapping[str, object],
) -> object:
    if path in arrays:
        return arrays[path]
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    if index_lib.is_array(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype, device=_sharding_of(leaf))
    if index_lib.is_state_leaf(leaf):
        return leaf
    return saved_values[path]


def _array_name(path: str) -> str:
    """Returns an array's directory name: its path with hyphens, cut for file systems."""
    # No dots, since Orbax splits names at dots when reading.
    quoted_path = quote(path, safe="/").replace(".", "%2E").replace("-", "%2D")
    name = quoted_path.replace("/", "-")
    if len(name) <= 200:
        return name
    digest = hashlib.sha256(path.encode()).hexdigest()
    return f"{name[:160]}-{digest[:32]}"


def _to_save(path: str, leaf: Array) -> Array:
    if isinstance(leaf, np.ndarray | np.generic) and not is_stored_dtype(
        leaf.dtype
    ):
        raise CheckpointStateError(
            f"{path!r} is an array of {leaf.dtype}, and a checkpoint takes arrays of numbers and "
            "booleans. Put texts into the state as Python strings, convert other values to "
            "numbers, or leave them out."
        )
    if str(leaf.dtype) in ("uint2", "uint4"):
        raise CheckpointStateError(
            f"{path!r} is an array of {leaf.dtype}, which the array storage does not support; save "
            "it as uint8."
        )
    if isinstance(leaf, jax.Array):
        return leaf
    return np.array(leaf)  # it can change while it is being written


def _sharding_of(leaf: index_lib.ArrayOrSpec) -> jax.sharding.Sharding:
    if isinstance(leaf, TensorSpec):
        mesh = get_concrete_mesh()
        sharding = mesh and leaf.sharding(mesh)
    else:
        sharding = getattr(leaf, "sharding", None)
    return sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _with_layout(leaf: index_lib.ArrayOrSpec) -> Target:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf
    dtype = leaf.dtype
    if not index_lib.is_key_dtype(dtype):
        dtype = jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=_sharding_of(leaf))


class ArrayFileError(Exception):
    """Damage of a file; the message names the file and the fault."""


class ReadArrays(NamedTuple):
    """Result of reading arrays.

    Attributes:
        arrays: the undamaged ones, by name.
        paths: of the files that were read.
        damage: a line for each damaged file.
    """

    arrays: dict[str, Array]
    paths: set[str]
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

    def read(self, targets: Mapping[str, Target]) -> ReadArrays:
        """Reads arrays, several at a time.

        Args:
            targets: by name, NumPy arrays or objects with shape, dtype and sharding.
        """
        result = ReadArrays({}, set(), [])

        def read_array(name: str) -> None:
            try:
                reader = _Reader(self, name, result.paths)
                result.arrays[name] = reader.read(targets[name])
            except ArrayFileError as error:
                result.damage.append(str(error))

        largest_first = sorted(
            targets, key=lambda name: -math.prod(targets[name].shape)
        )
        with ThreadPoolExecutor(_READER_THREADS) as pool:
            list(pool.map(read_array, largest_first))
        result.damage.sort()
        return result


class _Reader:
    """Reader of one array; adds the files that it reads to `read_paths`."""

    def __init__(
        self, files: ArrayFiles, array_name: str, read_paths: set[str]
    ):
        self._files = files
        self._array_name = array_name
        self._read_paths = read_paths
        size = self._size(".zarray")
        if size > _MAX_HEADER_BYTES:
            raise self._fault(
                ".zarray", f"has {size:,} bytes, more than any that Weft writes"
            )
        header = bytearray(size)
        self._fill(".zarray", memoryview(header))
        try:
            content = parse_json(header)
            self._chunk_shape = tuple(map(int, content["chunks"]))
            self._shape = tuple(map(int, content["shape"]))
            # "<f4", or a name such as "bfloat16" that NumPy lacks.
            dtype_name = content["dtype"]
            if dtype_name[0] in "<>|=":
                self._dtype = np.dtype(dtype_name)
            else:
                self._dtype = jnp.dtype(dtype_name)
            encoding = (
                content["compressor"],
                content["filters"],
                content["order"],
            )
            self._separator = content.get("dimension_separator", ".")
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            OverflowError,  # JSON of Python may have an Infinity
        ) as error:
            raise self._fault(
                ".zarray", f"does not describe an array ({error})"
            ) from error
        same_rank = len(self._chunk_shape) == len(self._shape)
        chunks_fit = same_rank and all(size > 0 for size in self._chunk_shape)
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
            return self._read_region(
                tuple((0, size) for size in shape), target.dtype
            )
        regions: dict[_Region, np.ndarray] = {}  # devices may have the same one
        shards: list[jax.Array] = []
        sharding = target.sharding
        for device, slices in sharding.addressable_devices_indices_map(
            shape
        ).items():
            bounds: list[tuple[int, int]] = []
            for axis_slice, size in zip(slices, shape, strict=True):
                start, stop, _ = axis_slice.indices(size)
                bounds.append((start, stop))
            region = tuple(bounds)
            if region not in regions:
                regions[region] = self._read_region(region, target.dtype)
            device_sharding = jax.sharding.SingleDeviceSharding(
                device, memory_kind=sharding.memory_kind
            )
            shards.append(jax.device_put(regions[region], device_sharding))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _read_region(self, region: "_Region", dtype: np.dtype) -> np.ndarray:
        """Returns the elements of a region of the array, assembled from its chunks."""
        result = _aligned(
            tuple(stop - start for start, stop in region), self._dtype
        )
        for overlap in self._overlaps(region):
            part = result[overlap.in_region]
            if part.shape == self._chunk_shape and part.flags.c_contiguous:
                self._fill(overlap.chunk_name, _bytes_of(part))
            else:
                # Checked before memory is allocated for it.
                size = self._size(overlap.chunk_name)
                expected_size = (
                    math.prod(self._chunk_shape) * self._dtype.itemsize
                )
                if size != expected_size:
                    raise self._fault(
                        overlap.chunk_name,
                        f"has {size} bytes instead of {expected_size}",
                    )
                chunk = _aligned(self._chunk_shape, self._dtype)
                self._fill(overlap.chunk_name, _bytes_of(chunk))
                result[overlap.in_region] = chunk[overlap.in_chunk]
        if result.dtype == dtype:
            return result
        return result.astype(dtype)

    def _overlaps(self, region: "_Region") -> Iterator["_Overlap"]:
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
            yield _Overlap(name, (*in_region, ...), (*in_chunk, ...))

    def _path(self, name: str) -> str:
        return f"{self._files.within}/{self._array_name}/{name}"

    def _size(self, name: str) -> int:
        def size() -> int:
            with Directory(self._files.ckpt_dir).open(self._path(name)) as file:
                return os.fstat(file.fileno()).st_size

        try:
            return retries.read(
                os.path.join(self._files.ckpt_dir, self._path(name)), size
            )
        except FileNotFoundError:
            self._read_paths.add(self._path(name))
            raise self._fault(name, "is missing") from None
        except OSError as error:
            self._read_paths.add(self._path(name))
            raise self._fault(name, f"cannot be read ({error})") from None

    def _fill(self, name: str, buffer: memoryview) -> None:
        """Reads a file into a buffer, and compares its digest."""
        path = self._path(name)
        self._read_paths.add(path)
        if self._files.manifest is not None:
            damage = self._files.manifest.damage_of(path, buffer)
        else:
            damage = find_file_damage(self._files.ckpt_dir, path, buffer)
        if damage is not None:
            raise self._fault(name, damage)

    def _fault(self, name: str, fault: str) -> ArrayFileError:
        return ArrayFileError(f"{self._path(name)}: {fault}")


# The first element and the end of a region, along each axis.
_Region = tuple[tuple[int, int], ...]


class _Overlap(NamedTuple):
    """Overlap of a chunk and a region, as an index into each."""

    chunk_name: str
    in_region: tuple[Any, ...]
    in_chunk: tuple[Any, ...]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
