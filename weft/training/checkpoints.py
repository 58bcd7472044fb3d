"""A directory of checkpoints, as Flax writes and reads it.

    run/
        checkpoint_10           a file
        checkpoint_20/          or a directory; `weft.training.checkpoint_formats` tells them apart

Names are a prefix and the step, nothing else. A checkpoint is written under a hidden name, and
renamed when it is whole. Trainers with arrays on several processes, or that save while they train,
want `weft.trainer.checkpointer` instead.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from weft.errors import (
    AlreadyExistsError,
    CheckpointStepError,
    InvalidCheckpointError,
    MatchingCheckpointNotFoundError,
    MPACheckpointingRequiredError,
)
from weft.serialization import from_state_dict, msgpack_serialize, to_state_dict
from weft.training.checkpoint_formats import ARRAYS_SUFFIX, is_orbax, read_checkpoint

_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")

Path = str | os.PathLike[str]


def save_checkpoint(
    ckpt_dir: Path,
    target: Any,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
) -> str:
    """Writes a checkpoint that Flax reads as well, then removes old ones. Call it on one process.

    Args:
        ckpt_dir: the directory; made if there is none. "" is the current one, as for `pathlib`; `~`
            is not expanded.
        target: a tree, such as a `TrainState` or a dict of variables.
        step: its number; must be larger than those before.
        prefix: what the name begins with, before the step.
        keep: how many of the newest checkpoints stay, this one included; 0 keeps all.
        overwrite: whether checkpoints of this step and of later ones are removed.
        keep_every_n_steps: of the older checkpoints, those so far apart stay as well.

    Returns:
        The path of the file.

    Raises:
        InvalidCheckpointError: if there is this step, or a later one, and `overwrite` is False.
        AlreadyExistsError: if something that is no checkpoint has its name.
        MPACheckpointingRequiredError: if an array is spread over several processes.
        CheckpointStepError: if `step` is not a finite number.
        UnserializableValueError: if `target` holds what has no form as bytes.

    Example:
        >>> import tempfile
        >>> run = tempfile.mkdtemp()
        >>> for step in (1, 2, 3):
        ...     path = save_checkpoint(run, {"w": np.ones(2)}, step, keep=2)
        >>> available_steps(run), restore_checkpoint(run, {"w": np.zeros(2)})["w"].tolist()
        ([2, 3], [1.0, 1.0])
    """
    step = _checked(step)
    directory, start = _directory_and_start(ckpt_dir, prefix)
    path = os.path.join(directory, f"{start}{step}")
    if not overwrite and any(there >= step for there, _ in _found(ckpt_dir, prefix)):
        raise InvalidCheckpointError(path, step)
    state = to_state_dict(target)
    if any(_is_spread(leaf) for leaf in jax.tree.leaves(state)):
        raise MPACheckpointingRequiredError(path, step)
    if os.path.isdir(path) and not is_orbax(path):
        raise AlreadyExistsError(path)
    _write(path, msgpack_serialize(state))
    _remove_others(ckpt_dir, prefix, (step, path), keep, keep_every_n_steps)
    return path


def restore_checkpoint(
    ckpt_dir: Path, target: Any, step: int | float | None = None, prefix: str = "checkpoint_"
) -> Any:
    """Reads a checkpoint that `save_checkpoint` or Flax has written, in any of their formats.

    Args:
        ckpt_dir: the directory of the checkpoints, or the path of one.
        target: a tree like the one that was saved; None for its state dict. What Orbax wrote gets
            the layouts of its `jax.Array`s, or `jax.ShapeDtypeStruct`s with a sharding. What a file
            holds comes back as NumPy arrays and Python values.
        step: which one; None for the newest.
        prefix: what the names begin with, before the step.

    Returns:
        A tree like `target` with the saved values; `target` itself, if there is no checkpoint and
        no `step` is asked for.

    Raises:
        MatchingCheckpointNotFoundError: if there is no checkpoint of `step`.
        StateDictMismatchError: if the checkpoint and `target` have different structures.
        DamagedCheckpointError: if the files are not as they were written.
        MPARestoreTargetRequiredError: if there are arrays of several processes, and `target` does
            not say how to lay them out.
        MissingExtraError: if it is a directory, and Orbax is not installed.

    Example:
        >>> restore_checkpoint("/nothing/here", {"w": 0})
        {'w': 0}
    """
    path = _chosen(os.fspath(ckpt_dir), step, prefix)
    if path is None:
        return target
    if target is None:
        return read_checkpoint(path, None)
    return from_state_dict(target, read_checkpoint(path, to_state_dict(target)))


def latest_checkpoint(ckpt_dir: Path, prefix: str = "checkpoint_") -> str | None:
    """The path of the checkpoint with the largest step; None if there is none.

    Args:
        ckpt_dir: the directory of the checkpoints. There may be none.
        prefix: what the names begin with, before the step.
    """
    found = _found(ckpt_dir, prefix)
    return found[-1][1] if found else None


def available_steps(
    ckpt_dir: Path, prefix: str = "checkpoint_", step_type: type[int] | type[float] = int
) -> list[int | float]:
    """The steps of the checkpoints in a directory, ascending.

    Args:
        ckpt_dir: the directory of the checkpoints. There may be none.
        prefix: what the names begin with, before the step.
        step_type: what to return them as.

    Raises:
        CheckpointStepError: if `step_type` is int and a step is not whole.
    """
    found = _found(ckpt_dir, prefix)
    for step, path in found:
        if step_type(step) != step:
            raise CheckpointStepError(
                f"the step of the checkpoint {path!r} is {step}, which is no "
                f"{step_type.__name__}; give `step_type=float`."
            )
    return [step_type(step) for step, _ in found]


def natural_sort(file_list: Iterable[str], signed: bool = True) -> list[str]:
    """Sorts names so that the numbers in them count as numbers.

    Args:
        file_list: the names.
        signed: whether a `-` before a number makes it negative.

    Example:
        >>> natural_sort(["a10", "a9", "a1e3", "a-2"])
        ['a-2', 'a9', 'a10', 'a1e3']
    """

    def parts(name: str) -> list[str | float]:
        # Every second part is a number.
        texts = _NUMBER.split(name)
        numbers = [float(text) if signed else abs(float(text)) for text in texts[1::2]]
        return [numbers[i // 2] if i % 2 else text for i, text in enumerate(texts)]

    return sorted(file_list, key=parts)


def _checked(step: Any) -> int | float:
    step = step.item() if hasattr(step, "item") else step
    if type(step) not in (int, float) or not np.isfinite(step):
        raise CheckpointStepError(f"the step is {step!r}; give a finite int or float.")
    return step


def _directory_and_start(ckpt_dir: Path, prefix: str) -> tuple[str, str]:
    """Where checkpoints are, and what their names begin with: the only place that joins the two.

    So a checkpoint has one path here, however its directory is written.
    """
    directory, start = os.path.split(os.path.join(ckpt_dir, prefix))
    return directory or os.curdir, start


def _found(ckpt_dir: Path, prefix: str) -> list[tuple[int | float, str]]:
    """The steps and paths of all checkpoints, ascending; other files are passed over."""
    directory, start = _directory_and_start(ckpt_dir, prefix)
    found = []
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        text = name.removeprefix(start)
        if name.startswith(start) and _NUMBER.fullmatch(text):
            number = float(text) if re.search(r"[.eE]", text) else int(text)
            found.append((number, os.path.join(directory, name)))
    return sorted(found)


def _chosen(ckpt_dir: str, step: int | float | None, prefix: str) -> str | None:
    if step is None:
        itself = os.path.isfile(ckpt_dir) or is_orbax(ckpt_dir)
        return ckpt_dir if itself else latest_checkpoint(ckpt_dir, prefix)
    found = dict(_found(ckpt_dir, prefix))
    if _checked(step) not in found:
        there = f"those there are of {', '.join(map(str, found))}" if found else "there is none"
        raise MatchingCheckpointNotFoundError(
            f"there is no checkpoint {prefix}{step} in {ckpt_dir!r}; {there}. Give the step of one "
            "that is there, or None for the newest."
        )
    return found[step]


def _is_spread(leaf: Any) -> bool:
    """Whether no process has all of the values."""
    return (
        isinstance(leaf, jax.Array)
        and not leaf.is_fully_addressable
        and not leaf.is_fully_replicated
    )


def _hidden(path: str) -> str:
    """A name beside `path` that neither Weft nor Flax takes for a checkpoint."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{uuid.uuid4().hex}")


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    being_written, replaced = _hidden(path), _hidden(path)
    try:
        with open(being_written, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if os.path.isdir(path):  # a file can take the place of a file at once, not of a directory
            os.rename(path, replaced)
        os.replace(being_written, path)
    except BaseException:
        if os.path.exists(being_written):
            os.remove(being_written)
        raise
    for of_the_old in (replaced, path + ARRAYS_SUFFIX):
        shutil.rmtree(of_the_old, ignore_errors=True)


def _remove_others(
    ckpt_dir: Path, prefix: str, new: tuple[int | float, str], keep: int, apart: int | None
) -> None:
    others = [entry for entry in _found(ckpt_dir, prefix) if entry[1] != new[1]]
    older = [entry for entry in others if entry[0] < new[0]]
    doomed = [path for _, path in others[len(older) :]]
    last_kept = -float("inf")
    too_many = max(0, len(older) + 1 - keep) if keep else 0
    for step, path in older[:too_many]:
        if apart and step - last_kept >= apart:
            last_kept = step
        else:
            doomed.append(path)
    for path in doomed:
        if os.path.isfile(path) or is_orbax(path):
            _remove(path)


def _remove(path: str) -> None:
    """Removes a checkpoint. Killed at any moment, it leaves no half of one under its name."""
    for part in (path, path + ARRAYS_SUFFIX):
        if os.path.isdir(part):
            doomed = _hidden(part)
            os.rename(part, doomed)
            shutil.rmtree(doomed)
        elif os.path.exists(part):
            os.remove(part)
