"""Storages for the arrays of a checkpoint, one of them based on Orbax.

`save_to_dir` returns as soon as the state may change again; a separate thread writes it and runs a
callback when everything is on disk.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from weft.config import Configurable, config_class
from weft.errors import CheckpointStateError, DamagedCheckpointError
from weft.hierarchy.parameter_spec import TensorSpec
from weft.trainer.array_files import ArrayFiles
from weft.trainer.checkpoint_index import (
    CheckpointValidationType,
    Index,
    build_index,
    check_state_structure,
    flatten_state,
    is_array,
    is_key_dtype,
    is_state_leaf,
    read_index_file,
)
from weft.trainer.checkpoint_manifest import has_manifest, read_manifest
from weft.trainer.exchanged_numbers import largest_number
from weft.trainer.python_savables import (
    maybe_restore_python_savables,
    maybe_save_python_savables,
)
from weft.trainer.writing_processes import WritingProcesses
from weft.typing import Nested

logger = logging.getLogger(__name__)


class StateStorageCommitCallback(Protocol):
    """Callback for a state that is on disk, called in the thread that wrote it."""

    def __call__(self, *, ckpt_dir: str, index: Index) -> None:
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

        Args:
            state: A pytree of arrays, Python values and savable objects.
            ckpt_dir: An empty directory.
            on_commit_callback: Called when everything is written. If it raises, the save failed.
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
        validation: CheckpointValidationType = CheckpointValidationType.EXACT,
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

    @config_class
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
        leaves = flatten_state(state)
        index = build_index(state)
        arrays = {_array_name(path): _to_save(path, leaf) for path, leaf in leaves if _stored(leaf)}
        processes = WritingProcesses(ckpt_dir)
        copied = threading.Event()  # the state may change from now on

        def write() -> None:
            with _orbax_errors_not_logged():
                maybe_save_python_savables(dict(leaves), dir=os.path.join(ckpt_dir, self._PYTHON))
                futures = self._begin_to_write(arrays, os.path.join(ckpt_dir, self._ARRAYS))
                copied.set()
                for future in futures:
                    future.result()

        def save() -> None:
            try:
                with processes.written():
                    write()
                on_commit_callback(ckpt_dir=ckpt_dir, index=index)
            except BaseException as error:
                self._error = error
                if jax.process_index() == 0:
                    _remove_what_was_written(ckpt_dir)
                logger.error(
                    "The checkpoint of step %d could not be written to %s: %s",
                    step,
                    ckpt_dir,
                    error,
                )
            finally:
                copied.set()

        self._thread = threading.Thread(target=save, name=f"save of step {step}")
        self._thread.start()
        copied.wait()
        if isinstance(self._error, CheckpointStateError):  # the same in all processes
            self.wait_until_finished()

    def _begin_to_write(self, arrays: dict[str, Any], directory: str) -> list[Any]:
        """Copies arrays to the host; returns futures of the writes."""
        if not arrays:
            return []
        if self._handler is None:
            self._handler = self._ocp.PyTreeCheckpointHandler(
                use_ocdbt=False, use_compression=False
            )
        os.makedirs(directory, exist_ok=True)
        args = self._ocp.SaveArgs(chunk_byte_size=self.config.max_chunk_bytes)
        saving = self._handler.async_save(
            self._path(os.path.abspath(directory)),
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
        validation: CheckpointValidationType = CheckpointValidationType.EXACT,
    ) -> Nested[Any]:
        saved = read_index_file(ckpt_dir)
        check_state_structure(saved, build_index(state), validation=validation)
        leaves = flatten_state(state)
        arrays = self._read_arrays(
            step, {path: leaf for path, leaf in leaves if _stored(leaf)}, ckpt_dir
        )
        maybe_restore_python_savables(dict(leaves), dir=os.path.join(ckpt_dir, self._PYTHON))
        values = dict(saved)
        restored = [_restored(path, leaf, arrays, values) for path, leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(state, is_leaf=is_state_leaf), restored)

    def _read_arrays(self, step: int, targets: dict[str, Any], ckpt_dir: str) -> dict[str, Any]:
        """Returns the arrays by path, each with the dtype and layout of its target."""
        found = read_manifest(ckpt_dir, step=step) if has_manifest(ckpt_dir) else None
        manifest, faults = (None, [found]) if isinstance(found, str) else (found, [])
        files = ArrayFiles(ckpt_dir, self._ARRAYS, manifest)
        arrays, seen, of_arrays = files.read(
            {_array_name(path): _with_layout(leaf) for path, leaf in targets.items()}
        )
        faults += of_arrays
        if manifest is not None:
            # Files that no process needs are checked too, each by one of the processes.
            below = sorted(p for p in manifest.files if p.startswith(f"{self._ARRAYS}/"))
            mine = below[jax.process_index() :: jax.process_count()]
            faults += manifest.damage_of_all(p for p in mine if p not in seen)
        if largest_number(bool(faults)):
            faults = faults or ["another process, which names it, has found damage"]
            raise DamagedCheckpointError(
                f"the checkpoint {ckpt_dir} is damaged: {'; '.join(faults[:8])}. Restore another.",
                damage=faults,
            )
        return {path: arrays[_array_name(path)] for path in targets}

    def stop(self) -> None:
        try:
            self.wait_until_finished()
        finally:
            if self._handler is not None:
                self._handler.close()
            self._handler = None


def _remove_what_was_written(ckpt_dir: str) -> None:
    """Frees space on a full disk."""
    # After the first error, other arrays are still being written, which recreates their
    # directories.
    for seconds in (0, 0.1, 0.4):
        time.sleep(seconds)
        shutil.rmtree(ckpt_dir, ignore_errors=True)


@contextlib.contextmanager
def _orbax_errors_not_logged() -> Iterator[None]:
    """Keeps Orbax from logging an error three times with its traceback; it is also raised."""

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in record.pathname

    absl = logging.getLogger("absl")
    absl.addFilter(keep)
    try:
        yield
    finally:
        absl.removeFilter(keep)


# Orbax refuses arrays without elements; the index has all the information about them.


def _stored(leaf: Any) -> bool:
    return is_array(leaf) and 0 not in leaf.shape


def _restored(path: str, leaf: Any, arrays: dict[str, Any], values: dict[str, Any]) -> Any:
    if path in arrays:
        return arrays[path]
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    if is_array(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype, device=_sharding_of(leaf))
    return leaf if is_state_leaf(leaf) else values[path]


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


def _to_save(path: str, leaf: Any) -> Any:
    if str(leaf.dtype) in ("uint2", "uint4"):
        raise CheckpointStateError(
            f"{path!r} is an array of {leaf.dtype}, which the array storage does not support; save "
            "it as uint8."
        )
    # A NumPy array can change while it is being written; a JAX array cannot.
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)


def _sharding_of(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return leaf.sharding(jax.sharding.get_mesh())
    return getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])


def _with_layout(leaf: Any) -> Any:
    """Returns an array's target with its layout."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf
    dtype = leaf.dtype if is_key_dtype(leaf.dtype) else jnp.dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=_sharding_of(leaf))
