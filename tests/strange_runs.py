"""A small run of `lm-tiny`, trained once, and copies of its directory in which files are others."""

import contextlib
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CORPUS = "config_for_function(weft.input.folder_corpus)(paths=[{!r}])"


@contextlib.contextmanager
def on_one_device() -> Iterator[pytest.MonkeyPatch]:
    """Lets commands see one device, on which they compile for less time than on eight."""
    import jax

    only = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda *args, **kwargs: only)
        for name in ("device_count", "local_device_count"):
            patch.setattr(jax, name, lambda *args, **kwargs: 1)
        yield patch


@functools.cache
def _trained() -> tempfile.TemporaryDirectory[str]:
    """Trains two steps in a folder with `texts` to train on and the `run`."""
    from weft.cli import main

    folder = tempfile.TemporaryDirectory(prefix="strange-run-")
    texts = Path(folder.name, "texts")
    texts.mkdir()
    for i in range(3):
        lines = [f"def f{i}(x): return x + {j}  # text {i * j}\n" for j in range(60)]
        (texts / f"f{i}.py").write_text("".join(lines), encoding="utf-8")
    corpus = CORPUS.format(str(texts))
    overrides = [
        f"dir={folder.name}/run",
        "max_step=2",
        "model.decoder.dim=8",
        "input.source.sequence_length=16",
        "summary_writer.writers={'json_lines': weft.trainer.JsonLinesWriter.Config()}",
        f"input.source.corpus={corpus}",
        f"evalers.held_out.input.source.corpus={corpus}",
    ]
    with on_one_device(), contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", "lm-tiny", *overrides]) == 0
    return folder


def whole_run() -> Path:
    """Returns the directory of the run, which is not to be changed."""
    return Path(_trained().name, "run")


def copy_of_run(to: Path) -> Path:
    """Returns a copy of the directory of the run."""
    return shutil.copytree(whole_run(), to)


def contents(folder: Path) -> dict[str, object]:
    """Returns what is in a folder by path: texts, and where links lead."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = path.read_bytes()
    return found
