"""TensorBoard event files and the summaries in them.

A file is a sequence of `Event` protocol buffers, each framed by its length and checksums. The
framing and the protocol buffers are tensorboardX's. Its queue and writer thread are not used, since
the thread ends at the first disk error, and the full queue then blocks the training.

Images and sound are encoded here, as PNG and WAV, without an imaging library.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weft.errors import ArgumentShapeError, RunDirError
from weft.serialization.directory import Directory
from weft.serialization.untrusted import MAX_COUNT, check_local_path

# tensorboardX imports torch if it is installed, which takes seconds and is not needed here.
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

# The generated modules create their classes at import, where no type checker sees them.
Event: Any = event_pb2.__dict__["Event"]
SessionLog: Any = event_pb2.__dict__["SessionLog"]
SummaryProto: Any = summary_pb2.__dict__["Summary"]


_MAX_FILE_BYTES = 2**30


def read_events(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Yields the events of a file; an incomplete last one, of a running writer, is omitted.

    Raises RunDirError if an event is damaged, and an OSError if the file cannot be read;
    FileRefusedError if it is a link, no regular file, or larger than 1 GiB.
    """
    folder, name = os.path.split(path)
    with Directory(folder or os.curdir).open(
        name, at_most=_MAX_FILE_BYTES
    ) as file:
        size = os.fstat(file.fileno()).st_size
        # Each record: its length in 8 bytes, their checksum, the event, and its checksum.
        while True:
            header = file.read(12)
            if len(header) < 12:
                break
            (length,) = struct.unpack("<Q", header[:8])
            if length > size:
                break
            record = file.read(length + 4)
            if len(record) < length + 4:
                break
            yield _parse_event(record[:length], os.fspath(path))


def _parse_event(record: bytes, path: str) -> Any:
    try:
        event = Event.FromString(record)
    except (
        Exception
    ) as error:  # of protobuf, whose errors have no common base in all versions
        raise RunDirError(
            f"{path} has a damaged event: {error}. Move the file away."
        ) from error
    if not (0 <= event.wall_time <= MAX_COUNT and 0 <= event.step <= MAX_COUNT):
        raise RunDirError(
            f"{path} has an event of time {event.wall_time:g} and step {event.step}, not "
            "counts. Move the file away."
        )
    return event


class EventFile:
    """Event file in a directory, which is created if necessary."""

    def __init__(self, directory: str):
        check_local_path(
            directory, "log_dir"
        )  # tensorboardX would write to s3:// itself
        os.makedirs(directory, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        # TensorBoard reads the files of a directory in the order of their names.
        number = 0
        path = os.path.join(directory, f"{stem}.{number:03d}")
        while os.path.lexists(path):
            number += 1
            path = os.path.join(directory, f"{stem}.{number:03d}")
        self.path = path
        self._records = tensorboardX.RecordWriter(path)
        self._at_exit = weakref.finalize(self, _close, self._records)
        try:
            self._write(file_version="brain.Event:2")
            self.flush()
        except OSError:
            # On a full disk, files can be created but not filled; do not leave empty ones.
            self.close()
            os.unlink(path)
            raise

    def add(self, summary: Any, step: int) -> None:
        """Writes a `Summary` protocol buffer; after an OSError the file must be closed."""
        # Not by `_write`: a step adds many.
        event = Event(wall_time=time.time(), step=step, summary=summary)
        self._records.write(event.SerializeToString())

    def start_session(self, step: int) -> None:
        """Marks events of this and later steps in other files as void for readers."""
        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def add_checkpoint(self, checkpoint_path: str, step: int) -> None:
        """Records that a checkpoint was saved."""
        log = SessionLog(
            status=SessionLog.CHECKPOINT, checkpoint_path=checkpoint_path
        )
        self._write(step=step, session_log=log)

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        """Flushes the file if possible, and closes it."""
        self._at_exit()

    def _write(self, **fields: object) -> None:
        self._records.write(
            Event(wall_time=time.time(), **fields).SerializeToString()
        )


def _close(records: Any) -> None:
    with contextlib.suppress(OSError):
        records.close()


scalar: Callable[[str, float], Any] = protos.scalar
"""Returns the summary of a point of a curve, by its tag and value."""
text: Callable[[str, str], Any] = protos.text
"""Returns the summary of a text, which TensorBoard renders as Markdown, by its tag and value."""


def histogram(tag: str, values: np.ndarray, bins: int = 30) -> Any:
    """Returns a histogram of the finite values, in buckets of equal width; None without values."""
    numbers = np.asarray(values, np.float64).reshape(-1)
    finite_numbers = numbers[np.isfinite(numbers)]
    if not finite_numbers.size:
        return None
    return protos.histogram(tag, finite_numbers, bins)


def images(tag: str, value: np.ndarray) -> Any:
    """Returns the summary of one image per row, named `tag/0`, `tag/1`, ..., or `tag` for one row.

    `value` is `[batch, height, width, channels]`, uint8 or floats between 0 and 1.
    """
    if value.dtype != np.uint8:
        value = np.nan_to_num(value.astype(np.float32), nan=0.0)
        value = np.rint(value.clip(0, 1) * 255).astype(np.uint8)
    summary = SummaryProto()
    for name, image in _named(tag, value):
        height, width, channels = image.shape
        encoded = SummaryProto.Image(
            height=height,
            width=width,
            colorspace=channels,
            encoded_image_string=png(image),
        )
        summary.value.add(tag=name, image=encoded)
    return summary


def audio(tag: str, value: np.ndarray, sample_rate: int) -> Any:
    """Returns the summary of one clip per row, named as in `images`.

    `value` is `[batch, time, channels]`, floats between -1 and 1; `sample_rate` is in Hz.
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
    if len(batch) == 1:
        return [(tag, batch[0])]
    return [(f"{tag}/{i}", item) for i, item in enumerate(batch)]


def png(image: np.ndarray) -> bytes:
    """Encodes a uint8 image `[height, width, channels]` with 1, 3 or 4 channels."""
    height, width, channels = image.shape
    color_type = {1: 0, 3: 2, 4: 6}[channels]
    # Each row begins with the number of its filter, 0 for none.
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1
    )

    def chunk(name: bytes, data: bytes) -> bytes:
        length = struct.pack(">I", len(data))
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return length + name + data + checksum

    signature = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    pixels = zlib.compress(rows.tobytes())
    return (
        signature
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", pixels)
        + chunk(b"IEND", b"")
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


class SummaryWriter:
    """Writer of an event file in the directory `log_dir`, for a training loop of one's own.

    Args:
        auto_flush: whether each value is in the file at once.

    Raises PathNotLocalError for a URL, such as `gs://…`, or a path that begins with `~`.

    >>> import tempfile
    >>> writer = SummaryWriter(tempfile.mkdtemp())
    >>> writer.scalar("loss", 0.5, step=1)
    >>> writer.close()
    """

    def __init__(self, log_dir: str, auto_flush: bool = True):
        self._file = EventFile(str(log_dir))
        self._auto_flush = auto_flush

    def _add(self, summary: Any, step: int) -> None:
        if summary is not None:
            self._file.add(summary, int(step))
        if self._auto_flush:
            self.flush()

    def scalar(self, tag: str, value: ArrayLike, step: int) -> None:
        """Writes a point of a curve."""
        self._add(scalar(tag, float(np.asarray(value).item())), step)

    def image(
        self, tag: str, image: ArrayLike, step: int, max_outputs: int = 3
    ) -> None:
        """Writes images.

        Args:
            image: uint8 or floats in [0, 1], `(height, width, channels)`, or a batch of these.
            max_outputs: number of images to write.

        Raises ArgumentShapeError if `image` has another rank.
        """
        self._add(images(tag, _batch(image)[:max_outputs]), step)

    def audio(
        self,
        tag: str,
        audiodata: ArrayLike,
        step: int,
        sample_rate: int = 44100,
        max_outputs: int = 3,
    ) -> None:
        """Writes clips, floats between -1 and 1 of shape `(clips, time, channels)`."""
        clips = np.asarray(audiodata)[:max_outputs]
        self._add(audio(tag, clips, sample_rate), step)

    def histogram(
        self, tag: str, values: ArrayLike, step: int, bins: int | None = None
    ) -> None:
        """Writes a histogram of the finite values with `bins` buckets, 30 by default."""
        self._add(histogram(tag, np.asarray(values), bins or 30), step)

    def text(self, tag: str, textdata: str, step: int) -> None:
        """Writes a text, which is shown as Markdown."""
        self._add(text(tag, textdata), step)

    def hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes the settings of the run."""
        for summary in protos.hparams(dict(hparams), {}):
            self._add(summary, 0)

    def flush(self) -> None:
        """Writes what is buffered to the file."""
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()


def _batch(image: ArrayLike) -> np.ndarray:
    value = np.asarray(image)
    if value.ndim not in (3, 4):
        raise ArgumentShapeError(
            f"image has shape {value.shape}; expected (height, width, channels), or several along "
            "a first axis."
        )
    if value.ndim == 3:
        return value[None]
    return value
