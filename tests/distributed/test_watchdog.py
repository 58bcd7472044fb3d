import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.sockets import full_pipe
from weft.distributed.watchdog import Watchdog, call_with_timeout, dump_stacks, print_error


def test_blocked_call_times_out():
    free = threading.Event()
    started = time.monotonic()
    call_with_timeout(free.wait)
    assert 0.9 < time.monotonic() - started < 10
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) in ((0, "late\n"), (0, ""))


def test_errors_are_printed_to_available_stderr(capfd, monkeypatch):
    print_error("frozen")
    assert capfd.readouterr().err == "frozen\n"
    monkeypatch.setattr(sys, "__stderr__", None)
    monkeypatch.setattr(sys, "stderr", None)
    print_error("nowhere")
    assert capfd.readouterr() == ("", "")


def test_stacks_include_all_threads_and_caller():
    free, inside = threading.Event(), threading.Event()

    def waits_here():
        inside.set()
        free.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    inside.wait()
    stacks = dump_stacks()
    free.set()
    thread.join()
    assert "in waits_here" in stacks
    assert "in test_stacks_include" in stacks.partition("Current thread")[2]


HANG = """
import logging, sys, threading, time
from weft.distributed.watchdog import Watchdog
logging.basicConfig()
def stuck_in_here(): time.sleep(float(sys.argv[1]))
threading.Thread(target=stuck_in_here, daemon=True).start()
with Watchdog({timeout}, {crash}) as watchdog:
    watchdog.report("running step 7")
    time.sleep(float(sys.argv[1]))
print("ended")
"""


def hang(timeout, crash, seconds):
    script = HANG.format(timeout=timeout, crash=crash)
    return subprocess.run(
        [sys.executable, "-c", script, str(seconds)], capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_hang_prints_every_threads_stack():
    done = hang(0.4, None, 2.5)
    assert done.returncode == 0
    assert "while running step 7. The stacks of all threads:" in done.stderr
    assert "in stuck_in_here" in done.stderr
    assert "ended" in done.stdout


@pytest.mark.long
def test_long_hang_ends_the_process():
    done = hang(None, 0.4, 30)
    assert done.returncode == -signal.SIGABRT
    assert "in stuck_in_here" in done.stderr


@pytest.mark.long
def test_it_ends_with_full_stderr():
    script = HANG.format(timeout=0.2, crash=0.4)
    with (
        full_pipe() as pipe,
        subprocess.Popen([sys.executable, "-c", script, "30"], stderr=pipe) as process,
    ):
        try:
            assert process.wait(timeout=25) == -signal.SIGABRT
        finally:
            process.kill()


@pytest.mark.long
def test_signal_prints_stacks():
    script = HANG.format(timeout=None, crash=None).replace(
        "time.sleep(float(sys.argv[1]))\nprint", "print(1, flush=True); input()\nprint"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, "30"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "1\n"
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
