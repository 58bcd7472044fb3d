"""A TensorBoard writer for training loops of one's own."""

import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.trainer.summary_writer.tensorboard import SummaryWriter


def test_values(tmp_path, read_events):
    writer = SummaryWriter(tmp_path / "run")
    writer.scalar("loss", jnp.array(1.5), step=jnp.array(3))
    (loss,) = read_events(tmp_path / "run")[1].summary.value  # flushed at once
    assert (loss.tag, loss.simple_value) == ("loss", 1.5)
    writer.image("image", np.ones((2, 3, 3)), 4)
    writer.image("images", np.ones((5, 2, 3, 1)), 4, max_outputs=2)
    writer.audio("sound", np.zeros((2, 8, 1)), 4, sample_rate=100, max_outputs=1)
    writer.histogram("weights", np.arange(9.0), 4, bins=3)
    writer.histogram("nothing", np.array([np.nan]), 4)
    writer.text("note", "words", 4)
    writer.close()
    events = read_events(tmp_path / "run")[2:]
    tags = [value.tag for event in events for value in event.summary.value]
    assert tags == ["image", "images/0", "images/1", "sound", "weights", "note/text_summary"]
    assert {event.step for event in events} == {4}


def test_settings_of_the_run(tmp_path, read_events):
    writer = SummaryWriter(str(tmp_path), auto_flush=False)
    writer.hparams({"learning_rate": 0.1, "name": "first"})
    writer.close()
    data = b"".join(event.SerializeToString() for event in read_events(tmp_path))
    assert b"learning_rate" in data
    assert b"first" in data


def test_shapes_of_images(tmp_path):
    with pytest.raises(ArgumentShapeError, match=r"image has shape \(2,\); expected \(height, wid"):
        SummaryWriter(str(tmp_path)).image("image", np.ones(2), 0)
