"""A training process is killed at random moments, again and again, and ends with the same bits.

`make soak` kills it 60 times; here, as often as WEFT_SOAK_KILLS says, or three times.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.flags import xla_flags
from weft.trainer.checkpointer.dirs import step_dirs
from weft.trainer.checkpointer.manifest import find_damage, read_manifest

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("WEFT_SOAK_KILLS", "3"))
_PATIENCE_SECONDS = 200.0

# Each line that is read starts a training process by a fork, before JAX has opened any device. All
# that the first of them imported is imported here, so that the others need not.
SERVER = """
import contextlib, hashlib, importlib, os, sys, time
import numpy as np
import orbax.checkpoint
from weft.cli.configs import load_config
from weft.trainer.progress import RunListener

class Diary(RunListener):
    def __init__(self, path):
        self.file = open(path, "a")
    def on_step(self, step, outputs, batch):
        ids = np.asarray(batch["input_ids"])
        self.file.write(f"\\n{step} {hashlib.sha256(ids.tobytes()).hexdigest()}")
        self.file.flush()

for line in sys.stdin:
    directory, *words = line.split()
    child = os.fork()
    if child == 0:
        log = os.open(directory + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        code = 1
        try:
            trainer = load_config("lm-tiny", [f"dir={directory}", *words]).instantiate(parent=None)
            trainer.run(listener=Diary(directory + ".order"))
            with open(directory + ".modules", "w") as file:
                file.write("\\n".join(sys.modules))
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
    if os.path.exists(directory + ".modules"):
        for name in open(directory + ".modules").read().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        os.remove(directory + ".modules")
"""

WORDS = [
    "evalers={}",
    "learner.optimizer.inner.learning_rate.max_step=60",
    "model.decoder.transformer.layer.feed_forward.dropout.rate=0.1",
    "learner.ema.decay=0.9",
    "checkpointer.keep_last_n=2",
]


@pytest.fixture
def server(tmp_path):
    """Yields a process that starts training processes, one after the other."""
    env = {
        **os.environ,
        "XLA_FLAGS": xla_flags(),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.stdin.close()
    process.wait(timeout=_PATIENCE_SECONDS)
    process.stdout.close()


def start(server, directory, *words):
    """Begins to train; returns the process."""
    server.stdin.write(" ".join([str(directory), *WORDS, *words]) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def finish(server, directory):
    status = int(server.stdout.readline())
    assert status == 0, Path(f"{directory}.log").read_text()[-5000:]


def newest(directory):
    return max(step_dirs(str(directory / "checkpoints")), default=0)


def order(directory):
    """Hashes of the batches by step; a step that was run twice must have had the same batch."""
    found = {}
    for line in Path(f"{directory}.order").read_text().splitlines():
        step, _, digest = line.partition(" ")
        if len(digest) == 64:  # a line may be torn
            assert found.setdefault(int(step), digest) == digest
    return found


def bits(directory, step):
    """Digests of all values in a checkpoint: parameters, optimizer, key, averages, data."""
    path = step_dirs(str(directory / "checkpoints"))[step]
    assert find_damage(path, step=step) == []
    files = read_manifest(path).files
    values = {p: e for p, e in files.items() if p.startswith("arrays/") and "/_" not in p}
    values |= {p: e for p, e in files.items() if p.startswith("python/")}
    assert any("optimizer" in p for p in values) and any("ema" in p for p in values)
    return values


def test_repeatedly_killed_run_ends_bitwise_equal(server, tmp_path, capsys):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    chance = random.Random(0)
    # To fill the cache, and to see how long a start takes.
    for seconds in (None, 0):
        begin = time.monotonic()
        start(server, tmp_path / "warm", "max_step=2")
        finish(server, tmp_path / "warm")
        seconds = time.monotonic() - begin
        shutil.rmtree(tmp_path / "warm")

    in_a_save = resumed = 0
    for _ in range(KILLS):
        before = newest(cut)
        pid = start(server, cut, "max_step=1000000", "checkpointer.save_policy.n=2")
        time.sleep(chance.uniform(0, 1.6 * seconds))
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(int(server.stdout.readline())) == signal.SIGKILL, Path(
            f"{cut}.log"
        ).read_text()[-5000:]
        in_a_save += any(cut.glob("checkpoints/*.tmp"))
        assert newest(cut) >= before
        resumed += bool(before) and newest(cut) > before
    last = newest(cut) + 3
    start(server, cut, f"max_step={last}", "checkpointer.save_policy.n=2")
    finish(server, cut)
    start(server, whole, f"max_step={last}", "checkpointer.save_policy.n=1000000")
    finish(server, whole)

    with capsys.disabled():
        print(
            f"\n{KILLS} kills, {in_a_save} of them in the middle of a save; {resumed} starts came "
            f"farther than the one before; {last} steps; a start takes {seconds:.1f} s"
        )
    assert bits(cut, last) == bits(whole, last)
    # The last kill may have come steps after the newest save.
    of_cut = {step: batch for step, batch in order(cut).items() if step <= last}
    of_whole = order(whole)
    assert of_cut == of_whole and set(of_whole) == set(range(1, last + 1))
    index = json.loads(Path(step_dirs(str(cut / "checkpoints"))[last], "index").read_text())
    assert ["next_step", last + 1] in index["index"]
