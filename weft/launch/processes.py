"""Groups of processes on this machine that start and end together.

Two threads watch each process: one reads its output, one waits for its end. Ends arrive in a queue
in order, so that the first failure is the reported one. After a failure the others are asked to
stop, and killed after a grace period. Signals that ask this process to stop are forwarded to all;
if it is killed, the kernel asks them to stop.
"""

import collections
import contextlib
import dataclasses
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, BinaryIO, NamedTuple

from weft.distributed.watchdog import OTHER_STOP_SIGNALS, handle_stop_signals
from weft.errors import JobConfigError
from weft.serialization.untrusted import check_local_path, printable

LAST_LINES = 20


class Ended(NamedTuple):
    """Process that has ended.

    Attributes:
        code: exit code as in a shell: 128 plus the signal's number for a killed process.
        signal_name: the signal that killed it, if any.
    """

    index: int
    pid: int
    code: int
    signal_name: str | None
    seconds: float
    last_lines: tuple[str, ...]


class Outcome(NamedTuple):
    """Ends of a group of processes.

    Attributes:
        failed: the first process that failed on its own, if any.
        stopped_by: name of the signal that stopped the processes, if any; either it was forwarded
            to them, or one of them has the exit code of a process that handled it.
        is_timed_out: whether they were asked to stop because their time was over.
    """

    ended: tuple[Ended, ...]
    failed: Ended | None
    stopped_by: str | None
    is_timed_out: bool = False

    @property
    def code(self) -> int:
        """Exit code of the group: of the first failed process, or the first that is not 0."""
        if self.failed is not None:
            return self.failed.code
        for end in self.ended:
            if end.code:
                return end.code
        return 0


# Makes the kernel send SIGTERM when this process ends, then executes the program. A `preexec_fn`
# would not need it, but is unsafe after a fork of a process with JAX's threads.
_PR_SET_PDEATHSIG = 1
_UNTIL_PARENT_ENDS = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):  # else it has ended before
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def end_with_parent(command: Sequence[str]) -> list[str]:
    """Wraps a command so that its process is asked to stop when this process is killed."""
    if sys.platform != "linux":
        return list(command)
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _UNTIL_PARENT_ENDS,
        str(os.getpid()),
        *command,
    ]


@dataclasses.dataclass(eq=False, repr=False)  # an environment may have secrets
class ProcessGroup:
    """Runs one command as several processes.

    Args:
        say: called with the process id and each line of output.
        log_paths: output file of each process, to append to, instead of `say`.
        log_heading: first line of what is appended.
        grace_seconds: time to exit after a forwarded signal.
        failure_grace_seconds: time to exit after another process failed.
        stop_after_seconds: time after which the processes are asked to stop.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    _: dataclasses.KW_ONLY
    say: Callable[[int, str], None]
    log_paths: Sequence[str] | None = None
    log_heading: str = ""
    grace_seconds: float
    failure_grace_seconds: float
    stop_after_seconds: float = math.inf

    def __post_init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._log_starts: list[int] = []
        self._lines = [
            collections.deque[str](maxlen=LAST_LINES) for _ in self.environments
        ]
        self._ends: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._stopped_by: str | None = None
        self._is_timed_out = False
        self._deadline: float | None = None

    def run(self) -> Outcome:
        """Starts the processes and waits for all to end.

        Raises JobConfigError if the program cannot be started, or a log cannot be written.
        """
        self._started = time.monotonic()
        try:
            with handle_stop_signals(self._on_signal):
                for index in range(len(self.environments)):
                    self._start(index)
                return self._wait()
        finally:
            self._kill_all()

    # Starting.

    def _start(self, index: int) -> None:
        with contextlib.ExitStack() as stack:
            output: int | BinaryIO = subprocess.PIPE
            if self.log_paths is not None:
                log = _open_log(self.log_paths[index])
                output = stack.enter_context(log)
                if self.log_heading:
                    _write_heading(log, self.log_heading)
                self._log_starts.append(log.tell())
            try:
                path = self.environments[index].get("PATH")
                if shutil.which(self.command[0], path=path) is None:
                    raise FileNotFoundError(
                        f"there is no program {self.command[0]!r}"
                    )
                process = subprocess.Popen(
                    end_with_parent(self.command),
                    env=dict(self.environments[index]),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C should reach each process once
                )
            except OSError as error:
                raise JobConfigError(
                    f"command={list(self.command)!r} cannot be started: {error}. Name a program on "
                    "the PATH."
                ) from error
        self._processes.append(process)

        def watch() -> None:
            process.wait()
            self._ends.put((index, time.monotonic()))

        threading.Thread(target=watch, daemon=True).start()
        if process.stdout is not None:
            reader = threading.Thread(
                target=self._read, args=(index, process.stdout), daemon=True
            )
            reader.start()
            self._readers.append(reader)
        if self._stopped_by is not None:  # started after the signal
            process.send_signal(signal.Signals[self._stopped_by])

    def _read(self, index: int, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace").rstrip("\r\n")
                self._lines[index].append(text)
                self.say(index, text)

    # Waiting.

    def _wait(self) -> Outcome:
        ends: list[Ended] = []
        first_failure: Ended | None = None
        while len(ends) < len(self._processes):
            self._stop_if_time_is_over()
            try:
                index, end_time = self._ends.get(timeout=0.1)
            except queue.Empty:
                if (
                    self._deadline is not None
                    and time.monotonic() >= self._deadline
                ):
                    self._kill_all()
                continue
            end = self._describe_end(index, end_time)
            ends.append(end)
            if end.code and first_failure is None:
                # A signal that one process has handled is meant for all.
                handled_signal = _stop_signal(end)
                if self._stopped_by is None:
                    if handled_signal is None:
                        first_failure = end
                    self._stopped_by = handled_signal
                    self._forward_signal(
                        signal.SIGTERM
                    )  # asks the others to stop
                self._end_within(
                    self.grace_seconds
                    if handled_signal
                    else self.failure_grace_seconds
                )
        return Outcome(
            tuple(ends), first_failure, self._stopped_by, self._is_timed_out
        )

    def _stop_if_time_is_over(self) -> None:
        seconds = time.monotonic() - self._started
        is_stopping = self._deadline is not None
        if seconds >= self.stop_after_seconds and not is_stopping:
            self._on_signal(signal.SIGTERM)
            self._is_timed_out = True

    def _describe_end(self, index: int, end_time: float) -> Ended:
        if self._readers:
            # A child process may keep the pipe open: use the lines that were read so far.
            self._readers[index].join(timeout=1)
        process = self._processes[index]
        code, signal_name = process.returncode, None
        if code < 0:
            signal_name = signal.Signals(-code).name
            code = 128 - code
        lines = tuple(self._lines[index])
        if self.log_paths is not None:
            lines = last_lines(self.log_paths[index], self._log_starts[index])
        return Ended(
            index,
            process.pid,
            code,
            signal_name,
            end_time - self._started,
            lines,
        )

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(
            self._deadline or float("inf"), time.monotonic() + seconds
        )

    def _forward_signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _kill_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its children

    def _on_signal(self, number: signal.Signals) -> None:
        self._is_timed_out = False  # a user's signal is not for a restart
        # The terminal was closed: the processes should save and stop.
        forwarded = signal.SIGTERM if number == signal.SIGHUP else number
        self._stopped_by = self._stopped_by or forwarded.name
        self._end_within(self.grace_seconds)
        self._forward_signal(forwarded)


def _stop_signal(ended: Ended) -> str | None:
    """Returns the signal that a process has handled, which its exit code tells, if any."""
    numbers = (signal.SIGTERM, signal.SIGINT, *OTHER_STOP_SIGNALS)
    handled = {128 + number: number.name for number in numbers}
    return None if ended.signal_name else handled.get(ended.code)


def _open_log(path: str) -> BinaryIO:
    check_local_path(path, "log_dir")
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        return open(path, "ab")
    except OSError as error:
        raise JobConfigError(
            f"the log {path!r} cannot be written: {error}. Name another log_dir."
        ) from error


def _write_heading(log: BinaryIO, heading: str) -> None:
    # What was killed may have left half a line.
    separator = "\n" if log.tell() else ""
    with contextlib.suppress(OSError):  # a full disk does not stop a start
        log.write(f"{separator}{heading}\n".encode())
        log.flush()


def last_lines(path: str, start: int = 0) -> tuple[str, ...]:
    """Returns the last lines of a file that may be large, of those that begin at `start`."""
    with open(path, "rb") as file:
        file.seek(max(start, os.path.getsize(path) - 64_000))
        return tuple(
            file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        )


class PrefixedLines:
    """Printer of lines of several processes, prefixed with the process id."""

    def __init__(self, num_processes: int):
        self._width = len(str(num_processes - 1))
        self._lock = threading.Lock()
        self._readable = True

    def __call__(self, index: int, line: str) -> None:
        with self._lock:
            if not self._readable:
                return
            try:
                # Logs may quote what others wrote.
                print(
                    f"[{index:{self._width}}] {printable(line)}",
                    file=sys.stdout,
                    flush=True,
                )
            except OSError:  # the reader, such as `head`, closed the pipe; training continues
                self._readable = False
