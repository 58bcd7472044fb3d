"""`weft config`: texts that can be read, saved and compared."""

import pytest

from weft.cli import main
from weft.cli.configs import load_config
from weft.config import diff, from_text
from weft.trainer.run_record import claim_run_dir


def show(capsys, *words):
    assert main(["config", "show", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--defaults",), ("--origin",)])
def test_the_text_reads_back_to_the_config(options, capsys):
    cfg = load_config("lm-tiny", ["max_step=7"])
    assert not diff(from_text(show(capsys, "lm-tiny", "max_step=7", *options)), cfg)


def test_defaults_are_left_out_unless_asked_for(capsys):
    assert "watchdog_timeout_seconds" not in show(capsys, "lm-tiny")
    assert "watchdog_timeout_seconds=None" in show(capsys, "lm-tiny", "--defaults")


def test_origins_name_the_line_of_the_recipe_and_the_command_line(capsys):
    lines = show(capsys, "lm-tiny", "max_step=7", "--origin").splitlines()
    (max_step,) = [line for line in lines if line.startswith("    max_step=")]
    assert max_step == "    max_step=7,  # command line"
    (batch,) = [line for line in lines if "global_batch_size=8," in line]
    assert "weft/recipes/lm.py:" in batch


def test_recipes_files_and_runs_can_be_compared(tmp_path, capsys):
    file = tmp_path / "mine.txt"
    file.write_text(show(capsys, "lm-tiny", f"dir={tmp_path / 'run'}", "seed=3"))
    claim_run_dir(load_config(str(file)))
    assert main(["config", "diff", str(file), str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "The configs are equal.\n"
    assert main(["config", "diff", "lm-tiny", str(file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "seed: 0 → 3"
    assert main(["config", "diff", "lm", "lm-tiny"]) == 1
    assert "model.decoder.dim: 96 → 24" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 +", "not a config text"),
        ("os.system('true')", "os.system"),
        ("weft.trainer.trainer.SpmdTrainer.Config(max_stp=3)", "max_stp"),
    ],
)
def test_a_text_that_is_no_config_is_refused(text, message, tmp_path, capsys):
    file = tmp_path / "x.txt"
    file.write_text(text)
    assert main(["config", "show", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    file = tmp_path / "x.bin"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["config", "show", str(file)]) == 2
    assert f"cannot read '{file}'" in capsys.readouterr().err
