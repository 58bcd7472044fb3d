"""A training process is killed at random moments, again and again, and ends with the same bits.

`make soak` kills it 60 times, or as often as WEFT_SOAK_KILLS says. tests/cli/test_train_process.py
kills one once.
"""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import checkpoint_files
from tests.weft_process import finish
from weft.trainer.checkpointer.dirs import step_dirs
from weft.trainer.checkpointer.manifest import find_damage, read_manifest

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif("WEFT_SOAK_KILLS" not in os.environ, reason="runs by `make soak`"),
]

KILLS = int(os.environ.get("WEFT_SOAK_KILLS", "60"))
_PATIENCE_SECONDS = 200.0

TRAIN = """
import hashlib, sys
import numpy as np
from weft.cli.configs import load_config
from weft.trainer.hooks import Hook

class Diary(Hook):
    def __init__(self, path):
        self.file = open(path, "a")
    def on_step(self, step, outputs, batch):
        ids = np.asarray(batch["input_ids"])
        self.file.write(f"\\n{step} {hashlib.sha256(ids.tobytes()).hexdigest()}")
        self.file.flush()

directory, *words = sys.argv[1:]
trainer = load_config("lm-tiny", [f"dir={directory}", *words]).instantiate(parent=None)
trainer.run(listener=Diary(directory + ".order"))
"""

WORDS = [
    "evalers={}",
    "learner.optimizer.inner.learning_rate.max_step=60",
    "model.decoder.transformer.layer.feed_forward.dropout.rate=0.1",
    "learner.ema.decay=0.9",
    "checkpointer.keep_last_n=2",
]


@pytest.fixture
def start(python_server):
    """Begins to train; returns the process."""
    return lambda directory, *words: python_server.start("-c", TRAIN, directory, *WORDS, *words)


def newest(directory):
    return max(step_dirs(str(directory / "checkpoints")), default=0)


def order(directory):
    """Hashes of the batches by step; a step that was run twice must have had the same batch."""
    found = {}
    for line in Path(f"{directory}.order").read_text(encoding="utf-8").splitlines():
        step, _, digest = line.partition(" ")
        if len(digest) == 64:  # a line may be torn
            assert found.setdefault(int(step), digest) == digest
    return found


def bits(directory, step):
    """Digests of all values in a checkpoint: parameters, optimizer, key, averages, data."""
    path = step_dirs(str(directory / "checkpoints"))[step]
    assert find_damage(path, step=step) == []
    files = read_manifest(path).files
    values = dict(checkpoint_files.values(path))
    values |= {p: e for p, e in files.items() if p.startswith("python/")}
    assert any("optimizer" in p for p in values) and any("ema" in p for p in values)
    return values


def test_repeatedly_killed_run_ends_bitwise_equal(start, tmp_path, capsys):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    chance = random.Random(0)
    # To fill the cache, and to see how long a start takes.
    begin = time.monotonic()
    finish(start(tmp_path / "warm", "max_step=2"))
    seconds = time.monotonic() - begin
    shutil.rmtree(tmp_path / "warm")

    in_a_save = resumed = 0
    for _ in range(KILLS):
        before = newest(cut)
        process = start(cut, "max_step=1000000", "checkpointer.save_policy.n=2")
        time.sleep(chance.uniform(0, seconds))  # the first start compiled, which takes longer
        process.kill()
        out, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, out
        in_a_save += any(cut.glob("checkpoints/*.tmp"))
        assert newest(cut) >= before
        resumed += bool(before) and newest(cut) > before
    last = newest(cut) + 3
    finish(start(cut, f"max_step={last}", "checkpointer.save_policy.n=2"))
    finish(start(whole, f"max_step={last}", "checkpointer.save_policy.n=1000000"))

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
    index = json.loads(
        Path(step_dirs(str(cut / "checkpoints"))[last], "index").read_text(encoding="utf-8")
    )
    assert ["next_step", last + 1] in index["index"]


def test_run_with_local_checkpoints_ends_bitwise_equal(start, tmp_path, capsys):
    cut, whole, memory = tmp_path / "cut", tmp_path / "whole", tmp_path / "memory"
    chance = random.Random(1)
    words = [f"checkpointer.local_dir={memory}", "checkpointer.local_every_n_steps=1"]
    words.append("checkpointer.save_policy.n=9")

    def newest_local():
        (*_, newest_dir) = [0, *sorted(memory.glob("*/process_0_of_1/step_" + 8 * "[0-9]"))]
        return newest_dir and int(newest_dir.name[5:])

    begin = time.monotonic()
    finish(start(tmp_path / "warm", "max_step=2"))
    seconds = time.monotonic() - begin
    in_a_save = from_local = 0
    for _ in range(-(-KILLS // 4)):
        before = max(newest(cut), newest_local())
        process = start(cut, "max_step=1000000", *words)
        time.sleep(seconds * chance.uniform(0.3, 1.5))
        process.kill()
        process.communicate()
        in_a_save += any(memory.glob("*/*/*.tmp"))
        # Nothing is lost but what was being written.
        assert max(newest(cut), newest_local()) >= before
        from_local += newest_local() > newest(cut)
    assert from_local
    last = max(newest(cut), newest_local()) + 3
    finish(start(cut, f"max_step={last}", *words))
    finish(start(whole, f"max_step={last}", "checkpointer.save_policy.n=1000000"))

    with capsys.disabled():
        print(
            f"\n{in_a_save} kills in the middle of a local save; after {from_local}, the local "
            f"checkpoint was the newest; {last} steps"
        )
    assert bits(cut, last) == bits(whole, last)
    of_cut = {step: batch for step, batch in order(cut).items() if step <= last}
    assert of_cut == order(whole)
    assert not any(memory.glob("*/*/*"))
