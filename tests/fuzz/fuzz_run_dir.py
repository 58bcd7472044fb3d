"""The directory of a run from a stranger, for each command: one file of it is another.

It is damaged or forged, of another kind, endless, a link out of the directory, or another file of
the run. The command works, or ends soon with a documented error; it changes and copies nothing
outside of the directory, and prints nothing that a terminal obeys.
"""

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import pytest

from tests.fuzz.readers import damaged, damaged_json
from tests.strange_runs import contents, on_one_device, whole_run
from weft.cli import main
from weft.trainer import run_lock
from weft.trainer.checkpointer.manifest import MANIFEST, write_manifest

STEP = "checkpoints/step_00000002"
COMMANDS = {
    "report": ["report", "run"],
    "inspect": ["inspect", "run"],
    "verify": ["inspect", "run", "--verify"],
    "config": ["config", "show", "run"],
    "tabulate": ["tabulate", "run"],
    "export": ["export", "run", "--to", "out.safetensors"],
    "sample": ["sample", "run", "--tokens", "4"],
    "check": ["check", "run"],
    "train": ["train", "run", "max_step=3"],
}
FILES = [
    "run.json",
    "summaries/train_train/summaries.jsonl",
    "config.txt",
    "run.lock",
    "report.html",
    f"{STEP}/{MANIFEST}",
    f"{STEP}/index",
    f"{STEP}/python/process_0_of_1/input_iter.json",
    f"{STEP}/python/process_0_of_1/run_state.json",
    f"{STEP}/arrays/manifest.ocdbt",
    f"{STEP}/arrays/ocdbt.process_0/manifest.ocdbt",
]
FOLDERS = ["summaries", "summaries/train_train", "checkpoints", STEP, f"{STEP}/arrays", "trace"]
# What is put in place of a file or folder.
ODD = ["missing", "empty", "link", "link to zeros", "broken link", "pipe", "folder", "40 gigabytes"]
PRIVATE = "a private key\n"
SECONDS = 60


class Case(NamedTuple):
    """A command, and a file or folder of the run with its new content, or one of `ODD`."""

    command: str
    name: str
    content: bytes | str


@st.composite
def _case(draw: st.DrawFn) -> Case:
    command = draw(st.sampled_from(sorted(COMMANDS, key=list(COMMANDS).index)))
    if draw(st.integers(0, 5)) == 0:
        return Case(command, draw(st.sampled_from(FOLDERS)), draw(st.sampled_from(ODD)))
    name = draw(st.sampled_from(FILES))
    kind = draw(st.sampled_from(["forged", "forged", "damaged", "odd", "foreign"]))
    if kind == "odd":
        return Case(command, name, draw(st.sampled_from(ODD)))
    if kind == "foreign":
        other = draw(st.sampled_from([file for file in FILES if file != "run.lock"]))
        return Case(command, name, (whole_run() / other).read_bytes())
    data = _content(name)
    if kind == "forged" and name != "config.txt":
        with contextlib.suppress(ValueError):
            values = [json.loads(line) for line in _records(name, data)]
            return Case(command, name, draw(damaged_json(values)) + b"\n")
    return Case(command, name, draw(damaged([data])))


def _content(name: str) -> bytes:
    file = whole_run() / name
    if name == "run.lock":
        owner = {"host": "gpu07", "pid": 4711, "started": "now", "machine": "x", "token": "y"}
        return json.dumps(owner).encode()
    return file.read_bytes()


def _records(name: str, data: bytes) -> list[bytes]:
    return data.splitlines() if name.endswith(".jsonl") else [data]


CASES = _case()
SHORT = 4


def check(case: Case) -> None:
    command, name, content = case
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = Path(temporary)
        shutil.copytree(whole_run(), "run")
        (folder / "home").mkdir()
        (folder / "home" / "key").write_text(PRIVATE, encoding="utf-8")
        replace(folder / "run" / name, content, folder / "home")
        if STEP in name and MANIFEST not in name and isinstance(content, bytes):
            write_manifest(f"run/{STEP}", facts={"step": 2})  # as a forger would
        before, begin = contents(folder / "home"), time.monotonic()
        code, out = run(command)
        assert time.monotonic() - begin < SECONDS, "it took too long"
        assert code in (0, 1, 2), (code, out)
        assert "Traceback" not in out, out
        commands = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)
        assert commands is None, f"it printed {commands!r} in {out!r}"
        assert contents(folder / "home") == before, "it changed a file outside of the run"
        made = {path.name for path in folder.iterdir()} - {"run", "home"}
        assert made <= {"out.safetensors"}, made
        for path in made:
            assert PRIVATE.encode() not in (folder / path).read_bytes()
        assert PRIVATE not in out


def replace(path: Path, content: bytes | str, home: Path) -> None:
    """Puts something in place of a file or folder."""
    is_folder = path.is_dir() or path.name == "trace"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "empty":
        path.mkdir() if is_folder else path.touch()
    elif content == "link":
        path.symlink_to(home if is_folder else home / "key")
    elif content == "link to zeros":
        path.symlink_to("/dev/zero")
    elif content == "broken link":
        path.symlink_to(home / "new")
    elif content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content == "40 gigabytes":
        with open(path, "wb") as file:
            file.truncate(40 * 10**9)


def run(command: str) -> tuple[int, str]:
    """Returns the exit code of a command and what it prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, on_one_device():
        # A lock of another machine is watched for a minute.
        patch.setattr(run_lock, "_SILENT_POLLS", 1)
        patch.setattr(run_lock, "_POLL_SECONDS", 0.01)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(COMMANDS[command])
    return code, out.getvalue()


def source(case: Case) -> str:
    return f"from tests.fuzz.fuzz_run_dir import Case, check\n\ncheck({case!r})\n"
