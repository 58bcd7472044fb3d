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
from typing import Any, Protocol
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
_ALIGNMENT = 64  # JAX uses memory at such an address in place and copies any other


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
        """Configures an OrbaxStateStorage.

        Attributes:
            max_chunk_bytes: size of the largest file. A process that needs a part of a file reads
                all of it, which bounds the extra memory for restoring.
        """

        max_chunk_bytes: int = 2**28

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
        arrays = {_array_name(path): _to_save(path, leaf) for path, leaf in leaves if _stored(leaf)}
        processes = dirs.CommitGroup(ckpt_dir)
        copied = threading.Event()  # the state may change from now on

        def save() -> None:
            try:
                with processes.barrier():
                    python_dir = os.path.join(ckpt_dir, self._PYTHON)
                    host_state.maybe_save_python_savables(dict(leaves), dir=python_dir)
                    futures = self._start_write(arrays, _array_folder(ckpt_dir, self._ARRAYS))
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

        self._thread = threading.Thread(target=save, name=f"save of step {step}")
        self._thread.start()
        copied.wait()
        if isinstance(self._error, CheckpointStateError):  # the same in all processes
            self.wait_until_finished()

    def _start_write(self, arrays: dict[str, Any], directory: str) -> list[Any]:
        """Copies arrays to the host; returns futures of the writes."""
        if not arrays:
            return []
        if self._handler is None:
            handlers = self._ocp.type_handlers
            of_jax = handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_MIN_SLICE_BYTES)
            self._handler = self._ocp.PyTreeCheckpointHandler(
                use_ocdbt=False,
                use_compression=False,
                type_handler_registry=handlers.create_type_handler_registry(
                    (jax.Array, of_jax), (np.ndarray, handlers.NumpyHandler())
                ),
            )
        args = self._ocp.SaveArgs(chunk_byte_size=self.config.max_chunk_bytes)
        saving = self._handler.async_save(
            self._path(directory),
            args=self._ocp.args.PyTreeSave(arrays, save_args=dict.fromkeys(arrays, args)),
        )
        return asyncio.run(saving) or []

    def wait_until_finished(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
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
        index_lib.check_state_structure(saved, index_lib.build_index(state), validation=validation)
        leaves = index_lib.flatten_state(state)
        targets = {path: leaf for path, leaf in leaves if _stored(leaf)}
        arrays = self._read_arrays(step, targets, ckpt_dir, saved)
        self._restore_objects(dict(leaves), os.path.join(ckpt_dir, self._PYTHON))
        values = dict(saved)
        restored = [_restored(path, leaf, arrays, values) for path, leaf in leaves]
        return jax.tree.unflatten(
            jax.tree.structure(state, is_leaf=index_lib.is_state_leaf), restored
        )

    def _read_arrays(
        self, step: int, targets: dict[str, Any], ckpt_dir: str, saved: index_lib.Index
    ) -> dict[str, Any]:
        found = read_manifest(ckpt_dir, step=step) if has_manifest(ckpt_dir) else None
        manifest, faults = (None, [found]) if isinstance(found, str) else (found, [])
        files = ArrayFiles(ckpt_dir, self._ARRAYS, manifest)
        arrays, seen, array_faults = files.read(
            {_array_name(path): _with_layout(leaf) for path, leaf in targets.items()}
        )
        faults += array_faults
        if manifest is not None:
            # Files that no process needs are checked too, each by one of the processes.
            below = sorted(p for p in manifest.files if p.startswith(f"{self._ARRAYS}/"))
            own_paths = below[jax.process_index() :: jax.process_count()]
            # A stranger's manifest may name anything, of any size.
            names = {_array_name(path) for path, _ in saved}
            others = [path for path in below if path.split("/")[1] not in names]
            size = sum(manifest.files[path]["size"] for path in others)
            if size > MAX_JSON_BYTES:
                largest = max(others, key=lambda path: manifest.files[path]["size"])
                faults.append(f"{largest}: of no array; such files have {size:,} bytes in all")
            else:
                faults += manifest.damage_of_all(p for p in own_paths if p not in seen)
        if max_over_processes(bool(faults)):
            faults = faults or ["another process, which names it, has found damage"]
            raise DamagedCheckpointError(
                f"the checkpoint {ckpt_dir} is damaged: {'; '.join(faults[:8])}. Restore another.",
                damage=faults,
            )
        return {path: arrays[_array_name(path)] for path in targets}

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
    above, last = os.path.split(os.path.abspath(ckpt_dir))
    directory = Directory(above)
    directory.make_folder(f"{last}/{name}")
    return directory.full_path(f"{last}/{name}")


def _remove_partial(ckpt_dir: str) -> None:
    for seconds in _REMOVAL_SECONDS:
        time.sleep(seconds)
        shutil.rmtree(ckpt_dir, ignore_errors=True)


def _stored(leaf: Any) -> bool:
    # Orbax refuses arrays without elements; the index has all the information about them.
    return index_lib.is_array(leaf) and 0 not in leaf.shape


def _restored(
    path: str, leaf: object, arrays: Mapping[str, Array], values: Mapping[str, object]
) -> object:
    if path in arrays:
        return arrays[path]
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    if index_lib.is_array(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype, device=_sharding_of(leaf))
    return leaf if index_lib.is_state_leaf(leaf) else values[path]


def _array_name(path: str) -> str:
    """Returns an array's directory name: its path with hyphens, cut for file systems."""
    # No dots, since Orbax splits names at dots when reading.
    parts = [
        quote(part, safe="").replace(".", "%2E").replace("-", "%2D") for part in path.split("/")
    ]
    name = "-".join(parts)
    if len(name) <= 200:
        return name
    return f"{name[:160]}-{hashlib.sha256(path.encode()).hexdigest()[:32]}"


def _to_save(path: str, leaf: Array) -> Array:
    if isinstance(leaf, np.ndarray | np.generic) and not is_stored_dtype(leaf.dtype):
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
    # A NumPy array can change while it is being written; a JAX array cannot.
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)


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
    dtype = leaf.dtype if index_lib.is_key_dtype(leaf.dtype) else jnp.dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=_sharding_of(leaf))


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

    def read(self, targets: Mapping[str, Target]) -> tuple[dict[str, Any], set[str], list[str]]:
        """Reads arrays, several at a time.

        Args:
            targets: by name, NumPy arrays or objects with shape, dtype and sharding.

        Returns the undamaged arrays by name, the files that were read, and a line for each damage.
        """
        arrays, seen, faults = {}, set(), []

        def read_one(name: str) -> None:
            try:
                arrays[name] = _Reader(self, name, seen).read(targets[name])
            except ArrayFileError as error:
                faults.append(str(error))

        largest_first = sorted(targets, key=lambda name: -math.prod(targets[name].shape))
        with ThreadPoolExecutor(_READER_THREADS) as pool:
            list(pool.map(read_one, largest_first))
        return arrays, seen, sorted(faults)


class _Reader:
    def __init__(self, files: ArrayFiles, name: str, seen: set[str]):
        self._files, self._name, self._seen = files, name, seen
        size = self._size(".zarray")
        if size > _MAX_HEADER_BYTES:
            raise self._fault(".zarray", f"has {size:,} bytes, more than any that Weft writes")
        header = bytearray(size)
        self._fill(".zarray", memoryview(header))
        try:
            content = parse_json(header)
            self._chunk = tuple(map(int, content["chunks"]))
            self._shape = tuple(map(int, content["shape"]))
            # "<f4", or a name such as "bfloat16" that NumPy lacks.
            name = content["dtype"]
            self._dtype = np.dtype(name) if name[0] in "<>|=" else jnp.dtype(name)
            plain = (content["compressor"], content["filters"], content["order"])
            self._separator = content.get("dimension_separator", ".")
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            OverflowError,  # JSON of Python may have an Infinity
        ) as error:
            raise self._fault(".zarray", f"does not describe an array ({error})") from error
        chunks_fit = len(self._chunk) == len(self._shape) and min(self._chunk, default=1) > 0
        is_written_here = plain == (None, None, "C") and self._separator in (".", "/")
        if not is_written_here or not chunks_fit or self._dtype.hasobject:
            raise self._fault(".zarray", "describes an array that was not written by Weft")

    def read(self, target: Target) -> Array:
        """Returns the array with the dtype and layout of the target."""
        impl, shape, dtype = None, tuple(target.shape), target.dtype
        if index_lib.is_key_dtype(dtype):
            impl = index_lib.key_implementation(dtype)
            data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
            shape, dtype = shape + data.shape, data.dtype
        if shape != self._shape:
            raise self._fault(".zarray", f"has the shape {self._shape}, the index {shape}")
        if isinstance(target, np.ndarray | np.generic):
            return self._region(tuple(slice(0, n) for n in shape), dtype)
        regions: dict[tuple, np.ndarray] = {}
        parts = []
        sharding: Any = target.sharding
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            region = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
            key = tuple((s.start, s.stop) for s in region)
            if key not in regions:
                regions[key] = self._region(region, dtype)
            memory_kind = sharding.memory_kind
            on_device = jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)
            parts.append(jax.device_put(regions[key], on_device))
        array = jax.make_array_from_single_device_arrays(shape, sharding, parts)
        return array if impl is None else jax.random.wrap_key_data(array, impl=impl)

    def _region(self, region: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Returns the elements of a region of the array, assembled from its chunks."""
        whole = _aligned(tuple(s.stop - s.start for s in region), self._dtype)
        for at, within, chunk_name in self._chunks(region):
            part = whole[at]
            if part.shape == self._chunk and part.flags.c_contiguous:
                self._fill(chunk_name, _bytes_of(part))
            else:
                # Checked before memory is allocated for it.
                size = self._size(chunk_name)
                expected = math.prod(self._chunk) * self._dtype.itemsize
                if size != expected:
                    raise self._fault(chunk_name, f"has {size} bytes instead of {expected}")
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

    def _size(self, name: str) -> int:
        def size() -> int:
            with Directory(self._files.ckpt_dir).open(self._path(name)) as file:
                return os.fstat(file.fileno()).st_size

        try:
            return retries.read(os.path.join(self._files.ckpt_dir, self._path(name)), size)
        except FileNotFoundError:
            self._seen.add(self._path(name))
            raise self._fault(name, "is missing") from None
        except OSError as error:
            self._seen.add(self._path(name))
            raise self._fault(name, f"cannot be read ({error})") from None

    def _fill(self, name: str, into: memoryview) -> None:
        path, manifest = self._path(name), self._files.manifest
        self._seen.add(path)
        if manifest is not None:
            fault = manifest.damage_of(path, into)
        else:
            fault = find_file_damage(self._files.ckpt_dir, path, into)
        if fault is not None:
            raise self._fault(name, fault)

    def _fault(self, name: str, fault: str) -> ArrayFileError:
        return ArrayFileError(f"{self._path(name)}: {fault}")


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
