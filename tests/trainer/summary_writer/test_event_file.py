import io
import os
import struct
import subprocess
import sys
import wave
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.trainer.summary_writer import event_file
from weft.trainer.summary_writer.event_file import EventFile, SessionLog, SummaryWriter


def decode_png(data):
    """Reads what `png` writes: one IDAT chunk, rows without filters."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            name + body
        )
        chunks[name] = body
        at += 12 + length
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    channels = {0: 1, 2: 3, 6: 4}[color]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


def test_record_framing_matches_tensorboard(tmp_path, read_events):
    file = EventFile(str(tmp_path))
    file.add(event_file.scalar("loss", 1.5), step=3)
    file.close()
    version, loss = read_events(file.path, check=True)
    assert version.file_version == "brain.Event:2"
    assert (loss.step, loss.summary.value[0].tag) == (3, "loss")
    assert loss.summary.value[0].simple_value == 1.5


def test_files_are_new_and_sort_in_order(tmp_path):
    paths = []
    for _ in range(3):
        file = EventFile(str(tmp_path))
        paths.append(file.path)
        file.close()
    assert len(set(paths)) == 3
    assert paths == sorted(paths)
    assert all("tfevents" in path for path in paths)


def test_dropped_event_file_is_complete(tmp_path, read_events):
    file = EventFile(str(tmp_path))
    file.add(event_file.scalar("loss", 1.0), step=1)
    del file
    assert len(read_events(str(tmp_path))) == 2


def test_sessions_and_checkpoints(tmp_path, read_events):
    file = EventFile(str(tmp_path))
    file.start_session(7)
    file.add_checkpoint("/run/step_00000007", 7)
    file.close()
    start, checkpoint = read_events(file.path)[1:]
    assert (start.step, start.session_log.status) == (7, SessionLog.START)
    assert checkpoint.session_log.status == SessionLog.CHECKPOINT
    assert checkpoint.session_log.checkpoint_path == "/run/step_00000007"


def test_full_disk_leaves_no_empty_file(tmp_path, files_limited_to):
    with files_limited_to(0), pytest.raises(OSError, match="File too large"):
        EventFile(str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_round_trip(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, channels), np.uint8)
    values = event_file.images("eval/samples", pixels).value
    assert [value.tag for value in values] == ["eval/samples/0", "eval/samples/1"]
    for value, image in zip(values, pixels, strict=True):
        assert (value.image.height, value.image.width, value.image.colorspace) == (5, 7, channels)
        np.testing.assert_array_equal(decode_png(value.image.encoded_image_string), image)


def test_images_of_floats_are_clipped_to_their_range():
    image = np.array([-1.0, 0.0, 0.5, 1.0, 2.0, np.nan], np.float32).reshape(1, 1, 6, 1)
    (value,) = event_file.images("x", image).value
    assert value.tag == "x"
    assert decode_png(value.image.encoded_image_string).ravel().tolist() == [0, 0, 128, 255, 255, 0]


def test_audio_has_16_bits():
    clips = np.random.default_rng(0).uniform(-1, 1, (2, 100, 2)).astype(np.float32)
    values = event_file.audio("voice", clips, 8000).value
    assert [value.tag for value in values] == ["voice/0", "voice/1"]
    with wave.open(io.BytesIO(values[1].audio.encoded_audio_string)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (8000, 2, 100)
        samples = np.frombuffer(file.readframes(100), "<i2").reshape(100, 2)
    np.testing.assert_allclose(samples / 32767, clips[1], atol=1e-4)


def test_histogram_counts_every_finite_value():
    values = np.concatenate([np.linspace(-1, 3, 100), [np.nan, np.inf]])
    histogram = event_file.histogram("w", values).value[0].histo
    assert (histogram.num, histogram.min, histogram.max) == (100, -1, 3)
    assert sum(histogram.bucket) == 100
    assert event_file.histogram("w", np.array([np.nan])) is None


def test_torch_is_not_imported(tmp_path):
    (tmp_path / "torch.py").write_text("print('imported')", encoding="utf-8")
    program = (
        "import weft.trainer.summary_writer.event_file; print('before', flush=True); import torch"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        encoding="utf-8",
    )
    assert run.stdout.split() == ["before", "imported"], run.stderr


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


def test_shapes_of_images(tmp_path):
    with pytest.raises(ArgumentShapeError, match=r"image has shape \(2,\); expected \(height, wid"):
        SummaryWriter(str(tmp_path)).image("image", np.ones(2), 0)
