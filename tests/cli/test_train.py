"""`weft train`: what it refuses before any work, and what it says and leaves behind."""

import contextlib
import io
import json
import shutil
import sys

import jax
import pytest
from rich.console import Console

from weft.cli import main
from weft.cli.configs import load_config
from weft.cli.train import _Training, program, run, split_arguments
from weft.report.display import make_display
from weft.report.recorder import RunRecorder
from weft.trainer.run_dir import claim_run_dir
from weft.trainer.summary_writer.files import read_json_lines

pytestmark = pytest.mark.usefixtures("one_device")

TINY = ["train", "lm-tiny"]

eight_devices = pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns an empty directory that the process works in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lerning_rate=1", "lerning_rate"),
        ("learner.optimizer.inner.learning_rate.peek_lr=1", "Did you mean 'peak_lr'?"),
        ("max_step=many", "max_step=many"),
        (
            "max_step=3.5",
            "trainer.max_step=3.5 is not a number of steps; expected an int",
        ),
        ("input.source.sequence_length=wide", "expected int"),
        ("model=3", "model=3"),
        ("model.decoder.output_dtype='x'", "model.decoder.output_dtype='x' is not a dtype; write"),
        ("model.decoder.output_dtype=1e308", "model.decoder.output_dtype=1e+308 is not a dtype"),
        ("config_modifiers=['x']", "config_modifiers holds 'x', which cannot be called"),
        ("input.source.num_workers=-1", "num_workers=-1 processes cannot create batches"),
        ("input.source.num_workers=1000000", "num_workers=1000000 processes cannot create"),
        ("model.decoder.output_dtype={}", "model.decoder.output_dtype={} is not a dtype"),
        ("model.decoder.param_partition_spec=3", "param_partition_spec=3 is not a layout; write"),
        (
            "model.decoder.transformer.layer.self_attention.attention.input_linear."
            "partial_rope_factor=1e308",
            "expected a factor in (0, 1]",
        ),
        ("dir=file/run", "file is a file"),
        ("mesh_shape=77,1", "(data=77, model=1) needs 77 devices"),
        ("mesh_shape=2,2,2", "has 3 axes"),
        pytest.param("mesh_shape=1,8", "does not divide over model = 8", marks=eight_devices),
        pytest.param(
            "input.source.global_batch_size=12", "use a multiple of 8", marks=eight_devices
        ),
        ("input.source.corpus.pattern=none/*", "no text"),
        ("input.source.sequence_length=1000000", "add text or reduce sequence_length"),
    ],
)
@pytest.mark.usefixtures("all_devices")
def test_invalid_input_exits_with_code_2(override, message, folder, capsys):
    (folder / "file").write_text("kept", encoding="utf-8")
    assert main([*TINY, override]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_directory_of_other_config_is_unchanged(folder, capsys):
    claim_run_dir(load_config("lm-tiny", ["dir=run"]))
    (folder / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    assert main([*TINY, "dir=run", "model.decoder.dim=32", "max_step=5"]) == 2
    assert "model.decoder.dim: 24 → 32" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    assert after == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the directory of a run that is done, to be copied."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    assert main([*TINY, f"dir={directory}"]) == 0
    return directory


@pytest.fixture
def run_dir(trained, folder):
    return shutil.copytree(trained, folder / "run")


@pytest.mark.long
def test_finished_run_prints_summary_and_report(run_dir, capsys):
    assert main([*TINY, "dir=run"]) == 0
    captured = capsys.readouterr()
    for part in (
        "finished at step 60 already",
        "corpus     stdlib-",
        "trigram    loss ",
        "held_out at step 60: loss ",
        "below unigram (",
        "Unprompted text from the model:",
        "report     run/report.html",
        "tensorboard --logdir run",
        "train lm-tiny dir=run max_step=120",
        "sample run --prompt 'def '",
    ):
        assert part in captured.out, part
    assert captured.err == ""
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "60 steps, finished" in page and "<svg" in page and "vocab_size=264" in page
    record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    assert len(record["starts"]) == 2 and record["end"] == {"step": 60, "reason": "max_step"}
    assert record["baselines"].keys() == {"unigram", "bigram", "trigram"}
    assert [sample["step"] for sample in record["samples"]] == [60] and record["samples"][0]["text"]


@pytest.mark.long
def test_finished_run_prints_to_an_output_of_ascii(run_dir, monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert main([*TINY, "dir=run"]) == 0
    assert rb"devices    1 \xd7 " in output.getvalue()


@pytest.mark.long
def test_end_of_a_saved_run_does_not_fail_for_its_records(run_dir, monkeypatch, capsys, caplog):
    """The exit code says whether the last step is saved, whatever happens to what is shown."""
    on_end = RunRecorder.on_end

    def damaging(recorder, step, reason):
        (run_dir / "run.json").write_text('{"starts": 7', encoding="utf-8")
        summaries = run_dir / "summaries" / "train_train" / "summaries.jsonl"
        with open(summaries, "ab") as file:
            file.write(b"\0" * 100 + b"\nnot JSON\n")
        (run_dir / "report.html").unlink()
        (run_dir / "report.html").mkdir()
        on_end(recorder, step, reason)

    monkeypatch.setattr(RunRecorder, "on_end", damaging)
    monkeypatch.setattr("weft.cli.sample.generate_text", lambda *args, **kwargs: 1 / 0)
    assert main([*TINY, "dir=run", "max_step=61"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    for what in (
        "the record of the run cannot be written: ",
        "the report of the run cannot be written: ",
        "no text of the model can be shown: ZeroDivisionError: division by zero",
    ):
        assert what in caplog.text
    assert (run_dir / "checkpoints" / "step_00000061").is_dir()

    # The next start says what is wrong with the record; of the summaries only the damage is lost.
    monkeypatch.undo()
    monkeypatch.chdir(run_dir.parent)
    shutil.rmtree(run_dir / "report.html")
    assert main([*TINY, "dir=run", "max_step=62"]) == 0
    assert "summaries.jsonl ends in 110 bytes that are damaged" in caplog.text
    assert "run.json is damaged: " in caplog.text
    assert "It is kept as run.json.damaged. It is begun again" in caplog.text
    steps = {line["step"] for line in read_json_lines(str(run_dir / "summaries/train_train"))}
    assert {60, 61} <= steps


def test_run_without_standard_streams(run_dir, monkeypatch):
    """As started by `<&- >&- 2>&-`."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
        monkeypatch.setattr(sys, f"__{name}__", None)
    assert main([*TINY, "dir=run"]) == 0
    assert main([*TINY, "dir=run", "seed=7"]) == 2
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


SWALLOWING = """
import contextlib
import signal

from weft.recipes.lm import lm_tiny as recipe

with contextlib.suppress(BaseException):  # such as a package that does without another one
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize("then", ["", "import half_imported"])
def test_interrupt_that_an_import_swallows_stops_the_run(folder, monkeypatch, then):
    (folder / "swallowing.py").write_text(SWALLOWING + then, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "swallowing", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["train", "swallowing.py:recipe", "dir=run"]) == 130
    assert not (folder / "run" / "checkpoints").exists()


def test_run_directory_names_a_config(run_dir, capsys):
    assert main(["config", "diff", "run", "lm-tiny"]) == 1
    assert capsys.readouterr().out.startswith("dir: ")
    assert main(["config", "show", "run"]) == 0
    assert "vocab_size=264" in capsys.readouterr().out


def test_checkpoint_is_inspected(run_dir, capsys):
    assert main(["inspect", "run"]) == 0
    out = capsys.readouterr().out
    assert "step 40 " in out and "step 60 " in out
    assert "(264, 24)" in out and "key<fry>" in out and "PrefetchingIterator" in out


def damage(run_dir, step):
    """Alters a byte of the largest file of a checkpoint."""
    files = (run_dir / "checkpoints" / f"step_{step:08d}" / "arrays").rglob("*")
    path = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.long
def test_damaged_checkpoint_is_reported_and_previous_used(run_dir, capsys, caplog):
    damage(run_dir, 60)
    assert main([*TINY, "dir=run", "max_step=41"]) == 0
    assert "resuming from step 40" in capsys.readouterr().out
    assert "step_00000060" in caplog.text and "its content has changed" in caplog.text


def test_damaged_checkpoints_are_not_overwritten(run_dir, capsys):
    for step in (40, 60):
        damage(run_dir, step)
    before = sorted(p for p in (run_dir / "checkpoints").rglob("*"))
    assert main([*TINY, "dir=run", "max_step=70"]) == 1
    err = capsys.readouterr().err
    assert "step_00000060" in err and "step_00000040" in err
    assert sorted(p for p in (run_dir / "checkpoints").rglob("*")) == before


def test_recipe_may_be_omitted():
    assert split_arguments([]) == ("lm", [])
    assert split_arguments(["a=1", "lm-tiny", "b=2"]) == ("lm-tiny", ["a=1", "b=2"])


def test_suggested_programs_are_on_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env").mkdir()
    for name in ("weft", "tensorboard"):
        (tmp_path / "env" / name).touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "env" / "weft")])
    monkeypatch.setenv("PATH", "")
    assert program("weft") == "env/weft" and program("tensorboard") == "env/tensorboard"
    assert program("other") == "other"
    monkeypatch.setenv("PATH", str(tmp_path / "env"))
    assert program("weft") == "weft"


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 devices")
@pytest.mark.usefixtures("all_devices")
def test_run_resumes_on_another_mesh(folder, capsys, monkeypatch):
    small = [*TINY, "dir=over", "model.decoder.transformer.num_layers=1", "evalers={}"]
    monkeypatch.setattr("weft.cli.train._sample", lambda *args: [])
    assert main([*small, "max_step=1"]) == 0
    assert main([*small, "max_step=2", "--mesh", "fsdp=4,model=2"]) == 0
    said = capsys.readouterr().out
    assert "mesh fsdp=4, model=2" in said
    assert "resuming from step 1" in said
    assert "train --mesh fsdp=4,model=2 lm-tiny" in said


@pytest.mark.parametrize("reason", ["max_step", "SIGTERM"])
def test_required_base_run_is_trained_first(reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained = []

    def train(recipe, cfg, recipe_record=None, resume=False):
        trained.append((recipe, cfg.dir))
        display = make_display(Console(), cfg.dir)
        display.on_end(7, reason)
        return _Training(object(), display, 7, reason, {})

    monkeypatch.setattr("weft.cli.train._run", train)
    monkeypatch.setattr("weft.cli.train._conclude", lambda *args: 0)
    monkeypatch.setattr("weft.recipes.lm_lora._export", lambda path, cfg, trainer: None)
    assert main(["train", "lm-lora"]) == (143 if reason == "SIGTERM" else 0)
    first = [("lm-llama", "runs/lm-llama")]
    assert trained == (first if reason == "SIGTERM" else [*first, ("lm-lora", "runs/lm-lora")])
    stopped = "stopped by SIGTERM after step 7, which is saved in runs/lm-llama"
    assert (stopped in capsys.readouterr().out) == (reason == "SIGTERM")


def test_launched_processes_start_nothing_fresh(folder, monkeypatch, capsys):
    (folder / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    place = contextlib.nullcontext(object())
    monkeypatch.setattr("weft.cli.train.joined_processes", lambda: place)
    assert main([*TINY, "--fresh", "dir=run"]) == 2
    assert "--fresh is for a run that you start yourself" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_abandoned_compilation_does_not_block_exit(monkeypatch):
    class Ended(BaseException):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr("weft.cli.train._train", lambda arguments: 75)
    monkeypatch.setattr("os._exit", end)
    assert run(None) == 75
    monkeypatch.setattr("weft.cli.train.still_compiling", lambda: True)
    with pytest.raises(Ended, match="75"):
        run(None)
