"""

`weft config`: texts that can be read, saved and compared.
"""

import pytest

from weft.cli import main
from weft.cli.configs import load_config, on_mesh, parse_mesh, run_config
from weft.config import to_text
from weft.errors import CommandLineError, ConfigTextError, UnknownConfigError, UnknownFieldError
from weft.recipes.lm import lm_tiny
from weft.trainer.run_dir import claim_run_dir


def test_config_text_loads_like_its_recipe(tmp_path):
    recipe = load_config("lm-tiny", ["max_step=7"])
    assert recipe.max_step == 7
    text = tmp_path / "mine.txt"
    text.write_text(to_text(recipe), encoding="utf-8")
    assert load_config(str(text)) == recipe
    # As an editor on Windows saves it.
    text.write_bytes(b"\xef\xbb\xbf" + to_text(recipe).replace("\n", "\r\n").encode())
    assert load_config(str(text)) == recipe
    (tmp_path / "config.txt").write_text(to_text(recipe), encoding="utf-8")
    assert run_config(str(tmp_path)) == recipe.clone(dir=str(tmp_path))


def test_invalid_config(tmp_path):
    with pytest.raises(
        UnknownConfigError, match=r"unknown recipe 'lm-tinny'\. Did you mean 'lm-tiny'"
    ):
        load_config("lm-tinny")
    with pytest.raises(UnknownConfigError, match="there is no file or directory 'no/where'"):
        load_config("no/where")
    with pytest.raises(CommandLineError, match="has no run in it"):
        load_config(str(tmp_path))
    (tmp_path / "bad.txt").write_text("this is not a config", encoding="utf-8")
    with pytest.raises((ConfigTextError, CommandLineError)):
        load_config(str(tmp_path / "bad.txt"))
    with pytest.raises((UnknownFieldError, ValueError), match=r"Did you mean 'max_step'"):
        load_config("lm-tiny", ["max_steps=3"])


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_run_that_lost_its_config_asks_for_its_recipe(tmp_path, how, capsys):
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    if how == "emptied":
        (tmp_path / "config.txt").touch()
        (tmp_path / "run.json").touch()
    assert main(["train", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "is lost: config.txt is empty or missing, and run.json has no copy of it" in err
    assert f"the run then continues: weft train RECIPE dir={tmp_path}\n" in err


def test_hardware():
    rules = [("gpu-.*", (4, 2)), ("tpu-.*", None)]
    assert on_mesh(lm_tiny().set(mesh_rules=rules), selector="gpu-8").mesh_shape == (4, 2)
    with pytest.raises(CommandLineError, match=r"'cpu': no mesh rule .* match 'gpu-.*', 'tpu-"):
        on_mesh(lm_tiny().set(mesh_rules=rules), selector="cpu")
    with pytest.raises(CommandLineError, match="The rules match nothing"):
        on_mesh(lm_tiny(), selector="cpu")


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=2,data=2", "data=2;model=2"])
def test_invalid_mesh(text):
    with pytest.raises(CommandLineError, match="write it as --mesh data=4,model=2"):
        parse_mesh(text)


def test_invalid_mesh_names_the_axis():
    with pytest.raises(CommandLineError, match="has the axis 'data' twice"):
        parse_mesh("data=2,seq=2,data=2")
    for size in ("0", "-2"):
        with pytest.raises(CommandLineError, match=f"has seq={size}, but a size is 1 or more"):
            parse_mesh(f"data=2, seq={size}")


def test_unknown_mesh_axis():
    with pytest.raises(
        CommandLineError, match=r"no axis 'dta'\. The config's mesh has 'data', 'mo"
    ):
        on_mesh(lm_tiny(), mesh="dta=2,fsdp=2")


def show(capsys, *words):
    assert main(["config", "show", *words]) == 0
    return capsys.readouterr().out


def test_origins_name_recipe_line_and_command_line(capsys):
    lines = show(capsys, "lm-tiny", "max_step=7", "--origin").splitlines()
    (max_step,) = [line for line in lines if line.startswith("    max_step=")]
    assert max_step == "    max_step=7,  # command line"
    (batch,) = [line for line in lines if "global_batch_size=8," in line]
    assert "weft/recipes/lm.py:" in batch


def test_recipes_files_and_runs_can_be_compared(tmp_path, capsys):
    file = tmp_path / "mine.txt"
    file.write_text(show(capsys, "lm-tiny", f"dir={tmp_path / 'run'}", "seed=3"), encoding="utf-8")
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
def test_invalid_config_text_is_rejected(text, message, tmp_path, capsys):
    file = tmp_path / "x.txt"
    file.write_text(text, encoding="utf-8")
    assert main(["config", "show", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_unreadable_file_is_reported(tmp_path, capsys):
    file = tmp_path / "x.bin"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["config", "show", str(file)]) == 2
    assert f"cannot read '{file}'" in capsys.readouterr().err
