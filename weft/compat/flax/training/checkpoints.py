"""Directories of checkpoints, in Flax's formats.

    run/
        checkpoint_10           one file: a state dict, packed by `weft.serialization`
        checkpoint_20/          or a directory of Orbax
        checkpoint_30           a file with placeholders for arrays of several processes ...
        checkpoint_30_gda/      ... and these arrays, each a directory in the zarr format

Flax writes all of these; Weft reads them and writes the first, or the second for arrays on several
processes. Names are a prefix and the step. A checkpoint is written under a hidden name and renamed
when it is complete. To save during training, use `weft.trainer.checkpointer` instead.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft import errors
from weft._lazy import import_extra
from weft.compat.flax import traverse_util
from weft.compat.flax.configurations import config
from weft.serialization import (
    from_state_dict,
    msgpack_restore,
    msgpack_serialize,
    to_state_dict,
)
from weft.serialization.directory import Directory, Entry
from weft.serialization.state_dicts import is_stored_dtype
from weft.serialization.untrusted import memory_bytes, refuse_url, utf8_fault
from weft.typing import Leaf, PyTree

ARRAYS_SUFFIX = "_gda"

_PLACEHOLDER = "//GDAPlaceholder:"
_ORBAX_FILE = "_METADATA"


def is_orbax(path: str) -> bool:
    """Returns whether a path is a complete Orbax directory."""
    return os.path.isfile(os.path.join(path, _ORBAX_FILE))


def read_checkpoint(
    path: str, target: PyTree, orbax_checkpointer: Any = None
) -> PyTree:
    """Returns the state dict of a checkpoint, a file or directory.

    Arrays in files of their own are laid out like those of the state dict `target`. Arguments and
    errors are those of `restore_checkpoint`.
    """
    layouts: dict[str, jax.sharding.Sharding] = {}
    for key_path, leaf in jax.tree.leaves_with_path(target):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            layouts[_name(key_path)] = sharding
    _check_entries(path)
    if os.path.isdir(path):
        return _with_empty_nodes(
            _read_orbax(path, layouts, orbax_checkpointer), target
        )
    return _with_arrays(
        _read_file(path), path, None if target is None else layouts
    )


def _name(key_path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def _check_utf8(path: str) -> None:
    """Refuses a path that array storage would not find."""
    fault = utf8_fault(path)
    if fault is not None:
        raise errors.ArgumentValueError(
            f"arrays in files of their own cannot be there: {fault}."
        )


def _step_of(path: str) -> str:
    match = re.search(r"-?\d[\d.]*(e\+?\d+)?$", path)
    return match.group() if match else "unknown"


def _check_entries(path: str) -> None:
    """Refuses a checkpoint that is a link, or has something other than files and folders in it."""
    directory, name = _split(path)
    with _refusals(path):
        for part in (name, name + ARRAYS_SUFFIX):
            part_path = directory.full_path(part)
            if os.path.lexists(part_path):
                directory.check([Entry(part, os.lstat(part_path))])
                if os.path.isdir(part_path):
                    directory.check(directory.walk(part))


def _split(path: str) -> tuple[Directory, str]:
    folder, name = os.path.split(os.path.abspath(path))
    return Directory(folder), name


@contextlib.contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except errors.FileRefusedError as error:
        raise _damaged(path, str(error).rstrip(".")) from error


def _read_file(path: str) -> PyTree:
    directory, name = _split(path)
    with _refusals(path):
        data = directory.read_bytes(name, at_most=memory_bytes())
    try:
        return msgpack_restore(data)
    except errors.DamagedBytesError as error:
        raise _damaged(path, str(error)) from error


def _with_arrays(
    state: PyTree,
    path: str,
    layouts: Mapping[str, jax.sharding.Sharding] | None,
) -> PyTree:
    """Replaces placeholders by the arrays of several processes, which have files of their own."""

    def with_array(key_path: jax.tree_util.KeyPath, leaf: Leaf) -> Leaf:
        if not (isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER)):
            return leaf
        name = _name(key_path)
        if layouts is None:
            raise errors.MPARestoreTargetRequiredError(path, _step_of(path))
        if name not in layouts:
            raise errors.MPARestoreTargetRequiredError(
                path, _step_of(path), name
            )
        folders = leaf.removeprefix(_PLACEHOLDER).split("/")
        if not {"", ".", ".."}.isdisjoint(folders):
            raise _damaged(path, f"{name} names files elsewhere: {leaf!r}")
        directory = os.path.join(path + ARRAYS_SUFFIX, *folders)
        return _read_zarr(directory, layouts[name], _step_of(path))

    return jax.tree.map_with_path(with_array, state)


def _read_zarr(
    directory: str, sharding: jax.sharding.Sharding, step: str
) -> jax.Array:
    _check_utf8(directory)
    tensorstore = import_extra(
        "tensorstore", "train", needed_by=f"the checkpoint {directory!r}"
    )
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": os.path.abspath(directory)},
    }

    def result(future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            raise errors.MPARestoreDataCorruptedError(
                step, directory
            ) from error

    stored = result(tensorstore.open(spec, read=True))
    if stored.size * stored.dtype.numpy_dtype.itemsize > memory_bytes():
        # Chunks that are absent would be zeros, of any size that the file names.
        raise errors.MPARestoreDataCorruptedError(step, directory)

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        return result(stored[index].read())

    return jax.make_array_from_callback(stored.shape, sharding, read_shard)


def _import_orbax(path: str | None = None) -> Any:
    needed_by = __name__ if path is None else f"the checkpoint {path!r}"
    return import_extra(
        "orbax.checkpoint",
        "train",
        needed_by=needed_by,
        package="orbax-checkpoint",
    )


def _opened_checkpointer(
    path: str, orbax_checkpointer: Any
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with the user's checkpointer, which it does not close, or a new one."""
    if orbax_checkpointer is not None:
        return contextlib.nullcontext(orbax_checkpointer)
    ocp = _import_orbax(path)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _read_orbax(
    path: str,
    layouts: Mapping[str, jax.sharding.Sharding],
    orbax_checkpointer: Any,
) -> PyTree:
    _check_utf8(path)
    ocp = _import_orbax(path)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def restore_args(key_path: jax.tree_util.KeyPath, saved: Any) -> Any:
        if type(saved) is not ocp.metadata.ArrayMetadata:
            return ocp.RestoreArgs()
        layout = layouts.get(_name(key_path))
        if layout is None and saved.sharding is not None:
            layout = first_device
        # Arrays that were not JAX arrays, or that JAX would narrow (float64), become NumPy arrays.
        if (
            layout is None
            or jax.dtypes.canonicalize_dtype(saved.dtype) != saved.dtype
        ):
            return ocp.RestoreArgs(restore_type=np.ndarray)
        layout.shard_shape(
            saved.shape
        )  # a layout that does not fit is not damage to the files
        return ocp.ArrayRestoreArgs(sharding=layout)

    def result(read: Any, **kwargs: Any) -> Any:
        try:
            return read(os.path.abspath(path), **kwargs)
        except (KeyError, OSError, ValueError) as error:
            raise _damaged(path, errors.describe_error(error)) from error

    if not is_orbax(path):
        raise _damaged(
            path, f"it is a directory without Orbax's file {_ORBAX_FILE}"
        )
    _check_names(path)
    with _opened_checkpointer(path, orbax_checkpointer) as checkpointer:
        metadata = result(checkpointer.metadata).item_metadata
        if metadata is None:
            raise _damaged(path, "Orbax does not find the tree in it")
        args = jax.tree.map_with_path(restore_args, metadata.tree)
        tree = result(
            checkpointer.restore, args=ocp.args.PyTreeRestore(restore_args=args)
        )
        return to_state_dict(tree)


def _check_names(path: str) -> None:
    """Refuses names of arrays that would be paths to elsewhere, as Orbax makes paths of names."""
    directory, name = _split(path)
    try:
        content = directory.read_json(f"{name}/{_ORBAX_FILE}")
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    names = (
        content.get("tree_metadata", {}) if isinstance(content, dict) else {}
    )
    for array_name in names:
        if os.path.pardir in re.split(r"['\"/\\]", array_name):
            raise _damaged(
                path, f"an array is named {array_name}, which leads elsewhere"
            )


def _with_empty_nodes(state: PyTree, target: PyTree) -> PyTree:
    """Restores nodes without leaves, such as `optax.EmptyState`, which Orbax reads as None."""
    if isinstance(state, dict) and isinstance(target, dict):
        return {
            key: _with_empty_nodes(value, target.get(key))
            for key, value in state.items()
        }
    is_empty_node = state is None and isinstance(target, dict) and not target
    return {} if is_empty_node else state


def _damaged(path: str, reason: str) -> errors.DamagedCheckpointError:
    return errors.DamagedCheckpointError(
        f"the checkpoint {path!r} cannot be read ({reason}). Copy it again, or restore another one."
    )


_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")

Path = str | os.PathLike[str]


class AsyncManager:
    """Thread that writes checkpoints while a program continues.

    >>> import tempfile
    >>> run, manager = tempfile.mkdtemp(), AsyncManager()
    >>> path = save_checkpoint(run, {"w": np.ones(2)}, 1, async_manager=manager)
    >>> manager.wait_previous_save()
    >>> available_steps(run)
    [1]
    """

    def __init__(self, max_workers: int = 1):
        self.executor = ThreadPoolExecutor(max_workers)
        self.save_future: Future[Any] | None = None

    def save_async(self, task: Callable[[], Any]) -> None:
        """Runs a task on the thread, after the previous one; raises the error of that one."""
        self.wait_previous_save()
        self.save_future = self.executor.submit(task)

    def wait_previous_save(self) -> None:
        """Waits until the previous task has ended, and raises its error."""
        if self.save_future is not None:
            self.save_future.result()


def save_checkpoint(
    ckpt_dir: Path,
    target: PyTree,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    orbax_checkpointer: Any = None,
) -> str:
    """Writes a checkpoint that Flax can read, removes old ones, and returns its path.

    Call it on one process. `save_checkpoint_multiprocess` saves arrays of several processes.

    Args:
        ckpt_dir: created if needed. "" is the current directory; `~` is not expanded, and URLs are
            refused.
        target: a tree, such as a `TrainState` or a dict of variables.
        step: must be larger than those of existing checkpoints.
        keep: number of newest checkpoints to keep, including this one; 0 keeps all.
        overwrite: whether to remove checkpoints of this and later steps.
        keep_every_n_steps: also keeps older checkpoints that are at least this far apart.
        async_manager: writes the file on its thread, after the previous one.
        orbax_checkpointer: writes a directory of Orbax instead of a file, as does the flag
            `flax_use_orbax_checkpointing`.

    Raises:
        InvalidCheckpointError: if this or a later step exists, and `overwrite` is False.
        AlreadyExistsError: if something other than a checkpoint has its name.
        MPACheckpointingRequiredError: if an array is sharded over several processes.
        CheckpointStepError: if `step` is not a finite number.
        UnserializableValueError: if a value in `target` cannot be converted to bytes.

    >>> import tempfile
    >>> run = tempfile.mkdtemp()
    >>> for step in (1, 2, 3):
    ...     path = save_checkpoint(run, {"w": np.ones(2)}, step, keep=2)
    >>> available_steps(run), restore_checkpoint(run, {"w": np.zeros(2)})["w"].tolist()
    ([2, 3], [1.0, 1.0])
    """
    if orbax_checkpointer is not None or config.flax_use_orbax_checkpointing:
        options = (
            prefix,
            keep,
            overwrite,
            keep_every_n_steps,
            async_manager,
            orbax_checkpointer,
        )
        return save_checkpoint_multiprocess(ckpt_dir, target, step, *options)
    new = _new_checkpoint(ckpt_dir, step, prefix, overwrite)
    step, path = new
    state = to_state_dict(target)
    arrays = [
        leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)
    ]
    if not all(
        array.is_fully_addressable or array.is_fully_replicated
        for array in arrays
    ):
        raise errors.MPACheckpointingRequiredError(path, step)
    data = msgpack_serialize(state)

    def write() -> None:
        _write(path, data)
        _remove_others(ckpt_dir, prefix, new, keep, keep_every_n_steps)

    if async_manager is None:
        write()
    else:
        async_manager.save_async(write)
    return path


def save_checkpoint_multiprocess(
    ckpt_dir: Path,
    target: PyTree,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    orbax_checkpointer: Any = None,
) -> str:
    """Writes a directory of Orbax, which may have arrays of several processes; returns its path.

    Call it on all processes, which write to one file system. It returns when the directory is
    complete. See `save_checkpoint` for the other arguments and errors.

    Args:
        async_manager: its previous save is completed first.
        orbax_checkpointer: writes the state dict, by default as a pytree.

    Raises:
        ArgumentValueError: if the path is not in UTF-8, which array storage needs.
        MissingExtraError: if Orbax is not installed.
    """
    new = _new_checkpoint(ckpt_dir, step, prefix, overwrite)
    path = new.path
    _check_utf8(path)
    if async_manager is not None:
        async_manager.wait_previous_save()
    is_first = jax.process_index() == 0
    if is_first and os.path.isfile(path):
        _remove(path)
    state = to_state_dict(target)
    _check_dtypes(state)
    with _opened_checkpointer(path, orbax_checkpointer) as checkpointer:
        checkpointer.save(os.path.abspath(path), state, force=overwrite)
        if hasattr(checkpointer, "wait_until_finished"):
            checkpointer.wait_until_finished()
    if is_first:
        _remove_others(ckpt_dir, prefix, new, keep, keep_every_n_steps)
    return path


def _check_dtypes(state: PyTree) -> None:
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, np.ndarray | np.generic) and not is_stored_dtype(
            leaf.dtype
        ):
            raise errors.UnserializableValueError(
                f"{_name(key_path)!r} is an array of {leaf.dtype}, and Orbax takes arrays of "
                "numbers and booleans. Give texts as Python strings, convert other values to "
                "numbers, or leave them out."
            )


def restore_checkpoint(
    ckpt_dir: Path,
    target: PyTree,
    step: int | float | None = None,
    prefix: str = "checkpoint_",
    orbax_checkpointer: Any = None,
) -> PyTree:
    """Reads a checkpoint of `save_checkpoint` or Flax, in any of their formats.

    Args:
        ckpt_dir: directory of checkpoints, or the path of one.
        target: a tree like the saved one; None for its state dict. Arrays in Orbax's format are
            laid out like its `jax.Array`s or `jax.ShapeDtypeStruct`s with a sharding; a checkpoint
            in a single file is read as NumPy arrays and Python values.
        step: None for the newest, or for `target` itself if there is no checkpoint.
        orbax_checkpointer: reads directories of Orbax, by default as pytrees.

    Raises:
        MatchingCheckpointNotFoundError: if there is no checkpoint of `step`.
        StateDictMismatchError: if the structures of the checkpoint and `target` differ.
        DamagedCheckpointError: if the files are not as they were written.
        MPARestoreTargetRequiredError: if `target` lacks layouts for arrays of several processes.
        ArgumentValueError: if it is a directory, and its path is not in UTF-8.
        MissingExtraError: if it is a directory, and Orbax is not installed.

    >>> restore_checkpoint("/nothing/here", {"w": 0})
    {'w': 0}
    """
    path = _select_path(os.fspath(ckpt_dir), step, prefix)
    if path is None:
        return target
    if target is None:
        return read_checkpoint(path, None, orbax_checkpointer)
    state = read_checkpoint(path, to_state_dict(target), orbax_checkpointer)
    return from_state_dict(target, state)


def latest_checkpoint(
    ckpt_dir: Path, prefix: str = "checkpoint_"
) -> str | None:
    """Returns the path of the checkpoint with the largest step, or None."""
    checkpoints = _list_checkpoints(ckpt_dir, prefix)
    return checkpoints[-1].path if checkpoints else None


def available_steps(
    ckpt_dir: Path,
    prefix: str = "checkpoint_",
    step_type: type[int] | type[float] = int,
) -> list[int | float]:
    """Returns the steps of the checkpoints in a directory, ascending; it need not exist.

    Raises a CheckpointStepError if `step_type` is int and a step is not whole.
    """
    steps: list[int | float] = []
    for step, path in _list_checkpoints(ckpt_dir, prefix):
        if step_type(step) != step:
            raise errors.CheckpointStepError(
                f"the step of the checkpoint {path!r} is {step}, which is not of type "
                f"{step_type.__name__}; use `step_type=float`."
            )
        steps.append(step_type(step))
    return steps


def natural_sort(file_list: Iterable[str], signed: bool = True) -> list[str]:
    """Sorts names by the values of the numbers in them, which may be negative if `signed`.

    >>> natural_sort(["a10", "a9", "a1e3", "a-2"])
    ['a-2', 'a9', 'a10', 'a1e3']
    """

    def parts(name: str) -> list[str | float]:
        texts_and_numbers: list[str | float] = []
        for i, text in enumerate(_NUMBER.split(name)):
            if i % 2 == 0:
                texts_and_numbers.append(text)
            else:
                texts_and_numbers.append(
                    float(text) if signed else abs(float(text))
                )
        return texts_and_numbers

    return sorted(file_list, key=parts)


class _Checkpoint(NamedTuple):
    step: int | float
    path: str


def _check_step(step: Any) -> int | float:
    if hasattr(step, "item"):
        step = step.item()
    if type(step) not in (int, float) or not np.isfinite(step):
        raise errors.CheckpointStepError(
            f"the step is {step!r}; expected a finite int or float."
        )
    return step


def _new_checkpoint(
    ckpt_dir: Path, step: int | float, prefix: str, overwrite: bool
) -> _Checkpoint:
    """Returns the step and the path of a checkpoint to be written there."""
    step = _check_step(step)
    directory, name_prefix = _directory_and_name_prefix(ckpt_dir, prefix)
    path = os.path.join(directory, f"{name_prefix}{step}")
    steps = [
        checkpoint.step for checkpoint in _list_checkpoints(ckpt_dir, prefix)
    ]
    if steps and steps[-1] >= step and not overwrite:
        raise errors.InvalidCheckpointError(path, step)
    if os.path.islink(path) or (os.path.isdir(path) and not is_orbax(path)):
        raise errors.AlreadyExistsError(path)
    return _Checkpoint(step, path)


def _directory_and_name_prefix(ckpt_dir: Path, prefix: str) -> tuple[str, str]:
    """Returns the directory of checkpoints and the prefix of their names: either may have a `/`."""
    refuse_url(ckpt_dir, "ckpt_dir")
    directory, name_prefix = os.path.split(os.path.join(ckpt_dir, prefix))
    return directory or os.curdir, name_prefix


def _list_checkpoints(ckpt_dir: Path, prefix: str) -> list[_Checkpoint]:
    """Returns the checkpoints in a directory by ascending steps."""
    directory, name_prefix = _directory_and_name_prefix(ckpt_dir, prefix)
    if not os.path.isdir(directory):
        return []
    checkpoints: list[_Checkpoint] = []
    for name in os.listdir(directory):
        step_text = name.removeprefix(name_prefix)
        if name.startswith(name_prefix) and _NUMBER.fullmatch(step_text):
            is_whole = not re.search(r"[.eE]", step_text)
            step = int(step_text) if is_whole else float(step_text)
            checkpoints.append(_Checkpoint(step, os.path.join(directory, name)))
    return sorted(checkpoints)


def _select_path(
    ckpt_dir: str, step: int | float | None, prefix: str
) -> str | None:
    if step is None:
        if os.path.isfile(ckpt_dir) or is_orbax(ckpt_dir):
            return os.path.realpath(
                ckpt_dir
            )  # what the user names may be a link
        return latest_checkpoint(ckpt_dir, prefix)
    paths_by_step = dict(_list_checkpoints(ckpt_dir, prefix))
    if _check_step(step) not in paths_by_step:
        existing = "there are none"
        if paths_by_step:
            existing = f"existing steps: {', '.join(map(str, paths_by_step))}"
        raise errors.MatchingCheckpointNotFoundError(
            f"there is no checkpoint {prefix}{step} in {ckpt_dir!r}; {existing}. Use the step of "
            "an existing one, or None for the newest."
        )
    return paths_by_step[step]


def _temporary_path(path: str) -> str:
    """Returns a name next to `path` that neither Weft nor Flax takes for a checkpoint."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{uuid.uuid4().hex}")


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    being_written, replaced = _temporary_path(path), _temporary_path(path)
    try:
        with open(being_written, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if os.path.isdir(
            path
        ):  # a rename can replace a file, but not a directory
            os.rename(path, replaced)
        os.replace(being_written, path)
    except BaseException:
        if os.path.lexists(being_written):
            os.remove(being_written)
        raise
    for old_path in (replaced, path + ARRAYS_SUFFIX):
        if os.path.islink(old_path):
            os.remove(old_path)
        shutil.rmtree(old_path, ignore_errors=True)


def _remove_others(
    ckpt_dir: Path,
    prefix: str,
    new: _Checkpoint,
    keep: int,
    keep_every_n_steps: int | None,
) -> None:
    """Removes what `keep` does not retain, and checkpoints of later steps."""
    older: list[_Checkpoint] = []
    doomed: list[_Checkpoint] = []
    for checkpoint in _list_checkpoints(ckpt_dir, prefix):
        if checkpoint.path == new.path:
            continue
        if checkpoint.step < new.step:
            older.append(checkpoint)
        else:
            doomed.append(checkpoint)
    num_beyond_newest = max(0, len(older) + 1 - keep) if keep else 0
    last_retained_step = -float("inf")
    for checkpoint in older[:num_beyond_newest]:
        is_apart = checkpoint.step - last_retained_step >= (
            keep_every_n_steps or 0
        )
        if keep_every_n_steps and is_apart:
            last_retained_step = checkpoint.step
        else:
            doomed.append(checkpoint)
    for checkpoint in doomed:
        if os.path.isfile(checkpoint.path) or is_orbax(checkpoint.path):
            _remove(checkpoint.path)


def _remove(path: str) -> None:
    """Removes a checkpoint atomically: an interruption leaves no partial one under its name."""
    for part in (path, path + ARRAYS_SUFFIX):
        if os.path.isdir(part) and not os.path.islink(part):
            doomed = _temporary_path(part)
            os.rename(part, doomed)
            shutil.rmtree(doomed)
        elif os.path.lexists(part):
            os.remove(part)


def is_multi_device_array(value: Leaf) -> bool:
    """Returns whether devices hold different parts of an array.

    >>> is_multi_device_array(jax.numpy.ones(2))
    False
    """
    return isinstance(value, jax.Array) and not value.is_fully_replicated


def save_args_from_target(target: PyTree) -> PyTree:
    """Returns a tree like `target` with an `orbax.checkpoint.SaveArgs` for each leaf.

    >>> jax.tree.map(lambda args: type(args).__name__, save_args_from_target({"w": np.ones(2)}))
    {'w': 'SaveArgs'}
    """
    ocp = _import_orbax()
    return jax.tree.map(lambda _: ocp.SaveArgs(), target)


def restore_args_from_target(
    target: PyTree, mesh: Mesh | None = None
) -> PyTree:
    """Returns a tree like `target` with `orbax.checkpoint.RestoreArgs`, which restore its layout.

    Args:
        target: its JAX arrays are restored with their dtype and sharding, other leaves by their
            types; if there are no JAX arrays, all leaves as NumPy arrays.
        mesh: replaces the mesh of the arrays; an array without a `PartitionSpec` is replicated.

    >>> args = restore_args_from_target({"w": jax.numpy.ones(2), "n": 1})
    >>> args["w"].dtype.name, args["n"].restore_type.__name__
    ('float32', 'int')
    """
    ocp = _import_orbax()

    def layout(leaf: Leaf) -> jax.sharding.Sharding | None:
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or mesh is None:
            return sharding
        return NamedSharding(mesh, getattr(sharding, "spec", PartitionSpec()))

    layouts = jax.tree.map(layout, target)
    if not jax.tree.leaves(layouts):
        return jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target
        )
    return ocp.checkpoint_utils.construct_restore_args(
        target, layouts, set_global_shape=False
    )


def maybe_construct_transformations(
    target: PyTree, transforms: Any | None
) -> Any:
    """Returns `transforms`, by default those that keep entries of `target` that are None.

    >>> list(maybe_construct_transformations({"a": {"b": None}, "c": 1}, None))
    ['a/b']
    """
    if transforms is not None:
        return transforms
    leaves = traverse_util.flatten_dict(
        to_state_dict(target), keep_empty_nodes=True
    )
    keep_entry = _import_orbax().Transform(use_fallback=True)
    return {
        "/".join(path): keep_entry
        for path, leaf in leaves.items()
        if leaf is None
    }
