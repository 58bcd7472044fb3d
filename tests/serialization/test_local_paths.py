"""Paths that are not those of this machine: each field and option that names one refuses them."""

import os

import numpy as np
import pytest

from weft.cli import main
from weft.config import config_for_function
from weft.errors import InputReadError, PathNotLocalError
from weft.input import as_tokenizer, folder_corpus
from weft.input.datasets import json_lines_dataset
from weft.input.file_cache import cache_folder
from weft.launch.local import LocalJob
from weft.serialization import TensorFiles, save_safetensors
from weft.trainer.checkpointer import Checkpointer, every_n_steps_policy
from weft.trainer.compilation import compilation_cache, default_cache_dir
from weft.trainer.run_lock import run_lock
from weft.trainer.summary_writer import JsonLinesWriter
from weft.trainer.summary_writer.event_file import SummaryWriter
from weft.training.checkpoints import restore_checkpoint, save_checkpoint


def checkpointer(path):
    policy = config_for_function(every_n_steps_policy)
    cfg = Checkpointer.default_config().set(name="c", dir=path, save_policy=policy)
    cfg.instantiate(parent=None)


def job(path):
    command = LocalJob.default_config().set(name="t", command=["true"])
    command.set(log_dir=path).instantiate().run()


def writer(path):
    JsonLinesWriter.default_config().set(name="w", dir=path).instantiate(parent=None)


def lock(path):
    with run_lock(path):
        pass


def weights(path):
    save_safetensors(f"{path}/w.safetensors", {"w": np.ones(2)})


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Returns an empty directory that the process works in, and that stays empty."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://bucket/run", "file:///tmp/x", "~/run"])
@pytest.mark.parametrize(
    "use",
    [
        *(lock, checkpointer, job, writer, folder_corpus, json_lines_dataset, as_tokenizer),
        *(SummaryWriter, weights, TensorFiles),
    ],
)
def test_urls_and_home_are_refused(use, path, here):
    why = "begins with '~', which a shell" if path == "~/run" else "is a URL, but only paths of"
    with pytest.raises(PathNotLocalError, match=why) as caught:
        use(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "lm-tiny", "dir=s3://bucket/run"],
        ["train", "lm-tiny", "dir=gs://bucket/run"],
        ["train", "lm-tiny", "dir=~/run"],
        ["train", "lm-tiny", "dir=run", "compilation_cache_dir=~/run"],
        ["launch", "local", "-n", "2", "lm-tiny", "dir=s3://bucket/run"],
        ["train", "lm-tiny", "data_dir=gs://bucket/texts", "dir=run"],
        ["sample", "s3://bucket/run"],
        ["export", "gs://bucket/run", "--to", "run"],
    ],
)
def test_commands_refuse_them(words, here, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "//bucket" in err or "'~/run' begins with '~'" in err
    assert "Mount the storage" in err or "Write the whole path" in err


def test_url_of_a_run_leads_to_copies_of_its_checkpoints():
    with pytest.raises(PathNotLocalError, match=r"Or set checkpointer\.copy_to to the URL"):
        lock("s3://bucket/run")


def test_functions_of_flax_refuse_urls(here):
    for call in (
        lambda: save_checkpoint("gs://b/c", {}, 1),
        lambda: restore_checkpoint("s3://b", {}),
    ):
        with pytest.raises(PathNotLocalError, match=r"ckpt_dir='(gs|s3)://b"):
            call()


def test_user_without_home_directory_gets_no_folder_in_its_place(here, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry in /etc/passwd either
    assert default_cache_dir() == ""
    with compilation_cache(None):
        pass
    with pytest.raises(InputReadError, match="has no home directory; set XDG_CACHE_HOME"):
        cache_folder()
