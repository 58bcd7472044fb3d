"""Lock of a run's directory, so that one run at a time writes to it.

    run.lock    the owner: its host, process id and time of start

The owner holds the kernel's lock of the file, which ends with it, however it ends, and every few
seconds it sets the file's modification time. On the machine of the owner the kernel's lock decides.
It may be unknown to other machines that share the file system, and some file systems have none. A
newcomer then watches the file: if it changes, the owner is alive; if it does not for a minute, the
owner is gone. No clocks are compared. An owner that was frozen for that long finds the name of
another in the file, and stops before its next save.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from weft.core.tracing import ThreadStack
from weft.errors import (
    RunDirError,
    RunDirInUseError,
    RunDirMovedError,
    RunDirTakenError,
)
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_local_path, parse_json
from weft.trainer.run_dir import (
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    check_writable,
    free_dir,
    unwritable_error,
)

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"

_BEAT_SECONDS = 5.0
_POLL_SECONDS = 1.0
_SILENT_POLLS = 60
_POLLS_PER_MESSAGE = 10
_LOOK_SECONDS = 0.05
"""Time after which a lock that `is_in_use` held for its look is free again."""

# Errors of `flock` on file systems without it.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class _Owner(NamedTuple):
    """Owner of a directory.

    Attributes:
        machine: identity of the running kernel: processes on it see each other's locks.
        token: distinguishes two runs of one process.
    """

    host: str
    pid: int
    started: str
    machine: str
    token: str

    def __str__(self) -> str:
        return (
            f"a run on host {self.host}, pid {self.pid}, started {self.started}"
        )


class RunLock:
    """Lock of a run's directory, a context that this process holds; see also `run_lock`."""

    def __init__(self, directory: str):
        check_local_path(directory, "dir")
        self.directory = os.path.realpath(directory)
        self._given_dir = directory
        self._path = Path(self.directory, LOCK_FILE)
        self._owner = _Owner(
            socket.gethostname(),
            os.getpid(),
            datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
            _machine(),
            uuid.uuid4().hex,
        )
        self.last_sign_of_life: float | None = None
        """Time of that of an owner before, which was killed; None if there is none."""
        self._created_dirs: list[Path] = []
        self._fd: int | None = None
        self._last_look = (
            math.inf
        )  # when the file was last seen to be of this owner
        self._taken_by: _Owner | None = None
        self._folder: int | None = None  # the handle of the directory
        self._moved_to: str | None = None  # "renamed to …", or "removed"
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="weft-run-lock", daemon=True
        )

    @property
    def token(self) -> str:
        """Text that distinguishes this lock from all others."""
        return self._owner.token

    def check(self) -> None:
        """Raises an error if the directory is no longer that of this run; else costs nothing.

        Raises:
            RunDirTakenError: if another run has taken it.
            RunDirMovedError: if it was renamed or removed.
        """
        if (
            time.monotonic() - self._last_look > 2 * _BEAT_SECONDS
        ):  # this process was frozen
            self._look()
        if self._taken_by is not None:
            raise RunDirTakenError(
                f"dir={self._given_dir!r} was taken by {self._taken_by}, while this process was "
                f"frozen for more than {_SILENT_POLLS * _POLL_SECONDS:g} s or "
                f"{LOCK_FILE} was removed. Nothing more is written here; the other run continues "
                "from the last checkpoint."
            )
        if self._moved_to is not None:
            raise RunDirMovedError(
                f"dir={self._given_dir!r} was {self._moved_to} while this run was writing to it. "
                "Nothing more is written. Start the run again with the directory where it is now; "
                "it continues from the last checkpoint."
            )

    def check_now(self) -> None:
        """Looks at the directory before something is written to it; raises as `check`."""
        if self._folder is not None:
            self._look()
        self.check()

    # Taking the directory.

    def __enter__(self) -> "RunLock":
        """Takes the directory, and creates it if it is missing.

        Raises:
            RunDirInUseError: if another run is writing to it.
            RunDirError: if it cannot be written.
        """
        directory = Path(self.directory)
        check_writable(directory)
        missing_dirs = [
            path
            for path in (directory, *directory.parents)
            if not path.exists()
        ]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._created_dirs = missing_dirs
            self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self._fd = self._wait_for_file()
            data = json.dumps(self._owner._asdict()).encode()
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
            os.fsync(self._fd)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError) and not isinstance(
                error, RunDirError
            ):
                raise unwritable_error(directory, error) from error
            raise
        _OPEN.add(self)
        self._last_look = -math.inf
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _wait_for_file(self) -> int:
        """Returns the open lock file, as soon as it has no living owner."""
        last_state = None
        polls = 0
        while True:
            fd, is_writable = self._open()
            keeps_file = False
            try:
                is_locked = _try_lock(fd)  # None without locks
                owner, state = _read(fd)
                if is_locked and not self._is_current(fd):
                    continue  # removed by an owner that has just ended
                is_on_machine = (
                    owner is not None and owner.machine == self._owner.machine
                )
                is_empty = not state.data
                is_held = is_locked is False
                is_free = not is_held and (
                    is_empty or (is_on_machine and is_locked is True)
                )
                is_alive = last_state is not None and state != last_state
                is_silent = polls >= _SILENT_POLLS
                if not is_free and (
                    is_alive or (is_held and (is_on_machine or is_silent))
                ):
                    raise self._in_use_error(owner, state)
                if is_free or is_silent:
                    if not is_empty:
                        self.last_sign_of_life = state.mtime_ns / 1e9
                    if is_writable:
                        keeps_file = True
                        return fd
                    self._path.unlink()
                    continue
            finally:
                if not keeps_file:
                    os.close(fd)
            if polls % _POLLS_PER_MESSAGE == 0:
                logger.warning(
                    "dir=%r was last used by %s. Waiting %g s to see whether it is alive.",
                    self._given_dir,
                    owner or "an unknown run",
                    (_SILENT_POLLS - polls) * _POLL_SECONDS,
                )
            last_state = state
            polls += 1
            time.sleep(_POLL_SECONDS)

    def _open(self) -> tuple[int, bool]:
        try:
            return Directory(self.directory).open_to_change(LOCK_FILE), True
        except PermissionError:  # left by another user
            return Directory(self.directory).descriptor(
                LOCK_FILE, os.O_RDONLY
            ), False

    def _is_current(self, fd: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), self._path.lstat())
        return False

    def _in_use_error(
        self, owner: _Owner | None, state: "_FileState"
    ) -> RunDirInUseError:
        silence = ""
        if owner is not None and owner.machine == self._owner.machine:
            seconds = state.seconds_since_beat()
            if seconds > _SILENT_POLLS * _POLL_SECONDS:
                silence = f" It has been frozen for {seconds:.0f} s."
        unused_dir = free_dir(self._given_dir)
        return RunDirInUseError(
            f"dir={self._given_dir!r} is in use by {owner or 'another run'}.{silence} Wait for its "
            f"end, stop it, or choose another directory, such as dir={unused_dir!r}.",
            free_dir=unused_dir,
        )

    # Holding it.

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_SECONDS):
            self._look()
            if self._taken_by is None and self._fd is not None:
                with contextlib.suppress(OSError):  # the disk fails
                    os.utime(self._fd)

    def _look(self) -> None:
        """Reads where the directory and whose the file is."""
        if self._folder is not None:
            self._moved_to = self._change_of_directory(self._folder)
        run = Directory(self.directory)
        with contextlib.suppress(OSError), run.open(LOCK_FILE) as file:
            owner, _ = _read(file.fileno())
            if owner is not None and owner.token != self._owner.token:
                self._taken_by = owner
        self._last_look = time.monotonic()

    def _change_of_directory(self, folder: int) -> str | None:
        """Returns what has become of the directory with a handle, None if it is in its place."""
        status = os.fstat(folder)
        try:
            if os.path.samestat(status, os.stat(self.directory)):
                return None
        except FileNotFoundError:
            pass
        except OSError:  # the disk fails
            return None
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{folder}")
            if os.path.samestat(status, os.stat(path)):
                return f"renamed to {path!r}"
        if status.st_nlink == 0:
            return "removed"
        return "renamed"

    def release(self) -> None:
        """Removes the file, and directories that were created and are empty."""
        self._released.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._fd is not None:
            self._look()
            if self._taken_by is None and self._is_current(self._fd):
                with contextlib.suppress(OSError):
                    self._path.unlink()
            _OPEN.discard(self)
            os.close(self._fd)
            self._fd = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        self._last_look = math.inf
        with contextlib.suppress(OSError):
            for path in self._created_dirs:
                path.rmdir()

    def forget(self) -> None:
        """Closes the file in a forked child, which would keep the lock when its parent dies."""
        for fd in (self._fd, self._folder):
            if fd is not None:
                os.close(fd)
        self._fd = self._folder = None


_HELD = ThreadStack[RunLock]()
_OPEN: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_OPEN):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


@contextlib.contextmanager
def run_lock(directory: str) -> Iterator[RunLock]:
    """Owns a run's directory within the block, so that no other run writes there.

    Only the first of several processes takes the lock. Nested blocks of a thread share one lock.

    Raises:
        RunDirInUseError: if another run is writing to the directory.
        RunDirError: if the directory cannot be written.
    """
    for lock in _HELD.items:
        if lock.directory == os.path.realpath(directory):
            yield lock
            return
    lock = RunLock(directory)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(lock)
        stack.enter_context(_HELD.push(lock))
        yield lock


def lock_token(directory: str) -> str | None:
    """Returns the token of a directory's lock, None if nobody holds one that can be read."""
    with (
        contextlib.suppress(OSError),
        Directory(directory).open(LOCK_FILE) as file,
    ):
        owner, _ = _read(file.fileno())
        if owner is not None:
            return owner.token
    return None


def is_in_use(directory: str) -> bool:
    """Returns whether a run is writing to a directory; on another machine, by its last beat."""
    try:
        fd = Directory(directory).descriptor(LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        owner, state = _read(fd)
        is_on_machine = owner is not None and owner.machine == _machine()
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if is_on_machine:
                return False  # it would hold the lock
        return (
            is_on_machine
            or state.seconds_since_beat() < _SILENT_POLLS * _POLL_SECONDS
        )
    finally:
        os.close(fd)


def move_aside(directory: str) -> str | None:
    """Renames the directory of a run to a free name; returns it, or None if there is no run.

    Raises:
        RunDirInUseError: if a run is writing to the directory.
        RunDirError: if it is not the directory of a run, or cannot be renamed.
    """
    if not os.path.isdir(directory) or not os.listdir(directory):
        return None
    with RunLock(directory):
        names = {CONFIG_FILE, CHECKPOINTS_DIR}
        if not names & set(os.listdir(directory)):
            raise RunDirError(
                f"dir={directory!r} is not the directory of a run: it has neither {CONFIG_FILE} "
                f"nor {CHECKPOINTS_DIR}, so it is not moved aside. Choose another directory."
            )
        target = free_dir(directory, separator=".", first=1)
        try:
            os.rename(os.path.normpath(directory), target)
        except OSError as error:
            raise RunDirError(
                f"dir={directory!r} cannot be moved to {target!r}: {error.strerror}. Choose "
                "another directory."
            ) from error
        with contextlib.suppress(FileNotFoundError):
            Directory(target).remove(LOCK_FILE)
    return target


def _machine() -> str:
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id")
            .read_text(encoding="utf-8")
            .strip()
        )
    except OSError:
        return socket.gethostname()


def _try_lock(fd: int) -> bool | None:
    """Returns whether the kernel's lock was free; None if the file system has no locks."""
    for seconds in (_LOOK_SECONDS, 0):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(seconds)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
    return False


class _FileState(NamedTuple):
    """State of the lock's file; it changes with each beat of the owner."""

    data: bytes
    mtime_ns: int

    def seconds_since_beat(self) -> float:
        return time.time() - self.mtime_ns / 1e9


def _read(fd: int) -> tuple[_Owner | None, _FileState]:
    """Returns the owner, None if unknown, and the state of the file."""
    state = _FileState(os.pread(fd, 4096, 0), os.fstat(fd).st_mtime_ns)
    try:
        owner = _Owner(**parse_json(state.data))
    except (ValueError, TypeError):
        owner = None
    return owner, state
