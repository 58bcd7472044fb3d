"""A run's directory: who may use it, and what it remembers."""

import errno
import os
import re

import jax
import numpy as np
import pytest

from weft.config import REQUIRED, Configurable, Required, config_class, config_for_function
from weft.errors import FileRefusedError, RunDirError
from weft.input.corpus import folder_corpus
from weft.input.data_files import files_record
from weft.input.datasets import json_lines_dataset
from weft.input.text import lm_documents_source
from weft.recipes.lm import lm_tiny
from weft.serialization.directory import Directory
from weft.trainer.parallelism import ParallelismModifier
from weft.trainer.run_dir import (
    CONFIG_FILE,
    check_run_dir,
    claim_run_dir,
    data_text,
    environment,
    number_of_run,
    read_record,
    schedule_steps,
    update_record,
)


class Source(Configurable):
    @config_class
    class Config(Configurable.Config):
        corpus: object = None
        seed: int = 0


class Run(Configurable):
    """Fake trainer: only the fields of its config are read."""

    @config_class
    class Config(Configurable.Config):
        dir: Required[str] = REQUIRED
        max_step: int = 10
        width: int = 4
        evalers: dict = {}
        input: Source.Config = Source.default_config()
        learner: Source.Config = Source.default_config()
        fn: object = None


def run_config(dir, **fields):
    return Run.default_config().set(dir=str(dir), **fields)


def claim_and_save(cfg):
    """Claims a directory, and leaves a checkpoint in it."""
    claim_run_dir(cfg)
    os.makedirs(os.path.join(cfg.dir, "checkpoints", "step_00000001"))


def test_claim_creates_directory_and_check_does_not(tmp_path):
    cfg = run_config(tmp_path / "a" / "b")
    check_run_dir(cfg)
    assert not (tmp_path / "a").exists()
    claim_run_dir(cfg)
    assert "max_step=10" in (tmp_path / "a" / "b" / CONFIG_FILE).read_text(encoding="utf-8")


def test_number_of_a_run_is_that_of_no_other(tmp_path):
    cfg = run_config(tmp_path)
    claim_run_dir(cfg)
    number = number_of_run(cfg.dir)
    claim_run_dir(cfg)
    claim_run_dir(cfg.set(max_step=20))
    assert number_of_run(cfg.dir) == number
    # Nothing is saved yet, so any run may have the directory.
    claim_run_dir(cfg.set(width=5))
    of_width_5 = number_of_run(cfg.dir)
    claim_run_dir(cfg.set(fn=lambda: 1))
    of_function = number_of_run(cfg.dir)
    claim_and_save(cfg.set(fn=lambda: 2))
    of_other_function = number_of_run(cfg.dir)
    assert len({number, of_width_5, of_function, of_other_function}) == 4
    claim_run_dir(cfg.set(width=6), resume=True)
    assert number_of_run(cfg.dir) == of_other_function


def test_starts_are_recorded_with_environment(tmp_path):
    cfg = run_config(tmp_path)
    assert not claim_run_dir(cfg)
    assert claim_run_dir(cfg.set(max_step=20, evalers={"x": 1}))
    starts = read_record(cfg.dir)["starts"]
    assert len(starts) == 2 and starts[0]["jax"] == jax.__version__
    assert starts[0].keys() == environment().keys()
    assert "max_step=20" in (tmp_path / CONFIG_FILE).read_text(encoding="utf-8")


def test_other_config_is_rejected_with_the_diff(tmp_path):
    claim_and_save(run_config(tmp_path))
    before = (tmp_path / CONFIG_FILE).read_text(encoding="utf-8")
    with pytest.raises(RunDirError, match=r"width: 4 → 8") as error:
        claim_run_dir(run_config(tmp_path, width=8, max_step=11))
    assert "max_step" not in str(error.value)
    assert f"Choose another directory, such as dir='{tmp_path}-2'" in str(error.value)
    assert error.value.free_dir == f"{tmp_path}-2"
    assert (tmp_path / CONFIG_FILE).read_text(encoding="utf-8") == before


def test_a_run_may_continue_on_another_mesh(tmp_path):
    claim_and_save(lm_tiny().set(dir=str(tmp_path)))
    on_mesh = ParallelismModifier.default_config().set(fsdp=2, seq=2, model=2).instantiate()
    check_run_dir(on_mesh(lm_tiny().set(dir=str(tmp_path))))


def test_directory_without_a_checkpoint_is_free_for_another_config(tmp_path):
    claim_run_dir(run_config(tmp_path))
    (tmp_path / "checkpoints" / "step_00000001.tmp").mkdir(parents=True)  # not completed
    assert claim_run_dir(run_config(tmp_path, width=8))
    assert "width=8" in (tmp_path / CONFIG_FILE).read_text(encoding="utf-8")
    assert len(read_record(str(tmp_path))["starts"]) == 1


def test_unserializable_values_compare_as_text(tmp_path):
    def config_of(number, **kwargs):
        return run_config(tmp_path, fn=lambda: number, **kwargs)

    claim_and_save(config_of(1))
    check_run_dir(config_of(1))
    with pytest.raises(RunDirError, match=r"fn\.number: 1 → 2"):
        check_run_dir(config_of(2))
    with pytest.raises(RunDirError, match=r"width: - 4\n  width: \+ 8"):
        check_run_dir(config_of(1, width=8))


HOSTILE = {
    "a line": "-" * 10**5 + "1",
    "names": f"A({','.join(f'x{i}=1' for i in range(60_000))})",
    "lines": "A(\n" + "".join(f"x{i}=[\n{i}],\n" for i in range(30_000)) + ")",
    "dots": "a" + ".b" * 10**5 + "()",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_comparison_with_a_strangers_text_is_bounded(tmp_path, text):
    """It took hours, and printed all of the text."""
    claim_and_save(run_config(tmp_path))
    (tmp_path / CONFIG_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(RunDirError, match="belongs to a run with another config") as caught:
        check_run_dir(run_config(tmp_path))
    assert len(str(caught.value)) < 12_000


def test_changed_corpus_is_rejected_by_hash(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("one", encoding="utf-8")
    corpus = config_for_function(folder_corpus).set(
        paths=str(tmp_path / "text"), held_out_fraction=0.0
    )
    cfg = run_config(tmp_path / "run", input=Source.default_config().set(corpus=corpus))
    claim_and_save(cfg)
    assert read_record(cfg.dir)["corpora"]["input.corpus"]["train_bytes"] == 3
    check_run_dir(cfg)
    (tmp_path / "text" / "a").write_text("two", encoding="utf-8")
    with pytest.raises(
        RunDirError, match=r"input\.corpus was text with the SHA-256 (.|\n)* restore what"
    ):
        check_run_dir(cfg)


LINES = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("edited", LINES.replace("two", "TWO")),
        ("halved", LINES[: len(LINES) // 2]),
        ("extended", LINES * 2),
    ],
)
@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl", ["b.jsonl", "a.jsonl"]])
def test_changed_files_of_records_are_rejected(tmp_path, pattern, name, changed):
    for file in ("a.jsonl", "b.jsonl"):
        (tmp_path / file).write_text(LINES, encoding="utf-8")
    (tmp_path / "other.txt").write_text(LINES, encoding="utf-8")
    patterns = [pattern] if isinstance(pattern, str) else pattern
    paths = [str(tmp_path / pattern) for pattern in patterns]
    documents = config_for_function(json_lines_dataset).set(paths=paths)
    source = config_for_function(lm_documents_source).set(documents={"lines": documents})
    cfg = run_config(tmp_path / "run", input=source)
    claim_and_save(cfg)
    check_run_dir(cfg)
    os.utime(tmp_path / "a.jsonl")  # touched, or copied, but with the same contents
    (tmp_path / "other.txt").write_text(changed, encoding="utf-8")
    check_run_dir(cfg)
    (tmp_path / "a.jsonl").write_text(changed, encoding="utf-8")
    with pytest.raises(RunDirError) as caught:
        check_run_dir(cfg)
    text = str(caught.value)
    size = (2 if pattern == "*.jsonl" else len(paths)) * len(LINES)
    assert "belongs to a run on other data: input.documents['lines'].paths was " in text
    assert f"of {size} bytes with the SHA-256 " in text and "or restore what has changed." in text


def test_data_may_be_mended_where_the_run_asked_for_it(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text(LINES[:-2], encoding="utf-8")
    documents = config_for_function(json_lines_dataset).set(paths=str(tmp_path / "a.jsonl"))
    source = config_for_function(lm_documents_source).set(documents=documents)
    cfg = run_config(tmp_path / "run", input=source)
    claim_and_save(cfg)
    reason = "ProcessLostError: process 1 of 2 has failed: InputReadError: a.jsonl, line 2"
    update_record(cfg.dir, end={"step": 1, "reason": reason})
    (tmp_path / "a.jsonl").write_text(LINES, encoding="utf-8")
    claim_run_dir(cfg)
    assert "The data was mended after the run had failed to read it: input.docum" in caplog.text
    update_record(cfg.dir, end=None)
    check_run_dir(cfg)
    (tmp_path / "a.jsonl").write_text(LINES[:-2], encoding="utf-8")
    with pytest.raises(RunDirError, match="belongs to a run on other data"):
        check_run_dir(cfg)


def test_changed_tokenizer_is_rejected(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    source = config_for_function(lm_documents_source).set(tokenizer=f"{tmp_path}/tokenizer.json")
    cfg = run_config(tmp_path / "run", input=source)
    claim_and_save(cfg)
    (tmp_path / "tokenizer.json").write_text("[]", encoding="utf-8")
    with pytest.raises(RunDirError, match=r"input\.tokenizer was tokenizer\.json of 2 bytes with"):
        check_run_dir(cfg)


def test_changed_data_to_evaluate_on_is_said(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text(LINES, encoding="utf-8")
    documents = config_for_function(json_lines_dataset).set(paths=str(tmp_path / "a.jsonl"))
    source = config_for_function(lm_documents_source).set(documents=documents)
    cfg = run_config(tmp_path / "run", evalers={"held_out": {"input": source}})
    claim_and_save(cfg)
    claim_run_dir(cfg)
    assert not caplog.text
    (tmp_path / "a.jsonl").write_text(LINES * 2, encoding="utf-8")
    claim_run_dir(cfg)
    path = "evalers['held_out']['input'].documents.paths"
    assert f"The data to evaluate on has changed: {path} was a.jsonl of 32 bytes" in caplog.text
    assert "and is a.jsonl of 64 bytes" in caplog.text


def test_large_files_are_compared_by_size_and_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.input.data_files._WHOLE_BYTES", 2**20)
    file = tmp_path / "large.bin"
    large = np.random.default_rng(0).bytes(2**22)
    file.write_bytes(large)
    before = files_record([str(file)])
    assert before["bytes"] == 2**22 and data_text(before).endswith("… of a sample of it")
    for other in (large[:-1], large + b"x", large[2**20 :] + large[: 2**20]):
        file.write_bytes(other)
        os.utime(file, ns=(1, len(other)))
        assert files_record([str(file)])["sha256"] != before["sha256"]
    file.write_bytes(large)
    assert files_record([str(file)]) == before


def lose(path, how):
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "emptied" else bytes(300))


@pytest.mark.parametrize("how", ["emptied", "removed", "zeros"])
def test_lost_config_is_written_again_from_its_copy(tmp_path, caplog, how):
    claim_and_save(run_config(tmp_path))
    text = (tmp_path / CONFIG_FILE).read_text(encoding="utf-8")
    lose(tmp_path / CONFIG_FILE, how)
    with pytest.raises(RunDirError, match="width: 4 → 8"):
        claim_run_dir(run_config(tmp_path, width=8))
    assert claim_run_dir(run_config(tmp_path))
    assert (tmp_path / CONFIG_FILE).read_text(encoding="utf-8") == text
    assert f"{CONFIG_FILE} is empty or missing, as after a power loss. It is written" in caplog.text
    assert "compared with its copy in run.json" in caplog.text


@pytest.mark.parametrize("how", ["emptied", "removed", "zeros"])
def test_lost_record_is_begun_again(tmp_path, caplog, how):
    claim_and_save(run_config(tmp_path))
    lose(tmp_path / "run.json", how)
    with pytest.raises(RunDirError, match="width: 4 → 8"):
        claim_run_dir(run_config(tmp_path, width=8))
    assert claim_run_dir(run_config(tmp_path)) and len(read_record(str(tmp_path))["starts"]) == 1
    assert "run.json is empty or missing, as after a power loss. It is begun again" in caplog.text


@pytest.mark.parametrize("text", ["{", '{"starts": 7}', "[]", '{"corpora": {"input": 1}}'])
def test_damaged_record_is_kept_aside_and_begun_again(tmp_path, caplog, text):
    claim_and_save(run_config(tmp_path))
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunDirError, match="width: 4 → 8"):
        claim_run_dir(run_config(tmp_path, width=8))
    assert claim_run_dir(run_config(tmp_path)) and len(read_record(str(tmp_path))["starts"]) == 1
    assert "It is kept as run.json.damaged. It is begun again, without earlier" in caplog.text
    assert (tmp_path / "run.json.damaged").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("how", ["emptied", "zeros", "removed"])
def test_run_that_lost_both_continues_and_says_so(tmp_path, caplog, how):
    claim_and_save(run_config(tmp_path))
    lose(tmp_path / CONFIG_FILE, how)
    lose(tmp_path / "run.json", how)
    assert claim_run_dir(run_config(tmp_path))
    assert "the given config cannot be compared with it" in caplog.text
    assert (tmp_path / CONFIG_FILE).stat().st_size and read_record(str(tmp_path))["starts"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_one_error_of_the_file_system_does_not_stop_a_start(tmp_path, monkeypatch, number):
    monkeypatch.setattr("weft.trainer.checkpointer.retries.PAUSES_SECONDS", (0.0,))
    claim_and_save(run_config(tmp_path))
    left = [number]

    def failing_once(call):
        def called(*args, **kwargs):
            if left and "run.json" in str(args):
                raise OSError(left.pop(), "once")
            return call(*args, **kwargs)

        return called

    monkeypatch.setattr(Directory, "read_bytes", failing_once(Directory.read_bytes))
    assert claim_run_dir(run_config(tmp_path)) and not left
    left.append(number)
    monkeypatch.setattr(Directory, "write", failing_once(Directory.write))
    assert claim_run_dir(run_config(tmp_path)) and not left
    assert len(read_record(str(tmp_path))["starts"]) == 3


def test_lost_record_keeps_the_length_of_schedules(tmp_path, caplog):
    cfg = lm_tiny().set(dir=str(tmp_path), max_step=20)
    assert schedule_steps(cfg) == 20
    claim_and_save(cfg)
    lose(tmp_path / "run.json", "emptied")
    longer = cfg.clone(max_step=40)
    assert schedule_steps(longer) == 20  # of the curve that the checkpoint belongs to
    claim_run_dir(longer)
    assert "the learner's schedules are taken to have 20 steps" in caplog.text
    assert schedule_steps(longer.clone(max_step=80)) == 20


def test_checkpoints_of_unknown_run_are_kept(tmp_path):
    (tmp_path / "checkpoints" / "of_another_kind").mkdir(parents=True)
    with pytest.raises(RunDirError, match="holds checkpoints of an unknown run"):
        claim_run_dir(run_config(tmp_path))
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_directory_below_a_file_is_rejected(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunDirError, match=re.escape(f"{tmp_path}/file is a file")):
        check_run_dir(run_config(tmp_path / "file" / "run"))


def test_directory_that_is_not_in_utf8_is_rejected(tmp_path):
    name = os.fsdecode("kraków".encode("iso8859-2"))
    with pytest.raises(RunDirError, match=r"krak\\udcf3w' is not in UTF-8.* ASCII.*PYTHONUTF8=1"):
        check_run_dir(run_config(tmp_path / name))
    check_run_dir(run_config(tmp_path / "kraków"))


def test_unwritable_directory_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(RunDirError, match="may not be written"):
        check_run_dir(run_config(tmp_path / "run"))


def test_disk_errors_are_reported(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunDirError, match="No space left on device"):
        claim_run_dir(run_config(tmp_path / "run"))


def test_unreadable_config_or_record_is_named(tmp_path):
    claim_and_save(run_config(tmp_path))
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunDirError, match=r"run\.json cannot be read.*move it away"):
        read_record(str(tmp_path))
    (tmp_path / CONFIG_FILE).unlink()
    (tmp_path / CONFIG_FILE).mkdir()
    with pytest.raises(FileRefusedError, match=r"config\.txt' is a directory, where a file"):
        check_run_dir(run_config(tmp_path))


def test_invalid_config_file_is_another_run(tmp_path):
    claim_and_save(run_config(tmp_path))
    (tmp_path / CONFIG_FILE).write_text("1 +", encoding="utf-8")
    with pytest.raises(RunDirError, match="belongs to a run with another config"):
        check_run_dir(run_config(tmp_path))
