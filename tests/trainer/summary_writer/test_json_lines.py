import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import RunDirError
from weft.hierarchy.metrics import ArraySummary
from weft.metrics import F1Score
from weft.trainer.summary_writer import JsonLinesWriter, read_json_lines
from weft.trainer.summary_writer.base import CheckpointerAction
from weft.trainer.summary_writer.files import JSON_LINES_FILE


def make(path, **kwargs):
    cfg = JsonLinesWriter.default_config().set(name="writer", dir=str(path), **kwargs)
    return cfg.instantiate(parent=None)


def lines(path):
    return (path / JSON_LINES_FILE).read_text(encoding="utf-8").splitlines()


def test_one_object_per_line(tmp_path):
    writer = make(tmp_path / "new" / "dir")
    writer(3, {"model": {"loss": jnp.array(0.5)}, "text": "hé", "w": np.ones(3)})
    writer.log_average_step_time(4, [0.25, 0.75])
    first, second = [json.loads(line) for line in lines(tmp_path / "new" / "dir")]
    assert (first["step"], first["values"]) == (3, {"model/loss": 0.5, "text": "hé"})
    assert second["values"] == {"average_step_time": 0.5}
    assert first["time"] <= second["time"]


def test_nonfinite_numbers_round_trip_as_valid_json(tmp_path):
    make(tmp_path)(1, {"a": math.nan, "b": -math.inf, "c": jnp.inf})

    def refuse(word):
        raise ValueError(word)

    json.loads(lines(tmp_path)[0], parse_constant=refuse)
    (record,) = read_json_lines(str(tmp_path))
    assert math.isnan(record["values"]["a"])
    assert (record["values"]["b"], record["values"]["c"]) == (-math.inf, math.inf)


def test_configs_and_checkpoints(tmp_path):
    writer = make(tmp_path)
    writer.log_config(writer.config, step=2)
    writer.log_checkpoint("/c/step_00000005", state={}, action=CheckpointerAction.SAVE, step=5)
    config, checkpoint = read_json_lines(str(tmp_path / JSON_LINES_FILE))
    assert config["config"] == writer.config.debug_string()
    assert checkpoint["checkpoint"] == {"action": "SAVE", "dir": "/c/step_00000005"}


def test_restored_step_voids_later_lines(tmp_path):
    writer = make(tmp_path)
    for step in (1, 2, 3, 4):
        writer(step, {"loss": 1.0})
    writer = make(tmp_path)
    writer.log_checkpoint("d", state={}, action=CheckpointerAction.RESTORE, step=2)
    for step in (3, 4, 5):
        writer(step, {"loss": 2.0})
    assert len(lines(tmp_path)) == 8
    records = [record for record in read_json_lines(str(tmp_path)) if "values" in record]
    found = [(record["step"], record["values"]["loss"]) for record in records]
    assert found == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


@pytest.mark.parametrize("torn", [b'{"step": 2, "ti', b"\xc3"])
def test_truncated_line_is_skipped_and_then_replaced(tmp_path, torn):
    make(tmp_path)(1, {"loss": 1.0})
    with open(tmp_path / JSON_LINES_FILE, "ab") as file:
        file.write(torn)
    assert len(read_json_lines(str(tmp_path))) == 1
    make(tmp_path)(2, {"loss": 2.0})
    assert [record["step"] for record in read_json_lines(str(tmp_path))] == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 50 + b"\n", b"\xff{\n{]\n", b"\0\n\0\n\0\n"],
    ids=["zeros", "no JSON", "several"],
)
def test_damaged_tail_is_left_out_and_then_removed(tmp_path, caplog, damage):
    make(tmp_path)(1, {"a": 1.0})
    path = tmp_path / "summaries.jsonl"
    path.write_bytes(path.read_bytes() + damage)
    assert [line["step"] for line in read_json_lines(str(tmp_path))] == [1]
    assert "summaries.jsonl, line 2 cannot be read: " in caplog.text
    assert "This line and those after it are left out." in caplog.text
    make(tmp_path)(2, {"a": 1.0})
    assert f"ends in {len(damage)} bytes that are damaged. They are removed." in caplog.text
    assert [line["step"] for line in read_json_lines(str(tmp_path))] == [1, 2]
    assert b"\0" not in path.read_bytes()


def test_damage_before_other_lines_is_an_error(tmp_path):
    make(tmp_path)(1, {"a": 1.0})
    path = tmp_path / "summaries.jsonl"
    path.write_bytes(b"\0\n" + path.read_bytes())
    with pytest.raises(RunDirError, match=r"line 1 cannot be read: .* Remove the line"):
        read_json_lines(str(tmp_path))


def test_full_disk_only_loses_lines(tmp_path, caplog, files_limited_to):
    writer = make(tmp_path)
    writer(1, {"loss": 1.0})
    size = os.path.getsize(tmp_path / JSON_LINES_FILE)
    with files_limited_to(size + 20):
        writer(2, {"loss": 2.0})
        writer(3, {"loss": 3.0})
    writer(4, {"loss": 4.0})
    assert caplog.text.count("cannot write") == 1
    assert "can write" in caplog.text
    assert [record["step"] for record in read_json_lines(str(tmp_path))] == [1, 4]


def test_arrays_of_metrics_are_kept(tmp_path, caplog, monkeypatch):
    f1 = F1Score(None).update(np.array([[1.0, 2, 0], [3, 0, 0]]), np.array([0, 0]))
    make(tmp_path)(1, {"f1": f1, "auc": ArraySummary(np.array([0.5, np.nan]))})
    (record,) = read_json_lines(str(tmp_path))
    np.testing.assert_allclose(record["arrays"]["f1"], [2 / 3, 0, 0])
    np.testing.assert_array_equal(record["arrays"]["auc"], [0.5, np.nan])
    monkeypatch.setattr("weft.trainer.summary_writer.files._MAX_ARRAYS_BYTES", 1000)
    make(tmp_path)(2, {"large": ArraySummary(np.zeros((15, 15)))})
    assert "The arrays of step 2 are too large for a line: large" in caplog.text
    assert len(read_json_lines(str(tmp_path))) == 1


@pytest.mark.parametrize("array", ["[[1], [1, 2]]", '["one"]', '[{"a": 1}]', "3"])
def test_what_is_not_an_array_is_refused(tmp_path, array):
    line = f'{{"step": 1, "time": 0, "arrays": {{"x": {array}}}}}\n'
    (tmp_path / JSON_LINES_FILE).write_text(line, encoding="utf-8")
    with pytest.raises(RunDirError, match=r"cannot be read.*Remove the line"):
        read_json_lines(str(tmp_path))
