"""TensorBoard event files: the records, and the summaries in them.

A file is a row of `Event` protocol buffers, each framed by its length and checksums. The framing
and the protocol buffers are tensorboardX's; its queue and writer thread are not used, since the
thread ends at the first error of the disk, and the full queue then blocks the training.

Images and sound are encoded here, as PNG and WAV, so that no imaging library is needed.
"""

import contextlib
import io
import os
import socket
import struct
import sys
import time
import wave
import weakref
import zlib
from typing import Any

import numpy as np

# tensorboardX imports torch where there is one, for what is not used here, and that takes seconds.
_hides_torch = "torch" not in sys.modules
if _hides_torch:
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
try:
    import tensorboardX
    from tensorboardX import summary as protos
    from tensorboardX.proto import event_pb2, summary_pb2
finally:
    if _hides_torch:
        del sys.modules["torch"]

# The generated modules make their classes as they are imported, where no type checker sees them.
Event: Any = event_pb2.__dict__["Event"]
SessionLog: Any = event_pb2.__dict__["SessionLog"]
SummaryProto: Any = summary_pb2.__dict__["Summary"]


class EventFile:
    """An event file of its own in a directory.

    Args:
        directory: Made if it is not there.

    Raises:
        OSError: If the file cannot be made.
    """

    def __init__(self, directory: str):
        if "://" not in directory:  # tensorboardX also writes to s3:// and gs://
            os.makedirs(directory, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        # TensorBoard reads the files of a directory in the order of their names.
        number = 0
        while os.path.exists(path := os.path.join(directory, f"{stem}.{number:03d}")):
            number += 1
        self.path = path
        self._records = tensorboardX.RecordWriter(path)
        self._at_exit = weakref.finalize(self, _close, self._records)
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self.flush()
        except OSError:
            # A full disk lets a file be made but not filled, and would collect empty ones.
            self.close()
            os.unlink(path)
            raise

    def add(self, summary: Any, step: int) -> None:
        """Writes a `Summary` protocol buffer, such as those made by the functions of this module.

        Raises:
            OSError: If the disk refuses; the file ends there and is to be closed.
        """
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def start_session(self, step: int) -> None:
        """Tells readers that what other files say of this step and later ones is void."""
        log = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step, session_log=log))

    def add_checkpoint(self, checkpoint_path: str, step: int) -> None:
        """Writes that a checkpoint was saved."""
        log = SessionLog(status=SessionLog.CHECKPOINT, checkpoint_path=checkpoint_path)
        self._write(Event(wall_time=time.time(), step=step, session_log=log))

    def flush(self) -> None:
        """Brings everything to the disk."""
        self._records.flush()

    def close(self) -> None:
        """Brings everything to the disk if it can, and closes the file."""
        self._at_exit()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _close(records: Any) -> None:
    with contextlib.suppress(OSError):
        records.close()


def scalar(tag: str, value: float) -> Any:
    """A point of a curve."""
    return protos.scalar(tag, value)


def text(tag: str, value: str) -> Any:
    """A text, which TensorBoard reads as Markdown."""
    return protos.text(tag, value)


def histogram(tag: str, values: np.ndarray, bins: int = 30) -> Any:
    """A histogram of the finite values, None if there are none.

    Args:
        tag: Its name.
        values: An array of any shape.
        bins: The number of buckets, of equal width.
    """
    flat = np.asarray(values, np.float64).reshape(-1)
    finite = flat[np.isfinite(flat)]
    return protos.histogram(tag, finite, bins) if finite.size else None


def images(tag: str, value: np.ndarray) -> Any:
    """One image per row, called `tag/0`, `tag/1` and so on, or `tag` where there is only one.

    Args:
        tag: Their name.
        value: `[batch, height, width, channels]`, uint8 or floats between 0 and 1.
    """
    if value.dtype != np.uint8:
        value = np.nan_to_num(value.astype(np.float32), nan=0.0)
        value = np.rint(value.clip(0, 1) * 255).astype(np.uint8)
    summary = SummaryProto()
    for name, image in _named(tag, value):
        height, width, channels = image.shape
        encoded = SummaryProto.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=png(image)
        )
        summary.value.add(tag=name, image=encoded)
    return summary


def audio(tag: str, value: np.ndarray, sample_rate: int) -> Any:
    """One clip per row, named as images are.

    Args:
        tag: Their name.
        value: `[batch, time, channels]`, floats between -1 and 1.
        sample_rate: Samples in a second.
    """
    summary = SummaryProto()
    for name, clip in _named(tag, value):
        frames, channels = clip.shape
        encoded = SummaryProto.Audio(
            sample_rate=sample_rate,
            num_channels=channels,
            length_frames=frames,
            encoded_audio_string=wav(clip, sample_rate),
            content_type="audio/wav",
        )
        summary.value.add(tag=name, audio=encoded)
    return summary


def _named(tag: str, batch: np.ndarray) -> list[tuple[str, np.ndarray]]:
    names = [tag] if len(batch) == 1 else [f"{tag}/{i}" for i in range(len(batch))]
    return list(zip(names, batch, strict=True))


def png(image: np.ndarray) -> bytes:
    """Encodes a uint8 image `[height, width, channels]` with 1, 3 or 4 channels."""
    height, width, channels = image.shape
    color_type = {1: 0, 3: 2, 4: 6}[channels]
    # Each row begins with the number of its filter, 0 for none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    pixels = zlib.compress(rows.tobytes())
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def wav(clip: np.ndarray, sample_rate: int) -> bytes:
    """Encodes sound `[time, channels]` of floats between -1 and 1 as 16-bit samples."""
    samples = np.nan_to_num(clip.astype(np.float32), nan=0.0).clip(-1, 1)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(clip.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
