"""A training run on a small file system that fills up: real files, a real ENOSPC."""

import os

import pytest

from tests.faults import training
from weft.config import config_for_function
from weft.errors import CheckpointSaveError
from weft.trainer.checkpointer import Checkpointer, OrbaxStateStorage, every_n_steps_policy
from weft.trainer.hooks import Hook

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("one_device"),
]

ROOM = 1 << 15


class Filler(Hook):
    """Fills the disk at one step, and makes room again at another."""

    def __init__(self, disk, *, full_at, free_at=None):
        self._file, self._full_at, self._free_at = disk / "filler", full_at, free_at
        self.failed, self.ended = [], None

    def on_step(self, step, outputs, batch):
        if step == self._full_at:
            with open(self._file, "wb", buffering=0) as file, pytest.raises(OSError, match="No sp"):
                while True:
                    file.write(bytes(1 << 12))
            # Room for the small files of a checkpoint, which are written before its arrays.
            os.truncate(self._file, self._file.stat().st_size - ROOM)
        if step == self._free_at:
            self._file.unlink()

    def on_save_failed(self, step, error):
        self.failed.append((step, str(error)))

    def on_end(self, step, reason):
        self.ended = (step, reason)


def run(disk, filler, max_step):
    cfg = training.config(str(disk / "run"), max_step=max_step).set(evalers={})
    cfg.checkpointer.set(
        save_policy=config_for_function(every_n_steps_policy).set(n=2),
        asynchronous=False,
        storage=OrbaxStateStorage.default_config(),
    )
    trainer = cfg.instantiate(parent=None)
    trainer.run(listener=filler)


def steps(disk):
    return Checkpointer.checkpoint_steps(str(disk / "run" / "checkpoints"))


def test_training_continues_and_last_checkpoint_is_kept(small_disk, capfd):
    filler = Filler(small_disk, full_at=3, free_at=7)
    run(small_disk, filler, max_step=8)
    assert filler.ended == (8, "max_step")
    assert [step for step, _ in filler.failed] == [4, 6]
    assert all(
        "could not be saved" in why and "Complete checkpoints: 2." in why
        for _, why in filler.failed
    )
    err = capfd.readouterr().err
    assert "step 4  NOT SAVED: the checkpoint of step 4 could not be saved" in err
    lines = [line for line in err.splitlines() if "NOT SAVED" in line]
    assert len(lines) == len(set(lines)), "one line for each save"
    assert len(lines) == 2
    for text in ("Failed writing", "Traceback", "Event loop", "exception was never retrieved"):
        assert text not in err, "no text of Orbax, whose other writes end later"
    assert steps(small_disk)[-1] == 8

    # The next start resumes from there; without room at its end, it does not end as if all were
    # well.
    with pytest.raises(
        CheckpointSaveError, match=r"step 12 could not be saved .*Complete checkpoints: .*8\."
    ):
        run(small_disk, Filler(small_disk, full_at=9), max_step=12)
    assert steps(small_disk)[-1] == 8
