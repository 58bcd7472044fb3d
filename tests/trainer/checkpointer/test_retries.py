"""A file system that refuses for a while: one error, one that stays, folders not empty yet."""

import errno
import functools
import os
import shutil

import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import CheckpointReadError, CheckpointSaveError, DamagedCheckpointError
from weft.serialization.directory import Directory
from weft.trainer.checkpointer import Checkpointer, dirs, every_n_steps_policy
from weft.trainer.checkpointer import retries as module

STATE = {"w": np.arange(3.0), "epoch": 1}
DESCRIPTOR = Directory.descriptor
EMPTY = {"w": np.zeros(3), "epoch": 0}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module, "PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def checkpointer(tmp_path):
    cfg = Checkpointer.default_config().set(
        name="checkpointer", dir=str(tmp_path / "checkpoints"), keep_last_n=2, asynchronous=False
    )
    cfg.save_policy = config_for_function(every_n_steps_policy).set(n=1)
    with cfg.instantiate(parent=None) as checkpointer:
        yield checkpointer


class Refusing:
    """Function that fails for paths with a text in them, so many times or always."""

    def __init__(self, function, text, *numbers, times=1):
        self.function, self.text = function, text
        self.left = [OSError(n, os.strerror(n), text) for n in numbers] * times

    def __call__(self, *args, **kwargs):
        if self.left and any(self.text in str(arg) for arg in args):
            raise self.left.pop()
        return self.function(*args, **kwargs)

    def __get__(self, instance, owner=None):  # as a method
        return functools.partial(self, instance)


ALWAYS = 100


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EBUSY])
@pytest.mark.parametrize("name", ["rename", "makedirs", "fsync"])
def test_one_error_while_saving_is_tried_again(checkpointer, monkeypatch, caplog, name, number):
    checkpointer.save(step=1, state=STATE)
    refusing = Refusing(getattr(os, name), "", number)
    monkeypatch.setattr(os, name, refusing)
    checkpointer.save(step=2, state=STATE)
    assert not refusing.left and "Trying again in" in caplog.text
    assert checkpointer.checkpoint_steps(checkpointer.config.dir) == [1, 2]
    assert checkpointer.restore(state=EMPTY)[0] == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "x"), True),
        (ValueError("INTERNAL: Error writing local file \"w/0.0\": x [os_error_code='5']"), True),
        (OSError("another process could not write its part"), False),
        (ValueError("the shapes differ"), False),
    ],
)
def test_errors_of_file_systems_are_told_apart(error, expected):
    assert module.is_of_file_system(error) is expected
    wrapped = RuntimeError("a save failed")
    wrapped.__cause__ = error
    assert module.is_of_file_system(wrapped) is expected


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS])
def test_error_that_stays_fails_a_save_after_which_a_run_continues(
    checkpointer, monkeypatch, number
):
    checkpointer.save(step=1, state=STATE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Refusing(os.fsync, "", number, times=ALWAYS))
        with pytest.raises(CheckpointSaveError, match=r"step 2 could not .* checkpoints: 1\.") as e:
            checkpointer.save(step=2, state=STATE)
    assert e.value.of_file_system and not e.value.lacks_room
    checkpointer.save(step=3, state=STATE)
    assert checkpointer.checkpoint_steps(checkpointer.config.dir) == [1, 3]


ARRAYS = (
    "UNKNOWN: Error writing local file \"arrays/w/0\": Input/output error [os_error_code='5'] "
    "[tensorstore_spec='{}']"
)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.EIO, "x"), "1. Look into the state of the disk or of the file server."),
        (ValueError(ARRAYS), "1. Look into the state of the disk or of the file server."),
        (OSError(errno.EROFS, "x"), "1. Make the directory writable."),
        (OSError(errno.EACCES, "x"), "1. Make the directory writable."),
        (OSError(errno.EDQUOT, "x"), "1. Free disk space."),
        (OSError(errno.EMFILE, "x"), "1. Allow more open files, as `ulimit -n 4096` does."),
        (ZeroDivisionError("division by zero"), "1."),
    ],
)
def test_advice_about_a_failed_save_is_about_its_reason(checkpointer, monkeypatch, error, advice):
    checkpointer.save(step=1, state=STATE)

    def fail(path):
        raise error

    monkeypatch.setattr(dirs, "commit_dir", fail)
    with pytest.raises(CheckpointSaveError) as caught:
        checkpointer.save(step=2, state=STATE)
    text = str(caught.value)
    assert text.endswith(f"Complete checkpoints: {advice}") and "tensorstore_spec" not in text


FILES = ["manifest.json", "index", "arrays/manifest.ocdbt"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("file", FILES)
def test_error_while_reading_is_no_damage(checkpointer, monkeypatch, file, number):
    checkpointer.save(step=1, state=EMPTY)
    checkpointer.save(step=2, state=STATE)
    monkeypatch.setattr(Directory, "descriptor", Refusing(DESCRIPTOR, file, number))
    step, restored = checkpointer.restore(state=EMPTY)
    assert step == 2 and restored["w"].tolist() == [0, 1, 2]

    # If it stays, it is an error, and the older checkpoint is not used silently.
    refusing = Refusing(DESCRIPTOR, file, number, times=ALWAYS)
    monkeypatch.setattr(Directory, "descriptor", refusing)
    with pytest.raises(CheckpointReadError) as caught:
        checkpointer.restore(state=EMPTY)
    text = str(caught.value)
    assert f"step_00000002/{file}' cannot be read: " in text and os.strerror(number) in text
    assert "no older checkpoint is used instead" in text and not checkpointer.damaged_checkpoints


def test_missing_file_is_damage_at_once(checkpointer):
    checkpointer.save(step=1, state=STATE)
    os.unlink(f"{checkpointer.ckpt_dir(1)}/arrays/manifest.ocdbt")
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        checkpointer.restore(state=EMPTY)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_directory_that_cannot_be_listed_is_not_empty(checkpointer, monkeypatch, number):
    checkpointer.save(step=1, state=STATE)
    monkeypatch.setattr(os, "scandir", Refusing(os.scandir, "", number))
    assert checkpointer.restore(state=EMPTY)[0] == 1
    monkeypatch.setattr(os, "scandir", Refusing(os.scandir, "", number, times=ALWAYS))
    with pytest.raises(CheckpointReadError, match=r"checkpoints' cannot be read: "):
        checkpointer.restore(state=EMPTY)


def test_directories_that_are_not_empty_yet_do_not_end_a_run(checkpointer, monkeypatch):
    """On NFS a file that is removed while it is open leaves one until it is closed."""
    base = checkpointer.config.dir
    busy = {f"step_{step:08d}{end}" for step in (1, 2, 5) for end in (".tmp", ".trash", ".old")}
    for name in busy:
        os.makedirs(f"{base}/{name}")
        with open(f"{base}/{name}/.nfs0000", "w", encoding="utf-8"):
            pass
    for step in (1, 2, 5):  # the `.old` would otherwise be what a killed process had replaced
        os.makedirs(f"{base}/step_{step:08d}")
    rmtree = shutil.rmtree

    def not_empty(path, ignore_errors=False, **kwargs):
        if os.path.exists(f"{path}/.nfs0000"):
            if ignore_errors:
                return
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmtree(path, ignore_errors=ignore_errors, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", not_empty)
        for step in (1, 2, 3, 4):
            checkpointer.save(step=step, state=STATE)
    assert checkpointer.restore(state=EMPTY, step=4)[0] == 4
    # Closed: now they are removed.
    checkpointer.save(step=6, state=STATE)
    names = os.listdir(base)
    assert sorted(names) == sorted(n for n in names if "." not in n)
