"""Storages for the state of a checkpoint, one of them based on Orbax.

`save_to_dir` returns as soon as the state may change again; a separate thread writes it and runs a
callback when everything is on disk. Where the arrays are, and how they are read:
`weft.trainer.checkpointer.array_files`.
"""

import asyncio
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Mapping
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
from weft.trainer.checkpointer import dirs, host_state, retries
from weft.trainer.checkpointer import index as index_lib
from weft.trainer.checkpointer.array_files import (
    TREE,
    Array,
    ArrayFiles,
    Target,
    block_sizes,
    process_folder,
    read_tree,
)
from weft.trainer.checkpointer.manifest import (
    has_manifest,
    read_manifest,
    write_digests,
)
from weft.trainer.checkpointer.quiet_writes import quiet_writes
from weft.typing import Nested

# Before each removal of a failed save. After the first error, other files are still being written,
# which recreates their directories.
_REMOVAL_SECONDS = (0.0, 0.1, 0.4)
# Devices with the same values each write a slice of them, unless it is smaller. To cut a slice, JAX
# compiles a program for each shape and place.
_MIN_SLICE_BYTES = 2**20
# Files of a process are written in parallel, each of about so many bytes.
_FILE_BYTES = 2**28


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
    """Storage that writes arrays in the zarr format with Orbax, into a few files of each process.

    It does not compress, which is three times slower and saves little on trained parameters.
    Restoring works on any mesh and with any number of processes; each reads only what its devices
    need.
    """

    class Config(StateStorage.Config):
        """Configures an OrbaxStateStorage."""

        max_chunk_bytes: int = 2**27
        """Size of the largest chunk of an array. A process that needs a part of a chunk reads all
        of it, which bounds the extra memory for restoring."""

        reads_once: bool = False
        """Whether only one process reads each chunk and sends it to the others. If not, each
        process reads what its own devices need."""

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
                folder = _array_folder(ckpt_dir, self._ARRAYS)
                with processes.barrier(), quiet_writes():
                    python_dir = os.path.join(ckpt_dir, self._PYTHON)
                    host_state.maybe_save_python_savables(
                        dict(leaves), dir=python_dir
                    )
                    futures = self._start_write(arrays, folder)
                    copied.set()
                    for future in futures:
                        future.result()
                    if arrays:
                        retries.retried(lambda: self._write_digests(ckpt_dir))
                if arrays and jax.process_index() == 0:
                    with quiet_writes():
                        # Makes one tree of those of the processes.
                        self._handler.finalize(self._path(folder))
                    # Later, it would be taken for damage.
                    ArrayFiles(ckpt_dir, self._ARRAYS, None).check_tree_sizes()
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
            # Without a limit of the bytes in flight, all values are in one transaction. With one,
            # as PyTreeCheckpointHandler has it by default, a file ends whenever it is written out,
            # so that there were up to 70 for some hundred arrays.
            self._handler = self._ocp.PyTreeCheckpointHandler(
                handler_impl=self._ocp.BasePyTreeCheckpointHandler(
                    save_concurrent_bytes=None,
                    use_ocdbt=True,
                    use_compression=False,
                    type_handler_registry=registry,
                ),
                type_handler_registry=registry,
            )
        array_args = self._ocp.SaveArgs(
            chunk_byte_size=self.config.max_chunk_bytes
        )
        save_args = self._ocp.args.PyTreeSave(
            arrays,
            save_args=dict.fromkeys(arrays, array_args),
            ocdbt_target_data_file_size=_FILE_BYTES,
        )
        saving = self._handler.async_save(self._path(directory), args=save_args)
        return asyncio.run(saving) or []

    def _write_digests(self, ckpt_dir: str) -> None:
        """Leaves the digests of the files that this process has written."""
        folder = f"{self._ARRAYS}/{process_folder()}"
        if not dirs.exists(os.path.join(ckpt_dir, folder, TREE)):
            return  # all of its values are those of other processes, too
        blocks = block_sizes(read_tree(ckpt_dir, folder), ckpt_dir)
        paths = [
            f"{folder}/{path}"
            for path in dirs.list_files(os.path.join(ckpt_dir, folder))
        ]
        write_digests(ckpt_dir, paths, blocks)

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
            _array_name(path): with_layout(leaf)
            for path, leaf in leaves.items()
        }
        files = ArrayFiles(ckpt_dir, self._ARRAYS, manifest)
        read_targets = targets
        if self.config.reads_once and jax.process_count() > 1:
            saved_entries = {_array_name(path): entry for path, entry in saved}
            read_targets = {
                name: _divided(target, saved_entries[name])
                for name, target in targets.items()
            }
        read = files.read(read_targets)
        damage += read.damage
        if not damage:
            saved_names = {_array_name(path) for path, _ in saved}
            damage += files.damage_of_others(targets.keys(), saved_names)
        if max_over_processes(bool(damage)):
            damage = damage or [
                "another process, which names it, has found damage"
            ]
            raise DamagedCheckpointError(
                f"the checkpoint {ckpt_dir} is damaged: {'; '.join(damage[:8])}. Restore another.",
                damage=damage,
            )
        # In the same order in all processes, which send each other what they have read.
        for name in sorted(targets):
            if read_targets[name] is not targets[name]:
                sharding: Any = targets[name].sharding  # pyright: ignore[reportAttributeAccessIssue]
                read.arrays[name] = jax.device_put(read.arrays[name], sharding)
        return {path: read.arrays[_array_name(path)] for path in leaves}

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


def _divided(target: Target, saved: index_lib.Entry) -> Target:
    """Returns a target whose devices all hold another part, along an axis that was sharded before.

    Returns the target itself if no axis can be divided among all devices.
    """
    sharding = getattr(target, "sharding", None)
    if (
        not isinstance(sharding, jax.sharding.NamedSharding)
        or index_lib.is_key_dtype(target.dtype)
        or jnp.dtype(target.dtype).name in ("int2", "int4")  # no whole bytes
    ):
        return target
    spec: Any = (isinstance(saved, Mapping) and saved["spec"]) or ()
    axes = sorted(
        range(len(target.shape)),
        key=lambda axis: axis >= len(spec) or not spec[axis],
    )
    mesh = sharding.mesh
    for axis in axes:
        if target.shape[axis] % mesh.size == 0:
            axis_names = [None] * axis + [tuple(mesh.axis_names)]
            divided = jax.sharding.NamedSharding(
                mesh,
                jax.sharding.PartitionSpec(*axis_names),
                memory_kind=sharding.memory_kind,
            )
            return jax.ShapeDtypeStruct(
                target.shape, target.dtype, sharding=divided
            )
    return target


def with_layout(leaf: index_lib.ArrayOrSpec) -> Target:
    """Returns what an array of a state is read as: its shape, dtype and sharding."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf
    dtype = leaf.dtype
    if not index_lib.is_key_dtype(dtype):
        dtype = jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=_sharding_of(leaf))
