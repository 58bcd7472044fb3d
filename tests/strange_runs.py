"""A small run of `lm-tiny`, trained once, and copies of its directory in which files are others."""

import functools
import os
import shutil
import tempfile
from pathlib import Path

CORPUS = "config_for_function(weft.input.folder_corpus)(paths=[{!r}])"


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
