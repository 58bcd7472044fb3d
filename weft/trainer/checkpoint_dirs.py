"""Names of checkpoint directories, and their atomic creation and removal.

    checkpoints/
        step_00000100/          complete, older
        step_00000200/          complete; its manifest was its last file
        step_00000300.tmp/      being written, or left by a process that was killed

A `rename` creates the final name after every file is on the disk, and another `rename` removes it
before the first file is deleted. A directory with a final name is therefore always complete; any
fault in it is damage.
"""

import os
import re
import shutil
from collections.abc import Iterator

from weft.config.names import did_you_mean
from weft.errors import CheckpointNotFoundError

STEP_PREFIX = "step"
STEP_NUM_DIGITS = 8

_STEP_DIR = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_NUM_DIGITS},}})")
_BEING_WRITTEN, _REPLACED, _BEING_REMOVED = ".tmp", ".old", ".trash"


def build_step_dir(base_dir: str, *, step: int) -> str:
    """Returns the directory of a step's checkpoint.

    >>> build_step_dir("/run/checkpoints", step=200)
    '/run/checkpoints/step_00000200'
    """
    return os.path.join(base_dir, f"{STEP_PREFIX}_{step:0{STEP_NUM_DIGITS}d}")


def parse_step_from_dir(step_dir: str) -> int:
    """Returns the step of a checkpoint's directory, or raises CheckpointNotFoundError.

    >>> parse_step_from_dir("/run/checkpoints/step_00000200")
    200
    """
    name = os.path.basename(os.path.normpath(step_dir))
    match = _STEP_DIR.fullmatch(name)
    if match is None:
        raise CheckpointNotFoundError(
            f"{step_dir!r} is not the directory of a checkpoint; expected a name such as "
            f"{os.path.basename(build_step_dir('', step=200))!r}."
        )
    return int(match.group(1))


def step_dirs(base_dir: str) -> dict[int, str]:
    """Returns the directories in `base_dir` with names of checkpoints, by ascending step."""
    names = os.listdir(base_dir) if os.path.isdir(base_dir) else []
    found = {parse_step_from_dir(name): name for name in names if _STEP_DIR.fullmatch(name)}
    return {step: os.path.join(base_dir, found[step]) for step in sorted(found)}


def not_found(base_dir: str, step: int | None = None) -> CheckpointNotFoundError:
    """Returns the error about a missing checkpoint, with the steps that exist."""
    steps = step_dirs(base_dir)
    if step is None or not steps:
        return CheckpointNotFoundError(
            f"there is no checkpoint in {base_dir!r}. Use the directory that contains directories "
            f"such as {os.path.basename(build_step_dir('', step=200))!r}."
        )
    return CheckpointNotFoundError(
        f"there is no checkpoint of step {step} in {base_dir!r}. "
        f"{did_you_mean(str(step), map(str, steps))}"
    )


def dir_being_written(step_dir: str) -> str:
    """Returns the directory of an incomplete checkpoint."""
    return step_dir + _BEING_WRITTEN


def publish_dir(step_dir: str) -> None:
    """Renames a complete directory to its final name, replacing an older one."""
    replaced = step_dir + _REPLACED
    if os.path.exists(step_dir):
        _remove(replaced)
        os.rename(step_dir, replaced)
    os.rename(dir_being_written(step_dir), step_dir)
    fsync(os.path.dirname(step_dir))
    shutil.rmtree(replaced, ignore_errors=True)


def remove_dir(step_dir: str) -> None:
    """Removes a checkpoint atomically: a killed process leaves no partial one under its name."""
    doomed = step_dir + _BEING_REMOVED
    _remove(doomed)
    os.rename(step_dir, doomed)
    fsync(os.path.dirname(doomed))
    shutil.rmtree(doomed, ignore_errors=True)


def tidy(base_dir: str) -> None:
    """Removes the leftovers of killed processes. No process may be saving in `base_dir`."""
    for name in os.listdir(base_dir):
        path = os.path.join(base_dir, name)
        stem, suffix = os.path.splitext(path)
        if not _STEP_DIR.fullmatch(os.path.basename(stem)):
            continue
        if suffix == _REPLACED and os.path.isdir(path) and not os.path.lexists(stem):
            os.rename(path, stem)  # its replacement was never completed
        elif suffix in (_BEING_WRITTEN, _REPLACED, _BEING_REMOVED):
            _remove(path)


def _remove(path: str) -> None:
    """Removes a directory, or a file or link that has the name of one, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def files_below(directory: str) -> Iterator[str]:
    """Yields the relative paths, with `/`, of all files below a directory, sorted."""
    found = []
    for root, _, names in os.walk(directory):
        within = os.path.relpath(root, directory)
        found += [name if within == "." else f"{within}/{name}" for name in names]
    yield from sorted(found)


def fsync(path: str) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
