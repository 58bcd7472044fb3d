"""Local checkpoints: those of a run in the memory or on the disk of each host, every few steps.

Each process writes what its devices hold, to a folder that no other process reads:

    /dev/shm/weft/<digest of the run's directory>/process_1_of_4/step_00000057/
        shards          the bytes of each distinct shard of this process, one after the other
        shards.json     for each of them: path of the array, region, dtype
        index, python/, manifest.json    as in a durable checkpoint

A folder in memory outlives its run. So the manifest says which run has written it, and which start
of that run, a number that is the same in all processes. A checkpoint is used only if all processes
have it, of this run and of one start, undamaged and with the shards that their devices need now,
and if it is newer than the newest durable checkpoint. Any other is as if there were none.

The newest two are on the disk: only when the next one is due do all processes know that the newest
is complete, and remove the one before.
"""

import contextlib
import copy
import hashlib
import itertools
import json
import logging
import math
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft.distributed.preemption import (
    broadcast_from_first,
    each_of_first,
    max_over_processes,
)
from weft.errors import CheckpointReadError, WeftError
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_json
from weft.trainer.checkpointer import dirs, host_state, manifest
from weft.trainer.checkpointer import index as index_lib
from weft.trainer.checkpointer.array_files import Array, Target
from weft.trainer.checkpointer.storage import with_layout
from weft.typing import Nested

logger = logging.getLogger(__name__)

_SHARDS, _SHARD_LIST, _PYTHON = "shards", "shards.json", "python"
_PROCESS_DIR = re.compile(r"process_\d+_of_(\d+)")
_NO_FAILURE, _LACKS_ROOM, _OTHER_FAILURE = range(3)
# Steps, and numbers of runs and of starts, are int32, which processes can exchange.
_END_OF_NUMBERS = 2**31

# The first element and the end, along each axis.
_Region = tuple[tuple[int, int], ...]


class LocalCheckpoint(NamedTuple):
    """Restored local checkpoint."""

    step: int
    state: Nested[Any]
    policy_state: dict[str, Any] | None
    ckpt_dir: str


class LocalCheckpoints:
    """Local checkpoints of one run. All processes make the same calls, of the main thread.

    Args:
        local_dir: directory for all runs of this host.
        durable_dir: directory of the run's durable checkpoints.
        run: number of the run, in process 0.
    """

    def __init__(self, local_dir: str, *, durable_dir: str, run: int):
        self._durable_dir = durable_dir
        path_digest = hashlib.sha256(os.path.abspath(durable_dir).encode())
        self._run_dir = os.path.join(local_dir, path_digest.hexdigest()[:16])
        self._suffix = f"_of_{jax.process_count()}"
        self._dir = os.path.join(
            self._run_dir, f"process_{jax.process_index()}{self._suffix}"
        )
        self._run = broadcast_from_first(run % _END_OF_NUMBERS)
        self._start = _new_number()
        self._durable_step = 0  # the newest, as far as it is known
        self._is_first_restore = True
        self._is_off = False  # after an error that would come again
        self._has_warned = False
        self._thread: threading.Thread | None = None
        self._step_in_progress: int | None = None
        self._error: Exception | None = None

    # Saving.

    def save(
        self, *, step: int, state: Nested[Any], save_policy: object
    ) -> None:
        """Copies a state to the host, and begins to write it; a failure is logged later."""
        self._finish()
        if self._is_off:
            return
        index = index_lib.build_index(state)
        leaves = index_lib.flatten_state(state)
        shards = _copied_shards(leaves)
        objects: dict[str, object] = {}
        for path, leaf in leaves:
            if isinstance(leaf, host_state.PythonSavable):
                objects[path] = _Captured(leaf)
        policy_state = host_state.state_of_policy(save_policy)

        def write() -> None:
            try:
                self._write(step, index, shards, objects, policy_state)
            except Exception as error:
                self._error = error
                temporary_dir = dirs.temporary_dir(self._step_dir(step))
                dirs.remove_quietly(temporary_dir)

        self._step_in_progress = step
        self._thread = threading.Thread(
            target=write, name=f"local save of step {step}"
        )
        self._thread.start()

    def _write(
        self,
        step: int,
        index: index_lib.Index,
        shards: Mapping[tuple[str, _Region], np.ndarray],
        objects: Mapping[str, object],
        policy_state: Any,
    ) -> None:
        final_dir = self._step_dir(step)
        # Local checkpoints go on while the file system of the durable ones does not answer.
        with contextlib.suppress(CheckpointReadError):
            self._newest_durable_step()
        os.makedirs(self._run_dir, mode=0o700, exist_ok=True)
        if self._is_of_others():
            raise PermissionError(f"{self._run_dir!r} is of another user")
        dirs.make_temporary_dir(final_dir)
        ckpt_dir = dirs.temporary_dir(final_dir)
        directory = Directory(ckpt_dir)
        with directory.replacing(_SHARDS, sync=False) as file:
            for values in shards.values():
                file.write(_bytes_of(np.ascontiguousarray(values)))
        shard_list = [
            [path, region, values.dtype.name]
            for (path, region), values in shards.items()
        ]
        directory.write(_SHARD_LIST, json.dumps(shard_list), sync=False)
        index_lib.write_index_file(ckpt_dir=ckpt_dir, index=index)
        host_state.maybe_save_python_savables(
            objects, dir=os.path.join(ckpt_dir, _PYTHON)
        )
        host_state.write_policy_state(ckpt_dir, policy_state)
        facts = {
            "step": step,
            "saved_at": time.time(),
            "run": self._run,
            "start": self._start,
            # If a user removes this one, to go back, the local one must not be used.
            "after": self._durable_step,
        }
        manifest.write_manifest(ckpt_dir, facts=facts)
        dirs.commit_dir(final_dir)

    def _finish(self) -> None:
        """Waits for the save in progress; removes older ones when all processes have it."""
        step = self._step_in_progress
        if step is None:
            return
        error = self._join()
        failure = _NO_FAILURE
        if error is not None:
            failure = _OTHER_FAILURE
            if dirs.is_disk_full(error):
                failure = _LACKS_ROOM
        worst = max_over_processes(failure)
        if worst == _NO_FAILURE:
            self._has_warned = False
            self._remove_all_but(step)
            return
        self._is_off = worst == _OTHER_FAILURE
        if error is None:
            dirs.remove_quietly(self._step_dir(step))
        elif self._is_off or not self._has_warned:
            remedy = "There are none from here on"
            if not self._is_off:
                remedy = (
                    "It needs room for two of them, and is tried again at the next step that is "
                    "due"
                )
            logger.warning(
                "The local checkpoint of step %d could not be saved in %s: %s. %s. Training and "
                "durable checkpoints continue.",
                step,
                self._dir,
                error,
                remedy,
            )
            self._has_warned = True

    def _join(self) -> Exception | None:
        """Waits for the save in progress; returns its error."""
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._thread = self._step_in_progress = self._error = None
        return error

    def _step_dir(self, step: int) -> str:
        return dirs.build_step_dir(self._dir, step=step)

    def _newest_durable_step(self) -> int:
        """Returns the step of the newest durable checkpoint, 0 if there is none; in process 0."""
        if jax.process_index() != 0:
            return 0
        steps = dirs.step_dirs(self._durable_dir)
        self._durable_step = max(steps, default=0)
        return self._durable_step

    def _is_of_others(self) -> bool:
        """Returns whether the folder of the run was made by another user, or is a link."""
        status = os.lstat(self._run_dir)
        return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid()

    # Removing.

    def _remove_all_but(self, step: int) -> None:
        try:
            for old_step, path in dirs.step_dirs(self._dir).items():
                if old_step != step:
                    dirs.remove_dir(path)
        except (OSError, WeftError) as error:
            logger.warning("Old local checkpoints cannot be removed: %s", error)

    def forget(self) -> None:
        """Removes all, as when the run continues from a durable checkpoint."""
        self.remove()
        self._start = _new_number()

    def remove(self) -> None:
        """Removes all those of this process."""
        self._join()
        dirs.remove_quietly(self._dir)

    def stop(self) -> None:
        """Waits for the save in progress."""
        self._join()

    # Restoring.

    def restore(
        self,
        state: Nested[Any],
        *,
        validation: index_lib.CheckpointValidationType,
    ) -> LocalCheckpoint | None:
        """Restores the newest one that all processes can use, at the start of a run.

        Returns None if there is none, and later in the run, when it goes back to what is durable.
        """
        if not self._is_first_restore:
            return None
        self._is_first_restore = False
        durable_step = broadcast_from_first(self._newest_durable_step())
        checkpoint, fault = self._restore_newest(
            durable_step, state, validation
        )
        if checkpoint is not None:
            logger.info(
                "The run continues from the local checkpoint %s; the newest durable one is of "
                "step %d.",
                checkpoint.ckpt_dir,
                durable_step,
            )
        elif durable_step or os.path.isdir(self._run_dir):
            what_is_durable = "There is no durable one"
            if durable_step:
                what_is_durable = (
                    f"The newest durable one is of step {durable_step}"
                )
            logger.warning(
                "No local checkpoint is used: %s. %s.",
                fault or "another process can use none, as its log says",
                what_is_durable,
            )
        self._remove_those_of_other_counts()
        return checkpoint

    def _restore_newest(
        self,
        durable_step: int,
        state: Nested[Any],
        validation: index_lib.CheckpointValidationType,
    ) -> tuple[LocalCheckpoint | None, str | None]:
        """Returns the checkpoint, or why this process can use none, if it is due to this one."""
        steps, first_fault = self._saved_steps()
        for step in each_of_first(steps):
            start = broadcast_from_first(self._start_of(step))
            checkpoint, fault = None, f"{self._step_dir(step)} is missing"
            if step in steps:
                checkpoint, fault = self._read(
                    step, start, durable_step, state, validation
                )
            has_fault = max_over_processes(checkpoint is None)
            if checkpoint is not None and not has_fault:
                fault = _restore_objects(checkpoint.ckpt_dir, state)
                if fault is None:
                    return checkpoint, None
            first_fault = first_fault or fault
        return None, first_fault

    def _saved_steps(self) -> tuple[list[int], str | None]:
        """Returns the steps of this process's checkpoints, newest first, or why there are none."""
        try:
            if os.path.isdir(self._run_dir) and self._is_of_others():
                return [], f"{self._run_dir!r} is of another user"
            steps = [
                step
                for step in reversed(dirs.step_dirs(self._dir))
                if step < _END_OF_NUMBERS
            ]
            if not steps:
                return [], self._absence()
        except (OSError, WeftError) as error:
            return [], f"{self._dir!r} cannot be read: {error}"
        return steps, None

    def _absence(self) -> str:
        """Says why there is no local checkpoint: none was saved, or by other processes."""
        for name in dirs.names(self._run_dir):
            match = _PROCESS_DIR.fullmatch(name)
            if match is not None and not name.endswith(self._suffix):
                return (
                    f"those in {self._run_dir} are of {match[1]} processes, and there are "
                    f"{jax.process_count()} now"
                )
        return f"there is none in {self._dir}"

    def _read(
        self,
        step: int,
        start: int,
        durable_step: int,
        state: Nested[Any],
        validation: index_lib.CheckpointValidationType,
    ) -> tuple[LocalCheckpoint | None, str | None]:
        """Returns a checkpoint of this process, or why it cannot be used."""
        ckpt_dir = self._step_dir(step)
        try:
            fault = self._fault(step, start, durable_step)
            if fault is not None:
                return None, fault
            arrays = _read_state(ckpt_dir, state, validation)
            policy_state = host_state.read_policy_state(ckpt_dir)
        # Any error, since the folder may hold anything, and the other processes wait for an answer.
        except Exception as error:
            return None, f"{ckpt_dir} cannot be used: {error}"
        return LocalCheckpoint(step, arrays, policy_state, ckpt_dir), None

    def _start_of(self, step: int) -> int:
        """Returns the number of the start that has written a checkpoint; 0 if it is damaged."""
        if jax.process_index() != 0:
            return 0
        try:
            content = manifest.read_manifest(self._step_dir(step), step=step)
        except WeftError:
            return 0
        if isinstance(content, str):
            return 0
        return content.facts.get("start", 0) % _END_OF_NUMBERS

    def _fault(self, step: int, start: int, durable_step: int) -> str | None:
        """Returns why this process cannot use a checkpoint, except for its layout; else None."""
        ckpt_dir = self._step_dir(step)
        content = manifest.read_manifest(ckpt_dir, step=step)
        if isinstance(content, str):
            return f"{ckpt_dir} is damaged: {content}"
        facts = content.facts
        if facts.get("run") != self._run:
            return f"{ckpt_dir} is of another run"
        if facts.get("start") != start:
            return f"{ckpt_dir} is of another start than that of process 0"
        if step <= durable_step:
            return f"{ckpt_dir} is not newer"
        if facts["after"] > durable_step:
            return (
                f"{ckpt_dir} is later than the durable checkpoint of step {facts['after']}, which "
                "was removed"
            )
        damage = manifest.find_damage(ckpt_dir, step=step)
        if damage:
            return f"{ckpt_dir} is damaged: {damage[0]}"
        return None

    def _remove_those_of_other_counts(self) -> None:
        with contextlib.suppress(OSError, WeftError):
            if self._is_of_others():
                return
            for name in dirs.names(self._run_dir):
                if not name.endswith(self._suffix):
                    path = os.path.join(self._run_dir, name)
                    dirs.remove_quietly(path)


class _Captured:
    """State of a savable object at the time of a save."""

    def __init__(self, savable: host_state.PythonSavable):
        self._state = copy.deepcopy(savable.get_state())

    def get_state(self) -> Any:
        return self._state

    def set_state(self, state: Any) -> None:
        self._state = state


def _restore_objects(ckpt_dir: str, state: Nested[Any]) -> str | None:
    """Restores the savable objects of all processes, in place, or returns why that failed.

    They are then as they were.
    """
    objects = dict(index_lib.flatten_state(state))
    previous_states: list[tuple[host_state.PythonSavable, Any]] = []
    for leaf in objects.values():
        if isinstance(leaf, host_state.PythonSavable):
            previous_states.append((leaf, copy.deepcopy(leaf.get_state())))
    fault: str | None = None
    try:
        host_state.maybe_restore_python_savables(
            objects, dir=os.path.join(ckpt_dir, _PYTHON)
        )
    except (OSError, WeftError) as error:
        fault = f"{ckpt_dir} cannot be used: {error}"
    if not max_over_processes(fault is not None):
        return None
    for savable, previous_state in previous_states:
        savable.set_state(previous_state)
    return fault or f"{ckpt_dir} cannot be used by another process"


def _new_number() -> int:
    """Returns a random number that is the same in all processes."""
    return broadcast_from_first(secrets.randbits(31))


def _bytes_of(values: np.ndarray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def _region(index: Iterable[slice], shape: Iterable[int]) -> _Region:
    bounds: list[tuple[int, int]] = []
    for axis_slice, size in zip(index, shape, strict=True):
        start, stop, _ = axis_slice.indices(size)
        bounds.append((start, stop))
    return tuple(bounds)


def _whole(shape: Iterable[int]) -> _Region:
    return tuple((0, size) for size in shape)


def _copied_shards(
    leaves: Iterable[tuple[str, Any]],
) -> dict[tuple[str, _Region], np.ndarray]:
    """Returns copies of the distinct shards on the devices of this process."""
    shards: dict[tuple[str, _Region], Any] = {}
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array):
            if index_lib.is_key_dtype(leaf.dtype):
                leaf = jax.random.key_data(leaf)
            for shard in leaf.addressable_shards:
                region = _region(shard.index, leaf.shape)
                shards.setdefault((path, region), shard.data)
        elif index_lib.is_array(leaf):
            shards[path, _whole(leaf.shape)] = leaf
    for values in shards.values():
        if isinstance(values, jax.Array):
            values.copy_to_host_async()
    return {place: np.array(values) for place, values in shards.items()}


def _read_state(
    ckpt_dir: str,
    state: Nested[Any],
    validation: index_lib.CheckpointValidationType,
) -> Nested[Any]:
    """Returns the state of a checkpoint, with savable objects as they are in `state`."""
    saved = index_lib.read_index_file(ckpt_dir)
    index_lib.check_state_structure(
        saved, index_lib.build_index(state), validation=validation
    )
    saved_values = dict(saved)
    directory = Directory(ckpt_dir)
    shard_list = dirs.read_json(
        ckpt_dir, _SHARD_LIST, "the list of shards", _shard_list
    )
    restored: list[Any] = []
    with directory.open(_SHARDS) as file:
        shards = _ShardFile(file, shard_list)
        for path, leaf in index_lib.flatten_state(state):
            if index_lib.is_array(leaf):
                restored.append(shards.array(path, with_layout(leaf)))
            elif index_lib.is_state_leaf(leaf):
                restored.append(leaf)
            else:
                restored.append(saved_values[path])
    tree = jax.tree.structure(state, is_leaf=index_lib.is_state_leaf)
    return jax.tree.unflatten(tree, restored)


def _shard_list(content: list[Any]) -> list[tuple[str, _Region, str]]:
    """Returns the list of shards of a JSON value, or raises a ValueError or TypeError."""
    check_json(content, [list])
    shard_list: list[tuple[str, _Region, str]] = []
    for path, bounds, dtype_name in content:
        check_json(path, str)
        check_json(bounds, [[int]])
        check_json(dtype_name, str)
        region = tuple((start, stop) for start, stop in bounds)
        shard_list.append((path, region, dtype_name))
    return shard_list


class _ShardFile:
    """File with the shards of a process, given the list of them."""

    def __init__(
        self, file: BinaryIO, shard_list: Iterable[tuple[str, _Region, str]]
    ):
        self._file = file
        places: list[tuple[str, _Region]] = []
        dtypes: list[np.dtype] = []
        sizes: list[int] = []
        for path, region, dtype_name in shard_list:
            dtype = jnp.dtype(dtype_name)
            count = math.prod(stop - start for start, stop in region)
            places.append((path, region))
            dtypes.append(dtype)
            sizes.append(count * dtype.itemsize)
        offsets = itertools.accumulate(sizes, initial=0)
        self._parts = dict(
            zip(places, zip(offsets, dtypes, strict=False), strict=True)
        )

    def array(self, path: str, target: Target) -> Array:
        """Returns an array with the dtype and layout of the target.

        Raises a LookupError if the process has not saved the shards that its devices need.
        """
        shape = tuple(target.shape)
        if isinstance(target, np.ndarray | np.generic):
            return self._values(path, _whole(shape), target.dtype)
        sharding: Any = target.sharding
        if index_lib.is_key_dtype(target.dtype):
            impl = index_lib.key_implementation(target.dtype)
            data = jax.eval_shape(
                lambda: jax.random.key_data(jax.random.key(0, impl=impl))
            )
            data_target = jax.ShapeDtypeStruct(
                (*shape, *data.shape), data.dtype, sharding=sharding
            )
            numbers: Any = self.array(path, data_target)
            return jax.random.wrap_key_data(numbers, impl=impl)
        values: dict[_Region, np.ndarray] = {}
        shards: list[jax.Array] = []
        for device, index in sharding.addressable_devices_indices_map(
            shape
        ).items():
            region = _region(index, shape)
            if region not in values:
                values[region] = self._values(path, region, target.dtype)
            place = jax.sharding.SingleDeviceSharding(
                device, memory_kind=sharding.memory_kind
            )
            shards.append(jax.device_put(values[region], place))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _values(self, path: str, region: _Region, dtype: Any) -> np.ndarray:
        if (path, region) not in self._parts:
            raise LookupError(
                f"this process had no shard {region} of {path!r}; the layout is another one now"
            )
        offset, saved_dtype = self._parts[path, region]
        values = np.empty([stop - start for start, stop in region], saved_dtype)
        self._file.seek(offset)
        size = self._file.readinto(_bytes_of(values))  # pyright: ignore[reportAttributeAccessIssue]
        if size != values.nbytes:
            raise ValueError(f"{path!r} is cut short")
        return values.astype(dtype, copy=False)
