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

from tests.flags import xla_flags

PATIENCE_SECONDS = 120.0
SOAKING = "WEFT_SOAK_KILLS" in os.environ


def pytest_collection_modifyitems(items):
    for item in items:
        if not SOAKING and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="runs by `make soak`"))


class Server:
    """Starts processes by `server.py`, and knows how they ended."""

    def __init__(self, env):
        self.env = env
        self._popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started = queue.SimpleQueue()
        self.codes = {}
        self.changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self._popen.stdout:
            told = json.loads(line)
            if "started" in told:
                self._started.put(told["started"])
            else:
                with self.changed:
                    self.codes[told["ended"]] = told["code"]
                    self.changed.notify_all()

    def start(self, **order):
        print(json.dumps(order), file=self._popen.stdin, flush=True)
        return self._started.get(timeout=PATIENCE_SECONDS)

    def close(self):
        with self._popen as popen:
            popen.stdin.close()


class Process:
    """One process: its lines as they come, and what it says on stderr."""

    def __init__(self, server, arguments, env, directory):
        self._server = server
        self.errors = []
        self._lines = queue.SimpleQueue()
        paths = {name: str(directory / name) for name in ("stdout", "stderr")}
        directory.mkdir()
        for path in paths.values():
            os.mkfifo(path)
        self._threads = [
            threading.Thread(target=self._read, args=(paths["stdout"], self._lines.put)),
            threading.Thread(target=self._read, args=(paths["stderr"], self.errors.append)),
        ]
        for thread in self._threads:
            thread.start()
        self.pid = server.start(arguments=list(map(str, arguments)), env=env, **paths)

    def _read(self, path, take):
        with open(path) as pipe:
            for line in pipe:
                take(line.rstrip("\n"))
        take("")

    def wait_for(self, start):
        """Returns the rest of the next line that starts like this."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            if line.startswith(start):
                return line.removeprefix(start).strip()
            assert line, "\n".join(self.errors)

    def done(self):
        return json.loads(self.wait_for("done"))

    def send(self, number):
        if self.pid not in self._server.codes:
            os.kill(self.pid, number)

    def code(self, timeout=PATIENCE_SECONDS):
        server = self._server
        with server.changed:
            ended = server.changed.wait_for(lambda: self.pid in server.codes, timeout)
        assert ended, f"process {self.pid} still runs:\n{self.told}"
        for thread in self._threads:
            thread.join(timeout=10)
        return server.codes[self.pid]

    @property
    def told(self):
        return "\n".join(self.errors)


@pytest.fixture(scope="session")
def server():
    env = {
        **os.environ,
        "XLA_FLAGS": xla_flags(),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    server = Server(env)
    yield server
    server.close()


@pytest.fixture
def start(tmp_path, server):
    """Starts processes that train together; those that are left at the end are killed."""
    started = []

    def start_processes(*faults, num=2, **variables):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        env = server.env | {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(num),
            **variables,
        }
        count = len(started)
        for i in range(num):
            env["JAX_PROCESS_ID"] = str(i)
            directory = tmp_path / f"process_{count + i}"
            started.append(Process(server, [tmp_path / "run", *faults], env, directory))
        return started[count:]

    yield start_processes
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.send(signal.SIGKILL)
        process.code()
