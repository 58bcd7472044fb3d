"""Starts `training.py` as real processes, waits for where a fault comes, reads what they say."""

import contextlib
import functools
import inspect
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
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
        self._ordering = threading.Lock()
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
        with self._ordering:
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


class Starter:
    """Starts processes that train together; those that are left at the end are killed."""

    def __init__(self, server, directory):
        self._server, self._directory, self._started = server, directory, []

    def __call__(self, *faults, num=2, **variables):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        env = self._server.env | {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(num),
            **variables,
        }
        for i in range(num):
            env["JAX_PROCESS_ID"] = str(i)
            directory = self._directory / f"process_{len(self._started)}"
            arguments = [self._directory / "run", *faults]
            self._started.append(Process(self._server, arguments, env, directory))
        return self._started[-num:]

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.send(signal.SIGKILL)
            process.code()


# Held until processes are where a fault comes, so that their start does not slow down others'.
starting = threading.Lock()


def concurrent(scenario):
    """Makes a test of a function of `start`; all of a module run at the same time, as most wait."""

    @functools.wraps(scenario)
    def test(scenarios, request, **params):
        scenarios[request.node.nodeid].result()

    names = [name for name in inspect.signature(scenario).parameters if name != "start"]
    test.__signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name in ("scenarios", "request", *names)
    )
    return test


@pytest.fixture(scope="module")
def scenarios(request, server, tmp_path_factory):
    """Runs the scenarios of all tests of a module that were selected, each in a thread."""
    items = [
        item
        for item in request.session.items
        if item.path == request.path
        and "scenarios" in item.fixturenames
        and (SOAKING or not item.get_closest_marker("soak"))
    ]

    def run(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        with Starter(server, tmp_path_factory.mktemp("scenario")) as start:
            item.function.__wrapped__(start, **params)

    with futures.ThreadPoolExecutor(len(items)) as pool:
        yield {item.nodeid: pool.submit(run, item) for item in items}
