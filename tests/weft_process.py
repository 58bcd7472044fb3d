"""`weft` as a process of its own, as a person starts it."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from weft.trainer.checkpointer.dirs import step_dirs

PATIENCE_SECONDS = 300.0
WEFT = [sys.executable, "-c", "import sys; from weft.cli import main; sys.exit(main())"]


@contextlib.contextmanager
def weft_processes(server, cwd=None, command=WEFT[1:], **variables):
    """Yields a function that starts `weft …` on one device; whatever runs at the end is ended."""
    processes = []

    def start(*words, cwd=cwd):
        process = server.start(*command, *words, cwd=cwd, env=variables)
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            with process:
                for pid in children(process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.kill()


def children(pid):
    """Returns the child processes of a launcher, and their JAX process indices."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            environ = (path / "environ").read_bytes().split(b"\0") if parent == pid else []
        except (OSError, IndexError):
            continue  # it has ended
        index = [e.partition(b"=")[2] for e in environ if e.startswith(b"JAX_PROCESS_ID=")]
        if index:
            found[int(path.name)] = int(index[0])
    return found


def finish(process, code=0):
    """Waits for the end of a process, and returns its output."""
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, out
    return out


def newest_step(run_dir):
    return max(step_dirs(f"{run_dir}/checkpoints"), default=0)


def wait_for_save(run_dir, process, *, after=0):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while newest_step(run_dir) <= after:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
