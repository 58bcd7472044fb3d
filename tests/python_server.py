"""Python processes that have already imported JAX and Weft: each start of one saves two seconds.

`python -m tests.python_server` forks a process for each line of JSON on stdin, {"arguments": [...],
"env": {...}, "cwd": path, "stdout": path, "stderr": path}, before JAX has started any thread or
found any device. It runs the arguments as `python ARGUMENTS` would, "-c" and a program, or a file,
and ends as a program of its own. The server prints {"started": pid}, and later {"ended": pid,
"code": …}.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

from tests.flags import xla_flags
from tests.pages import ROOT

PATIENCE_SECONDS = 300.0
# What a training imports, at once or later.
PRELOADED = (
    "orbax.checkpoint",
    "weft.cli.train",
    "weft.interop",
    "weft.launch.distributed",
    "weft.recipes.lm",
    "weft.debug.anomalies",
    "weft.trainer.trainer",
    "xxhash",
)


class PythonServer:
    """Starts processes, and knows how they ended."""

    def __init__(self):
        self.env = {
            **os.environ,
            "XLA_FLAGS": xla_flags(),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self._ordering = threading.Lock()
        self._started = queue.SimpleQueue()
        self._codes = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self._popen.stdout:
            told = json.loads(line)
            if "started" in told:
                self._started.put(told["started"])
            else:
                with self._changed:
                    self._codes[told["ended"]] = told["code"]
                    self._changed.notify_all()

    def start(self, *arguments, env=None, cwd=None, stderr=subprocess.STDOUT):
        """Starts `python ARGUMENTS`, whose output is piped; `env` is added to the environment."""
        with contextlib.ExitStack() as stack:

            def pipe():
                read, write = os.pipe()
                stack.callback(os.close, write)
                return open(read, encoding="utf-8"), f"/proc/{os.getpid()}/fd/{write}"

            stdout, path = pipe()
            order = {
                "arguments": list(map(str, arguments)),
                "env": {**self.env, **(env or {})},
                "cwd": str(cwd or os.getcwd()),
                "stdout": path,
            }
            order["stderr"], errors = path, None
            if stderr == subprocess.PIPE:
                errors, order["stderr"] = pipe()
            with self._ordering:
                print(json.dumps(order), file=self._popen.stdin, flush=True)
                pid = self._started.get(timeout=PATIENCE_SECONDS)
            return Python(self, pid, stdout, errors)

    def code(self, pid, timeout):
        """Returns the exit code of a process, None if it still runs after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout)
            return self._codes.get(pid)

    def close(self):
        with self._popen as popen:
            popen.stdin.close()


class Python:
    """A process, with what `subprocess.Popen` has."""

    def __init__(self, server, pid, stdout, stderr):
        self._server, self.pid, self.stdout, self.stderr = server, pid, stdout, stderr

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        return self._server.code(self.pid, 0)

    def wait(self, timeout=PATIENCE_SECONDS):
        code = self._server.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def communicate(self, timeout=PATIENCE_SECONDS):
        """Returns what it prints until it ends."""
        told = [None, None]

        def read(i, pipe):
            with pipe:
                told[i] = pipe.read()

        threads = [
            threading.Thread(target=read, args=(i, pipe), daemon=True)
            for i, pipe in enumerate((self.stdout, self.stderr))
            if pipe is not None
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return tuple(told)

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def answer(**told):
    os.write(1, json.dumps(told).encode() + b"\n")


def serve():
    """Starts processes until stdin ends; returns the arguments of each in it."""
    running = {}  # by a file descriptor, which can be read once the process has ended
    while True:
        readable, _, _ = select.select([0, *running], [], [])
        for ended in running.keys() & set(readable):
            os.close(ended)
            pid, status = os.waitpid(running.pop(ended), 0)
            answer(ended=pid, code=os.waitstatus_to_exitcode(status))
        if 0 not in readable:
            continue
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        order = json.loads(line)
        stdin = os.open(os.devnull, os.O_RDONLY)
        stdout = os.open(order["stdout"], os.O_WRONLY)
        stderr = os.open(order["stderr"], os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            for number, opened in enumerate((stdin, stdout, stderr)):
                os.dup2(opened, number)
            become(order)
            return order["arguments"]
        for opened in (stdin, stdout, stderr):
            os.close(opened)
        running[os.pidfd_open(pid)] = pid
        answer(started=pid)


def become(order):
    """Gives this process the environment and the directory that it is to have."""
    for name, value in order["env"].items():
        if name.startswith("JAX_") and name.lower() in jax.config.values:
            assert value == os.environ.get(name), f"JAX has read {name} before"
    # `nohup` and shells without a terminal let the tests ignore both.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    multiprocessing.process.ORIGINAL_DIR = order["cwd"]  # of processes that it spawns


def run(file, *arguments):
    """Runs a program as `python` would."""
    if file == "-c":
        text, *arguments = arguments
        directory = ""
    else:
        text, directory = Path(file).read_text(encoding="utf-8"), os.path.dirname(file)
    sys.argv, sys.path[0] = [file, *arguments], directory
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(text, file, "exec"), vars(module))


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    import jax

    gc.collect()
    gc.freeze()
    run(*serve())
