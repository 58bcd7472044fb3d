import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.sockets import full_pipe
from weft.distributed import watchdog
from weft.distributed.watchdog import Watchdog, call_with_timeout, print_error


def test_blocked_call_times_out(monkeypatch):
    monkeypatch.setattr(watchdog, "_PRINT_SECONDS", 0.2)
    free = threading.Event()
    started = time.monotonic()
    call_with_timeout(free.wait)
    assert 0.19 < time.monotonic() - started < 10
    free.set()
    said = []
    call_with_timeout(said.append, "x")
    assert said == ["x"]


def test_error_at_the_end_of_the_interpreter_raises_nothing():
    # In a thread of its own it would be printed, and Python 3.12 starts none there.
    program = (
        "import atexit; from weft.distributed.watchdog import print_error; "
        "atexit.register(print_error, 'late')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) in ((0, "late\n"), (0, ""))


def test_errors_are_printed_to_available_stderr(capfd, monkeypatch):
    print_error("frozen")
    assert capfd.readouterr().err == "frozen\n"
    monkeypatch.setattr(sys, "__stderr__", None)
    monkeypatch.setattr(sys, "stderr", None)
    print_error("nowhere")
    assert capfd.readouterr() == ("", "")


HANG = """
import logging, threading
from weft.distributed import watchdog
watchdog._PRINT_SECONDS = 0.2
logging.basicConfig()
def stuck_in_here(): threading.Event().wait()
threading.Thread(target=stuck_in_here, daemon=True).start()
with watchdog.Watchdog({timeout}, {crash}) as watchdog:
    watchdog.report("running step 7")
    print(1, flush=True)
    input()
print("ended")
"""


@contextlib.contextmanager
def hanging(timeout, crash, stderr=subprocess.PIPE):
    """Yields a process that hangs until it reads a line."""
    with subprocess.Popen(
        [sys.executable, "-c", HANG.format(timeout=timeout, crash=crash)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
    ) as process:
        assert process.stdout.readline() == "1\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.long
def test_hang_prints_every_threads_stack():
    with hanging(0.2, None) as process:
        told = itertools.takewhile(lambda line: "in stuck_in_here" not in line, process.stderr)
        assert "while running step 7. The stacks of all threads:" in "".join(told)
        out, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, "ended\n")


@pytest.mark.long
def test_long_hang_ends_the_process():
    with hanging(None, 0.4) as process:
        told = process.stderr.read()
        assert process.wait(timeout=60) == -signal.SIGABRT
    assert "in stuck_in_here" in told


@pytest.mark.long
def test_it_ends_with_full_stderr():
    with full_pipe() as pipe, hanging(0.2, 0.4, stderr=pipe) as process:
        assert process.wait(timeout=25) == -signal.SIGABRT


@pytest.mark.long
def test_signal_prints_stacks():
    with hanging(None, None) as process:
        process.send_signal(signal.SIGQUIT)
        out, told = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, "ended\n")
    assert "in stuck_in_here" in told


def test_progress_prevents_it(capfd):
    with Watchdog(timeout_seconds=1.5) as watchdog:
        for step in range(10):
            watchdog.report(f"step {step}")
            time.sleep(0.2)
    assert "stacks" not in capfd.readouterr().err
