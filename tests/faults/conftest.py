"""Starts `training.py` as real processes, waits for where a fault comes, reads what they say."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PATIENCE_SECONDS = 120.0
SOAKING = "WEFT_SOAK_KILLS" in os.environ
PROGRAM = Path(__file__).with_name("training.py")


def pytest_collection_modifyitems(items):
    for item in items:
        if not SOAKING and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="runs by `make soak`"))


class Process:
    """One process: its lines as they come, and what it says on stderr."""

    def __init__(self, arguments, env, cwd):
        self.popen = subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            env=env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.popen.pid
        self.errors = []
        self._lines = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, args=(self.popen.stdout, self._lines.put)),
            threading.Thread(target=self._read, args=(self.popen.stderr, self.errors.append)),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe, take):
        with pipe:
            for line in pipe:
                take(line.rstrip("\n"))
        take("")

    def wait_for(self, start):
        """The rest of the next line that starts like this."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            if line.startswith(start):
                return line.removeprefix(start).strip()
            assert line, "\n".join(self.errors)

    def done(self):
        return json.loads(self.wait_for("done"))

    def send(self, number):
        os.kill(self.pid, number)

    def code(self, timeout=PATIENCE_SECONDS):
        code = self.popen.wait(timeout)
        for thread in self._threads:
            thread.join(timeout=10)
        return code

    @property
    def told(self):
        return "\n".join(self.errors)


@pytest.fixture
def start(tmp_path):
    """Starts processes that train together; those that are left at the end are killed."""
    started = []

    def start_processes(*faults, num=2, **variables):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        env = {
            **os.environ,
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(num),
            **variables,
        }
        processes = [
            Process([tmp_path / "run", *faults], env | {"JAX_PROCESS_ID": str(i)}, tmp_path)
            for i in range(num)
        ]
        started.extend(processes)
        return processes

    yield start_processes
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            if process.popen.poll() is None:
                process.send(signal.SIGKILL)
        process.code()
