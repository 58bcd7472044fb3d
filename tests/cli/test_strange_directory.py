"""The directory of a run from a stranger: nothing in it leads out of it, and no command waits."""

import json
import logging
import os
import re
import shutil
import socket

import pytest

from tests.strange_runs import contents, copy_of_run
from weft.cli import main
from weft.launch.processes import PrefixedLines
from weft.trainer.checkpointer.manifest import write_manifest

pytestmark = pytest.mark.usefixtures("one_device")

STEP = "checkpoints/step_00000002"
LARGE = 40 * 10**9

# Each command that reads the directory of a run.
COMMANDS = {
    "train": ["train", "run"],
    "sample": ["sample", "run", "--tokens", "4"],
    "export": ["export", "run", "--to", "out.safetensors"],
    "inspect": ["inspect", "run"],
    "verify": ["inspect", "run", "--verify"],
    "report": ["report", "run"],
    "config": ["config", "show", "run"],
    "tabulate": ["tabulate", "run"],
    "check": ["check", "run"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a stranger's run, and files of the user next to it."""
    copy_of_run(tmp_path / "run")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".profile").write_text("export PATH\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert (tmp_path / "home" / ".profile").read_text(encoding="utf-8") == "export PATH\n"
    assert os.listdir(tmp_path / "home") == [".profile"]


def refused(command, capsys, why):
    """Runs a command, which must end with an error that names the reason, and not say more."""
    code = main(COMMANDS[command])
    err = capsys.readouterr().err
    assert code in (1, 2), (command, err)
    assert why in err and "Traceback" not in err, (command, err)


def link(place, name):
    path = place / "run" / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.symlink(place / "home" / ".profile", path)


@pytest.mark.parametrize(
    "name", ["config.txt", "run.json", "run.lock", "summaries/train_train/summaries.jsonl"]
)
def test_train_neither_reads_nor_writes_through_a_link(place, name, capsys):
    """The summaries had texts of the stranger's config, which a shell ran from its start file."""
    link(place, name)
    before = contents(place / "run")
    refused("train", capsys, f"{name}' is a symbolic link, where a")
    assert contents(place / "run") == before


@pytest.mark.parametrize("folder", ["summaries", "summaries/train_train", "trace"])
def test_folders_of_the_run_are_no_links(place, folder, capsys):
    if os.path.isdir(place / "run" / folder):
        shutil.rmtree(place / "run" / folder)
    os.symlink(place / "home", place / "run" / folder)
    refused("train", capsys, f"run/{folder}' is a symbolic link")
    refused("report", capsys, f"run/{folder}' is a symbolic link")


@pytest.mark.parametrize("command", COMMANDS)
def test_checkpoints_of_another_run_are_safe(place, command, capsys):
    """Old checkpoints are removed there, and leftovers of killed processes."""
    copy_of_run(place / "other")
    (place / "other" / STEP).rename(place / "other" / "checkpoints" / "step_00000001")
    (place / "other" / "checkpoints" / "step_00000009.trash").mkdir()
    before = contents(place / "other")
    shutil.rmtree(place / "run" / "checkpoints")
    os.symlink(place / "other" / "checkpoints", place / "run" / "checkpoints")
    refused(command, capsys, "run/checkpoints' is a symbolic link, where a directory")
    assert contents(place / "other") == before
    assert (place / "other" / "checkpoints" / "step_00000009.trash").exists()


def test_step_may_not_be_a_link_either(place, capsys):
    copy_of_run(place / "other")
    shutil.rmtree(place / "run" / STEP)
    os.symlink(place / "other" / STEP, place / "run" / STEP)
    for command in COMMANDS:
        refused(command, capsys, f"run/{STEP}' is a symbolic link")


def test_runs_of_a_sweep_are_no_links(place, capsys):
    (place / "sweep").mkdir()
    os.symlink(place / "home", place / "sweep" / "002")
    words = ["--over", "seed=1,2", "--dir", "sweep", "max_step=1"]
    assert main(["sweep", "lm-tiny", *words]) == 2
    assert "sweep/002' is a symbolic link, where a directory" in capsys.readouterr().err
    assert not (place / "sweep" / "001").exists()


def test_names_of_temporary_files_cannot_be_known(place, capsys):
    """They were `.config.txt.PID`, and written through."""
    for name in ("config.txt", "run.json", "report.html"):
        for path in (place / "run" / f".{name}.{os.getpid()}", place / f".{name}.{os.getpid()}"):
            os.symlink(place / "home" / ".profile", path)
    assert main(["report", "run"]) == 0
    assert main(["train", "run", "max_step=3"]) == 0
    os.symlink(place / "home" / ".profile", place / "report.html")
    assert main(["report", "run", "--out", "report.html"]) == 0
    assert not (place / "report.html").is_symlink()


FILES = [
    "config.txt",
    "run.json",
    "run.lock",
    "summaries/train_train/summaries.jsonl",
    f"{STEP}/manifest.json",
    f"{STEP}/index",
    f"{STEP}/python/process_0_of_1/input_iter.json",
    f"{STEP}/arrays/manifest.ocdbt",
    f"{STEP}/arrays/ocdbt.process_0/manifest.ocdbt",
]
READERS = {
    "config.txt": COMMANDS.keys(),
    "run.json": ["train", "report"],
    "run.lock": ["train"],
    "summaries/train_train/summaries.jsonl": ["train", "report"],
}


@pytest.mark.parametrize("name", FILES)
def test_commands_do_not_wait_for_odd_files(place, name, capsys):
    path = place / "run" / name
    for command in READERS.get(name, ["train", "sample", "verify"]):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        refused(command, capsys, f"{name}' is a FIFO")
        path.unlink()
        os.symlink("/dev/zero", path)
        refused(command, capsys, f"{name}' is a symbolic link")
        path.unlink()
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.getcwd()
            os.chdir(path.parent)  # the path of a socket is short
            bound.bind(path.name)
            os.chdir(here)
            refused(command, capsys, f"{name}' is a socket")


@pytest.mark.parametrize("name", FILES)
def test_files_of_40_gigabytes_are_not_read(place, name, capsys):
    with open(place / "run" / name, "wb") as file:
        file.truncate(LARGE)
    contents_are_read_by = {
        "config.txt": COMMANDS.keys() - {"inspect", "verify"},
        "run.lock": (),  # only its first bytes
        "summaries/train_train/summaries.jsonl": ["report"],
        "run.json": ["train", "report"],
    }
    for command in contents_are_read_by.get(name, ["train", "sample", "verify"]):
        code = main(COMMANDS[command])
        captured = capsys.readouterr()
        assert code in (1, 2), (command, captured.err)
        assert "0000 bytes" in (captured.err + captured.out).replace(",", ""), captured.err


@pytest.mark.parametrize(
    ("name", "forged", "why"),
    [
        ("run.json", {"end": {"step": "x", "reason": "max_step"}}, "end.step is 'x'"),
        ("run.json", {"starts": [{"time": "now"}]}, "starts[0].time is 'now'; expected a time"),
        ("run.json", {"samples": [{"step": 1}]}, "samples[0] has no 'prompt'"),
        ("run.json", {"model": [1]}, "model is [1]; expected an object"),
        ("run.json", {"baselines": {"x": {"nats_per_token": "0"}}}, "nats_per_token is '0'"),
        ("run.json", [1], "it is [1]; expected an object"),
        ("summaries.jsonl", {"step": -1, "time": 0.0}, "line 1 cannot be read: step is -1"),
        ("summaries.jsonl", {"step": 1, "time": None}, "time is None; expected a number"),
        ("summaries.jsonl", {"step": 1, "time": 1e300}, "expected seconds since 1970"),
        ("summaries.jsonl", {"step": 1, "time": 1, "values": {"a": []}}, "values.a is []"),
        ("summaries.jsonl", 3, "it is 3; expected an object"),
    ],
)
def test_forged_values_end_in_an_error_that_names_them(place, name, forged, why, capsys):
    folder = place / "run" / ("summaries/train_train" if "summaries" in name else "")
    (folder / name).write_text(json.dumps(forged) + "\n", encoding="utf-8")
    refused("report", capsys, why)


COMMAND = "\x1b]0;mine\x07"  # sets the title of a terminal
SHOWN = r"\x1b]0;mine\x07"


def test_terminal_obeys_no_name_in_a_checkpoint(place, capsys):
    index = json.loads((place / "run" / STEP / "index").read_text(encoding="utf-8"))
    index["index"].append([f"model/{COMMAND}", f"{COMMAND}\u202e"])
    (place / "run" / STEP / "index").write_text(json.dumps(index), encoding="utf-8")
    write_manifest(f"run/{STEP}", facts={"step": 2})
    assert main(["inspect", "run"]) == 0
    out = capsys.readouterr().out
    assert SHOWN in out and COMMAND not in out and "\u202e" not in out


def test_terminal_obeys_no_text_of_a_model(place, capsys):
    assert main(["sample", "run", "--tokens", "200", "--prompt", f"{COMMAND}é\t"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{SHOWN}é\t")
    assert main(["train", "run", "max_step=3"]) == 0
    out += capsys.readouterr().out
    # A model that has learnt nothing writes them.
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)


def test_terminal_obeys_no_log(place, monkeypatch):
    lines = []

    def warn(arguments):
        record = logging.LogRecord("x", logging.WARNING, "", 1, "%s", (COMMAND,), None)
        lines.append(logging.lastResort.format(record))
        return 0

    monkeypatch.setattr("weft.cli.inspect.run", warn)
    before = logging.lastResort.formatter
    assert main(["inspect", "run"]) == 0
    assert lines == [SHOWN] and logging.lastResort.formatter is before


def test_terminal_obeys_no_line_of_another_process(capsys):
    PrefixedLines(2)(1, f"line {COMMAND}")
    assert capsys.readouterr().out == f"[1] line {SHOWN}\n"
