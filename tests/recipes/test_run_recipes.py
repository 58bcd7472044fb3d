"""Runs of a user's recipe: their directories find it, unless others could have named it there."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from weft.cli import main
from weft.cli.configs import load_config, load_run, recipe_of_run, run_config
from weft.config import to_text
from weft.errors import ConfigError, RecipeError
from weft.trainer.record_signature import is_signed, signed
from weft.trainer.run_dir import claim_run_dir, read_record

pytestmark = pytest.mark.usefixtures("one_device")

OWN = """
from weft.config import config_for_class
from weft.input.fake import FakeLmInput
from weft.trainer import SpmdTrainer
from own_layers import Head


class Net:
    def __init__(self, width: int, activation: object = None):
        pass


def recipe(width: int = 8):
    model = config_for_class(Net).set(width=width, activation=Head)
    return SpmdTrainer.default_config().set(
        name="trainer", dir="runs/own", model=model, input=FakeLmInput.default_config()
    )


def unnamed(width: int = 8):
    cfg = recipe(width)
    cfg.model.activation = lambda x: x
    return cfg
"""


@pytest.fixture
def home(tmp_path, monkeypatch, new_process):
    """A folder `home/lab` with a recipe; the current directory is another one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    lab = tmp_path / "home" / "lab"
    lab.mkdir(parents=True)
    (lab / "own_layers.py").write_text("class Head:\n    pass\n", encoding="utf-8")
    (lab / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return lab


@pytest.fixture
def start(home, new_process, monkeypatch):
    """Starts a run with words of the command line, returns its config, and forgets the code."""

    def start(name, *words, directory=None, recipe=None):
        cfg = load_run(name, words, recipe=recipe)
        cfg.dir = str(directory or home / "runs" / "own")
        claim_run_dir(cfg, recipe_of_run(name, words, recipe=recipe))
        new_process()
        return cfg

    return start


@pytest.fixture
def run(home, start):
    """The config of a run that was started."""
    return start(f"{home}/own.py:recipe", "width=3", "max_step=7")


def reads_back(directory, **kwargs):
    text = to_text(load_config(directory, **kwargs)) + "\n"
    return text == Path(directory, "config.txt").read_text(encoding="utf-8")


def test_directory_finds_its_recipe(run, home, tmp_path, new_process, capsys):
    assert reads_back(run.dir)
    new_process()
    copy = shutil.copytree(run.dir, tmp_path / "copy")
    assert main(["config", "diff", run.dir, str(copy)]) == 1
    assert capsys.readouterr().out.strip() == f"dir: '{run.dir}' → '{copy}'"
    record = read_record(run.dir)["recipe"]
    assert record["file"] == f"{home}/own.py" and record["words"] == ["width=3", "max_step=7"]


def test_recipe_names_the_directory_of_its_run(run, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    cfg = run_config("own.py:recipe")
    assert (cfg.dir, cfg.model.width) == ("runs/own", 3)
    assert main(["inspect", "own.py:recipe"]) == 2
    assert "no checkpoint in 'runs/own/checkpoints'" in capsys.readouterr().err
    assert main(["report", "own.py:recipe"]) == 0
    assert capsys.readouterr().out.split()[-1] == "runs/own/report.html"


def edit_record(directory, **values):
    path = Path(directory, "run.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    record["recipe"] |= values
    path.write_text(json.dumps(record), encoding="utf-8")


def with_other_text(run, attack):
    path = Path(run.dir, "config.txt")
    path.write_text(
        path.read_text(encoding="utf-8").replace("width=3", "width=4"), encoding="utf-8"
    )


def with_other_file(run, attack):
    edit_record(run.dir, file=str(attack))


def without_signature(run, attack):
    edit_record(run.dir, file=str(attack), signature=None)


def with_copied_record(run, attack):
    """Takes a record that was signed for another config."""
    copy = shutil.copytree(run.dir, attack.parent / "copy")
    with_other_text(run, attack)
    shutil.copy(copy / "run.json", run.dir)


def with_other_key(run, attack):
    os.environ["XDG_CONFIG_HOME"] = str(attack.parent)  # restored by `home`
    signed({}, "")


def without_key(run, attack):
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"])


@pytest.mark.parametrize(
    "change",
    [
        with_other_text,
        with_other_file,
        without_signature,
        with_copied_record,
        with_other_key,
        without_key,
    ],
)
def test_code_is_not_imported_for_a_directory_that_others_may_have_written(
    change, run, home, tmp_path, new_process, capsys
):
    attack = tmp_path / "attack" / "own.py"
    attack.parent.mkdir()
    (home / "own.py").write_text(
        f"open({str(tmp_path / 'it-ran')!r}, 'w').close()\n{OWN}", encoding="utf-8"
    )
    shutil.copy(home / "own.py", attack)
    change(run, attack)
    assert main(["config", "show", run.dir]) == 0  # as it is written
    assert "config_for_class(own.Net)(" in capsys.readouterr().out
    commands = [["tabulate", run.dir]]
    if change is with_other_file:
        commands += [
            ["train", run.dir],
            ["export", run.dir, "--to", "out"],
            ["launch", "local", "-n", "2", run.dir],
        ]
    for command in commands:
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "a text may not name 'own" in error
        assert f"made by {home}/own.py:recipe, but not by you" in error
        assert "--recipe path/to/file.py:function" in error
    assert not (tmp_path / "it-ran").exists()
    width = load_config(run.dir, recipe=f"{home}/own.py:recipe").model.width
    assert width == (4 if change in (with_other_text, with_copied_record) else 3)


def test_record_of_others_is_not_signed(run, home, new_process):
    edit_record(run.dir, name="theirs")
    assert recipe_of_run(run.dir, ["max_step=9"]) is None
    named = recipe_of_run(run.dir, ["max_step=9"], recipe=f"{home}/own.py:recipe")
    assert named is not None and named["words"] is None


def test_continued_run_keeps_its_recipe(run, home, start):
    start(run.dir, "max_step=9", directory=run.dir)
    record = read_record(run.dir)["recipe"]
    assert record["words"] == ["width=3", "max_step=7", "max_step=9"]
    assert load_config(run.dir).max_step == 9


def test_moved_file(run, home, new_process):
    (home / "own.py").rename(home.parent / "own.py")
    with pytest.raises(RecipeError, match=r"no file .*lab/own\.py\. If .* --recipe .*own\.py:rec"):
        load_config(run.dir)
    shutil.copy(home / "own_layers.py", home.parent)
    recipe = f"{home.parent}/own.py:recipe"
    assert reads_back(run.dir, recipe=recipe)


@pytest.mark.parametrize("name", ["own.py", "own_layers.py"])
def test_changed_file_is_told(run, home, name, caplog):
    load_config(run.dir)
    assert caplog.messages == []
    with open(home / name, "a", encoding="utf-8") as file:
        file.write("# more\n")
    assert load_config(run.dir).model.width == 3
    (message,) = caplog.messages
    assert message.startswith(f"{home}/{name} has changed since the run was started")


def test_values_without_a_name_are_made_again(home, start, new_process):
    run = start(f"{home}/own.py:unnamed", "width=3", "max_step=7")
    again = load_config(run.dir)
    assert (again.model.width, again.max_step) == (3, 7) and again.model.activation(2) == 2
    new_process()
    (home / "own.py").write_text(
        OWN.replace("cfg = recipe(width)", "cfg = recipe(2 * width)"), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"makes another config now:(.|\n)*width=6"):
        load_config(run.dir)


def test_text_file_takes_the_recipe_whose_code_it_names(run, home, tmp_path, start):
    file = shutil.copy(Path(run.dir, "config.txt"), tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match=r"a text may not name 'own"):
        load_config(str(file))
    recipe = f"{home}/own.py:recipe"
    start(str(file), f"dir={tmp_path}/new", directory=tmp_path / "new", recipe=recipe)
    assert reads_back(str(tmp_path / "new"))


def test_key_is_readable_by_its_user_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    record = signed({"a": 1}, "text")
    assert is_signed(record, "text") and not is_signed(record, "other")
    assert not is_signed(record | {"a": 2}, "text")
    key = tmp_path / "weft" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and os.listdir(key.parent) == ["key"]
    key.chmod(0o640)
    assert not is_signed(record, "text")
    assert is_signed(signed({"a": 1}, "text"), "text")
    assert not is_signed(record, "text") and stat.S_IMODE(key.stat().st_mode) == 0o600


def test_run_starts_where_no_key_can_be_kept(home, start, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    run = start(f"{home}/own.py:recipe")
    assert "signature" not in read_record(run.dir)["recipe"]


def test_launched_processes_get_the_recipe(run, home, capsys):
    recipe = f"{home}/own.py:recipe"
    words = ["-n", "2", "--recipe", recipe, run.dir]
    assert main(["launch", "slurm", *words]) == 0
    assert f"weft train --recipe {recipe} {run.dir}" in capsys.readouterr().out
