import os
import time

import jax.numpy as jnp
import numpy as np
import pytest

from weft.hierarchy.metrics import AudioSummary, CallbackSummary, ImageSummary
from weft.metrics import ConfusionMatrix
from weft.trainer.summary_writer import CheckpointerAction, SummaryWriter, event_file


@pytest.fixture
def make(tmp_path):
    writers = []

    def make(**kwargs):
        cfg = SummaryWriter.default_config().set(name="writer", dir=str(tmp_path / "log"), **kwargs)
        writers.append(cfg.instantiate(parent=None))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def read(tmp_path, read_events):
    """Returns (step, tag, value) of everything that was written."""

    def read():
        return [
            (event.step, value.tag, value)
            for event in read_events(str(tmp_path / "log"))
            for value in event.summary.value
        ]

    return read


def test_nested_summaries_of_every_kind(make, read):
    writer = make()
    images = np.random.default_rng(0).random((2, 3, 4, 3))
    summaries = {
        "loss": jnp.array(1.25, jnp.bfloat16),
        "model": {"layer0": {"weight": jnp.arange(10.0), "lr": 0.5}},
        "sample": "a text",
        "images": ImageSummary(images),
        "voice": AudioSummary(jnp.zeros((1, 50, 1)), sample_rate=100),
        "called": CallbackSummary(np.sum, (jnp.arange(4),)),
        "confusion": ConfusionMatrix(num_classes=2).update(np.array([0, 1]), np.array([0, 0])),
    }
    writer(7, summaries)
    writer.flush()
    assert {step for step, _, _ in read()} == {7}
    found = {tag: value for _, tag, value in read()}
    assert found["loss"].simple_value == 1.25
    assert found["model/layer0/lr"].simple_value == 0.5
    assert found["called"].simple_value == 6.0
    assert found["model/layer0/weight"].histo.num == 10
    assert found["sample/text_summary"].tensor.string_val == [b"a text"]
    (table,) = found["confusion/text_summary"].tensor.string_val
    assert table.split() == b"[[1. 1.] [0. 0.]]".split()
    assert found["sample/text_summary"].metadata.plugin_data.plugin_name == "text"
    assert (found["images/1"].image.height, found["images/1"].image.width) == (3, 4)
    assert found["voice"].audio.length_frames == 50


def test_only_due_values_are_written(make, read):
    writer = make(write_every_n_steps=2, write_every_n_steps_map={"HistogramSummary": 4})
    for step in range(1, 9):
        writer(step, {"loss": float(step), "w": jnp.ones(3)})
    writer.flush()
    assert [(step, tag) for step, tag, _ in read()] == [
        (2, "loss"),
        (4, "loss"),
        (4, "w"),
        (6, "loss"),
        (8, "loss"),
        (8, "w"),
    ]


def test_restored_step_voids_later_events(make, tmp_path, read_events):
    first = make()
    for step in (1, 2, 3):
        first(step, {"loss": 1.0})
    first.log_checkpoint("/c/2", state={}, action=CheckpointerAction.SAVE, step=2)
    first.close()
    second = make()
    second.log_checkpoint("/c/2", state={}, action=CheckpointerAction.RESTORE, step=2)
    second(3, {"loss": 2.0})
    second.close()
    assert len(os.listdir(tmp_path / "log")) == 2
    logs = [e for e in read_events(str(tmp_path / "log")) if e.HasField("session_log")]
    assert [(e.step, e.session_log.status) for e in logs] == [
        (2, event_file.SessionLog.CHECKPOINT),
        (3, event_file.SessionLog.START),
    ]


def test_events_are_flushed_by_count_or_age(make, read):
    writer = make(max_queue=3, flush_ms=1e9)
    for step in range(3):
        writer(step, {"loss": 0.0})
    assert read() == []
    writer(3, {"loss": 0.0})
    assert len(read()) == 4

    patient = make(flush_ms=50)
    patient(4, {"loss": 0.0})
    time.sleep(0.06)
    patient(5, {"loss": 0.0})
    assert len(read()) == 6


def test_files_are_created_on_first_write(make, tmp_path):
    writer = make()
    writer(1, {})
    writer.flush()
    writer.close()
    assert not (tmp_path / "log").exists()


def test_closed_writer_opens_a_new_file(make, read):
    writer = make()
    writer(1, {"loss": 1.0})
    writer.close()
    writer(2, {"loss": 2.0})
    writer.close()
    assert [step for step, _, _ in read()] == [1, 2]


def test_full_disk_only_loses_events(make, read, caplog, files_limited_to):
    writer = make(max_queue=0)
    writer(1, {"loss": 1.0})
    with files_limited_to(0):
        for step in range(2, 10):
            writer(step, {"loss": 2.0})
    writer(10, {"loss": 3.0})
    assert caplog.text.count("cannot write") == caplog.text.count("can write") == 1
    assert [step for step, _, _ in read()] == [1, 10]


def test_unwritable_directory_is_reported(tmp_path, make, caplog):
    (tmp_path / "log").write_text("a file is in the way", encoding="utf-8")
    make()(1, {"loss": 1.0})
    assert "cannot write to" in caplog.text
