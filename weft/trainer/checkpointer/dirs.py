"""Names of checkpoint directories, and their atomic creation and removal.

    checkpoints/
        step_00000100/          complete, older
        step_00000200/          complete; its manifest was its last file
        step_00000300.tmp/      being written, or left by a process that was killed

A `rename` creates the final name after every file is on the disk, and another `rename` removes it
before the first file is deleted. A directory with a final name is complete; any fault is damage.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from weft.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    RunDirError,
    describe_error,
    did_you_mean,
)
from weft.serialization.directory import Directory, Entry
from weft.serialization.untrusted import utf8_fault
from weft.trainer.checkpointer import retries
from weft.typing import T

logger = logging.getLogger(__name__)

STEP_PREFIX = "step"
"""What the name of a step's directory begins with."""
STEP_NUM_DIGITS = 8
"""Digits of the step in the name of its directory."""

_BARRIER_SECONDS = 3600.0
_POLL_SECONDS = 0.02
_STEP_DIR = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_NUM_DIGITS},}})")
_BEING_WRITTEN, _REPLACED, _BEING_REMOVED = ".tmp", ".old", ".trash"


def build_step_dir(base_dir: str, *, step: int) -> str:
    """Returns the directory of a step's checkpoint, as `/run/checkpoints/step_00000200`."""
    return os.path.join(base_dir, f"{STEP_PREFIX}_{step:0{STEP_NUM_DIGITS}d}")


def parse_step_from_dir(step_dir: str) -> int:
    """Returns the step of a checkpoint's directory, or raises CheckpointNotFoundError."""
    name = os.path.basename(os.path.normpath(step_dir))
    match = _STEP_DIR.fullmatch(name)
    if match is None:
        raise CheckpointNotFoundError(
            f"{step_dir!r} is not the directory of a checkpoint; expected a name such as "
            f"{os.path.basename(build_step_dir('', step=200))!r}."
        )
    return int(match.group(1))


def step_dirs(base_dir: str) -> dict[int, str]:
    """Returns the directories in `base_dir` with names of checkpoints, by ascending step.

    Raises FileRefusedError if one is a link, or otherwise neither a directory nor a file.
    """
    entries = [
        entry for entry in _entries(base_dir) if _STEP_DIR.fullmatch(entry.name)
    ]
    Directory(base_dir).check(entries)
    paths = [os.path.join(base_dir, entry.name) for entry in entries]
    paths.sort(key=parse_step_from_dir)
    return {parse_step_from_dir(path): path for path in paths}


def has_checkpoint(base_dir: str) -> bool:
    """Returns whether a directory holds anything but leftovers of incomplete checkpoints."""
    leftovers = (_BEING_WRITTEN, _BEING_REMOVED)
    return any(not name.endswith(leftovers) for name in names(base_dir))


def _entries(base_dir: str) -> list[Entry]:
    """Returns what is in a directory, nothing if there is none.

    A directory that cannot be read is an error, or a run with checkpoints would begin at step 0.
    """
    try:
        return retries.read(base_dir, Directory(base_dir).entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def names(directory: str) -> list[str]:
    """Returns the sorted names in a directory, none if there is no directory."""
    return [entry.name for entry in _entries(directory)]


def exists(path: str) -> bool:
    """Returns whether there is an entry of this path, also a link; raises if that is unknown."""
    try:
        retries.read(path, lambda: os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def not_found_error(
    base_dir: str, step: int | None = None
) -> CheckpointNotFoundError:
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


def check_name(directory: str) -> None:
    """Raises a RunDirError if the path of a directory is not in UTF-8."""
    fault = utf8_fault(directory)
    if fault is not None:
        raise RunDirError(f"dir={directory!a} cannot be written: {fault}.")


def temporary_dir(step_dir: str) -> str:
    """Returns the directory of an incomplete checkpoint."""
    return step_dir + _BEING_WRITTEN


def commit_dir(step_dir: str) -> None:
    """Renames a complete directory to its final name, replacing an older one."""
    replaced_dir = step_dir + _REPLACED
    if exists(step_dir):
        # A process that is killed between both renames leaves this one, which is then renamed back.
        _make_free(replaced_dir)
        _rename(step_dir, replaced_dir)
    _rename(temporary_dir(step_dir), step_dir)
    retries.retried(lambda: fsync(os.path.dirname(step_dir)))
    remove_quietly(replaced_dir)


def remove_dir(step_dir: str) -> None:
    """Removes a checkpoint atomically: a killed process leaves no partial one under its name."""
    trash_dir = step_dir + _BEING_REMOVED
    _make_free(trash_dir)
    _rename(step_dir, trash_dir)
    retries.retried(lambda: fsync(os.path.dirname(trash_dir)))
    remove_quietly(trash_dir)


def _rename(path: str, new_path: str) -> None:
    def rename() -> None:
        # An error may have come after the name was changed, as over a network.
        if exists(path) or not exists(new_path):
            os.rename(path, new_path)

    retries.retried(rename)


def make_temporary_dir(step_dir: str) -> None:
    """Creates the directory of an incomplete checkpoint, empty, after removing all leftovers."""
    base_dir = os.path.dirname(step_dir)
    retries.retried(lambda: os.makedirs(base_dir, exist_ok=True))
    remove_leftovers(base_dir)
    _make_free(temporary_dir(step_dir))
    retries.retried(lambda: os.makedirs(temporary_dir(step_dir), exist_ok=True))


def remove_leftovers(base_dir: str) -> None:
    """Removes the leftovers of killed processes. No process may be saving in `base_dir`.

    What cannot be removed yet is left for the next time: a file that a process still has open keeps
    its directory from being empty on NFS.
    """
    for name in os.listdir(base_dir):
        path = os.path.join(base_dir, name)
        stem, _, suffix = name.partition(".")
        if not _STEP_DIR.fullmatch(stem):
            continue
        step_dir = os.path.join(base_dir, stem)
        if (
            f".{suffix}" == _REPLACED
            and os.path.isdir(path)
            and not exists(step_dir)
        ):
            _rename(path, step_dir)  # its replacement was never completed
        elif f".{suffix}".endswith((_BEING_WRITTEN, _REPLACED, _BEING_REMOVED)):
            try:
                _remove(path)
            except OSError as error:
                logger.info("%s cannot be removed yet: %s", path, error)


def _make_free(path: str) -> None:
    """Removes what has a name; what cannot be removed yet gets another one."""
    try:
        _remove(path)
    except OSError:
        stem = path.removesuffix(_BEING_REMOVED)
        os.rename(path, f"{stem}.{secrets.token_hex(4)}{_BEING_REMOVED}")


def remove_quietly(path: str) -> None:
    """Removes a directory, file or link; what cannot be removed stays."""
    # `shutil.rmtree` would open a FIFO, and wait for its writer.
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def _remove(path: str) -> None:
    """Removes a directory, or a file or link that has the name of one, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def list_files(directory: str) -> list[str]:
    """Returns the relative paths, with `/`, of all files below a directory, sorted."""
    return sorted(
        entry.name
        for entry in Directory(directory).walk()
        if not entry.is_folder
    )


def fsync(path: str) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(
    directory: str, name: str, purpose: str, parse: Callable[[Any], T]
) -> T:
    """Returns what `parse` makes of a JSON file below the directory of a checkpoint.

    Raises DamagedCheckpointError if the file cannot be read, or `parse` raises.
    """
    path = os.path.join(directory, name)
    try:
        return parse(
            retries.read(path, lambda: Directory(directory).read_json(name))
        )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise unreadable_error(directory, name, purpose, error) from error


def unreadable_error(
    directory: str, name: str, purpose: str, error: Exception
) -> DamagedCheckpointError:
    """Returns the error about a file of a checkpoint that does not hold what it should."""
    return DamagedCheckpointError(
        f"{os.path.join(directory, name)!r} cannot be read as {purpose} ({type(error).__name__}: "
        f"{error}). Restore another checkpoint, or use the version of Weft that wrote it.",
        damage=[f"{name}: cannot be read ({error})"],
    )


class CommitGroup:
    """Group of processes that write one checkpoint to a common directory.

    They write in threads, which must not use collectives since the main thread uses them for the
    next step. Instead, each leaves a file and renames it, which needs no space on a full disk:

        step_00000300.tmp/processes/1.writing      at the beginning
        step_00000300.tmp/processes/1.written      at the end
        step_00000300.tmp/processes/1.failed       after an error, with its message if that fits
        step_00000300.tmp/processes/1.full         after an error for lack of space
    """

    def __init__(self, ckpt_dir: str):
        self._dir = os.path.join(ckpt_dir, "processes")
        self._index = jax.process_index()
        self._count = jax.process_count()

    @contextlib.contextmanager
    def barrier(self) -> Iterator[None]:
        """Surrounds the writes of a process; the first process waits for all others at the end.

        It raises an OSError if another one failed or timed out.
        """
        if self._count == 1:
            yield
            return
        os.makedirs(self._dir, exist_ok=True)
        self._file(self._index, "writing").touch()
        try:
            yield
        except BaseException as error:
            text = describe_error(error)
            with contextlib.suppress(OSError):
                self._file(self._index, "writing").write_text(
                    text, encoding="utf-8"
                )
            # The first process may have failed too, and removed everything.
            with contextlib.suppress(OSError):
                state = "full" if is_disk_full(error) else "failed"
                self._rename(state)
            raise
        if self._index != 0:
            self._rename("written")
            return
        for process in range(1, self._count):
            self._wait_for(process)
        shutil.rmtree(self._dir)

    def _file(self, index: int, state: str) -> Path:
        return Path(self._dir, f"{index}.{state}")

    def _rename(self, state: str) -> None:
        os.rename(
            self._file(self._index, "writing"), self._file(self._index, state)
        )

    def _wait_for(self, process: int) -> None:
        deadline = time.monotonic() + _BARRIER_SECONDS
        while not self._file(process, "written").exists():
            for state, number in (
                ("full", errno.ENOSPC),
                ("failed", errno.EIO),
            ):
                file = self._file(process, state)
                if file.exists():
                    reason = file.read_text(encoding="utf-8") or os.strerror(
                        number
                    )
                    raise OSError(
                        number, f"process {process} of {self._count}: {reason}"
                    )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {process} of {self._count} has not written its part of the "
                    f"checkpoint within {_BARRIER_SECONDS:.0f} s"
                )
            time.sleep(_POLL_SECONDS)


_FULL_DISK_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# In messages of array storage in place of Python's errno.
_FULL_DISK_TEXT = re.compile(
    "ENOSPC|EDQUOT|EFBIG|No space left|quota exceeded|File too large"
)


def is_disk_full(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, reports a full disk or quota."""
    while error is not None:
        has_number = (
            isinstance(error, OSError) and error.errno in _FULL_DISK_NUMBERS
        )
        if has_number or _FULL_DISK_TEXT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
