"""Starts `training.py` as real processes, waits for where a fault comes, reads what they say."""

import functools
import inspect
import json
import os
import queue
import signal
import subprocess
import threading
import time
from concurrent import futures
from pathlib import Path

import pytest

from tests.sockets import free_port

PATIENCE_SECONDS = 120.0
SOAKING = "WEFT_SOAK_KILLS" in os.environ


def pytest_collection_modifyitems(items):
    for item in items:
        if not SOAKING and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="runs by `make soak`"))


class Process:
    """One process: its lines as they come, and what it says on stderr."""

    def __init__(self, server, program, arguments, env):
        self.errors = []
        self._lines = queue.SimpleQueue()
        self._python = server.start(program, *arguments, env=env, stderr=subprocess.PIPE)
        self.pid = self._python.pid
        self._threads = [
            threading.Thread(target=self._read, args=(self._python.stdout, self._lines.put)),
            threading.Thread(target=self._read, args=(self._python.stderr, self.errors.append)),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe, take):
        with pipe:
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
        self._python.send_signal(number)

    def code(self, timeout=PATIENCE_SECONDS):
        try:
            code = self._python.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.pid} still runs:\n{self.told}") from None
        for thread in self._threads:
            thread.join(timeout=10)
        return code

    @property
    def told(self):
        return "\n".join(self.errors)


class Starter:
    """Starts processes that train together; those that are left at the end are killed."""

    def __init__(self, server, directory):
        self._server, self._directory, self._started = server, directory, []

    def __call__(self, *faults, num=2, **variables):
        address = f"127.0.0.1:{free_port()}"
        env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(num), **variables}
        of_its_own = {"policies", "disagreement"} & set(faults)
        program = Path(__file__).with_name(f"{''.join(of_its_own) or 'training'}.py")
        arguments = [self._directory / "run", *faults]
        for i in range(num):
            env["JAX_PROCESS_ID"] = str(i)
            self._started.append(Process(self._server, program, arguments, env))
        return self._started[-num:]

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self._started:
            process.send(signal.SIGKILL)
            process.code()


# Held until processes are where a fault comes, so that their start does not slow down others'.
starting = threading.Lock()


def concurrent(scenario):
    """Makes a test of a function of `start`; all run at the same time, as most wait."""

    @functools.wraps(scenario)
    def test(scenarios, request, **params):
        scenarios(request.node).result()

    names = [name for name in inspect.signature(scenario).parameters if name != "start"]
    test.__signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name in ("scenarios", "request", *names)
    )
    return test


@pytest.fixture(scope="session")
def scenarios(request, python_server, tmp_path_factory):
    """Runs each scenario in a thread, and returns the future of one by its test.

    The first call starts those of its test and of all later ones; in a soak, of its module only.
    """
    items = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    running = {}

    def run(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        with Starter(python_server, tmp_path_factory.mktemp("scenario")) as start:
            item.function.__wrapped__(start, **params)

    with futures.ThreadPoolExecutor(len(items)) as pool:

        def started(item):
            for other in items[items.index(item) :]:
                is_chosen = (
                    other.path == item.path if SOAKING else not other.get_closest_marker("soak")
                )
                if is_chosen and other not in running and hasattr(other.function, "__wrapped__"):
                    running[other] = pool.submit(run, other)
            return running.get(item)

        yield started


@pytest.fixture(autouse=True)
def start_scenarios(request, scenarios):
    """Lets scenarios wait while other tests of this folder are at work."""
    scenarios(request.node)
