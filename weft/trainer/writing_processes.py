"""Coordination of several processes that write one checkpoint, which the first one publishes.

They write in threads, which must not use collectives since the main thread uses them for the next
step. Instead, each leaves a file and renames it, which needs no space on a full disk:

    step_00000300.tmp/processes/1.writing      at the beginning
    step_00000300.tmp/processes/1.written      at the end
    step_00000300.tmp/processes/1.failed       after an error, with its message if that fits
    step_00000300.tmp/processes/1.full         after an error for lack of space
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator

import jax

from weft.trainer.disk_room import lacks_room

_TIMEOUT_SECONDS = 3600.0
_POLL_SECONDS = 0.02


class WritingProcesses:
    """Group of processes that write one checkpoint to a common directory."""

    def __init__(self, ckpt_dir: str):
        self._dir = os.path.join(ckpt_dir, "processes")
        self._index, self._count = jax.process_index(), jax.process_count()

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Surrounds the writes of a process; in the first one it waits for all others.

        It raises an OSError in the first process if another one failed or timed out.
        """
        if self._count == 1:
            yield
            return
        os.makedirs(self._dir, exist_ok=True)
        with open(self._file(self._index, "writing"), "w", encoding="utf-8"):
            pass
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        if self._index:
            self._rename("written")
            return
        for other in range(1, self._count):
            self._wait_for(other)
        shutil.rmtree(self._dir)

    def _file(self, index: int, state: str) -> str:
        return os.path.join(self._dir, f"{index}.{state}")

    def _rename(self, state: str) -> None:
        os.rename(self._file(self._index, "writing"), self._file(self._index, state))

    def _fail(self, error: BaseException) -> None:
        text, mine = f"{type(error).__name__}: {error}", self._file(self._index, "writing")
        with contextlib.suppress(OSError), open(mine, "w", encoding="utf-8") as file:
            file.write(text)
        # The first process may have failed too, and removed everything.
        with contextlib.suppress(OSError):
            self._rename("full" if lacks_room(error) else "failed")

    def _wait_for(self, other: int) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not os.path.exists(self._file(other, "written")):
            for state, number in (("full", errno.ENOSPC), ("failed", errno.EIO)):
                if os.path.exists(self._file(other, state)):
                    with open(self._file(other, state), encoding="utf-8") as file:
                        what = file.read() or os.strerror(number)
                    raise OSError(number, f"process {other} of {self._count}: {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {other} of {self._count} has not written its part of the checkpoint "
                    f"within {_TIMEOUT_SECONDS:.0f} s"
                )
            time.sleep(_POLL_SECONDS)
