"""TensorBoard's event files for programs with a training loop of their own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weft._lazy import import_extra
from weft.errors import ArgumentShapeError


class SummaryWriter:
    """Writer of an event file in the directory `log_dir`.

    Args:
        auto_flush: whether each value is in the file at once.

    Raises:
        MissingExtraError: if tensorboardX is missing.

    Example:
        >>> import tempfile
        >>> writer = SummaryWriter(tempfile.mkdtemp())
        >>> writer.scalar("loss", 0.5, step=1)
        >>> writer.close()
    """

    def __init__(self, log_dir: str, auto_flush: bool = True):
        self._events = import_extra(
            "weft.trainer.summary_writer.event_file",
            "train",
            needed_by="SummaryWriter",
            package="tensorboardX",
        )
        self._file = self._events.EventFile(str(log_dir))
        self._auto_flush = auto_flush

    def _add(self, summary: Any, step: int) -> None:
        if summary is not None:
            self._file.add(summary, int(step))
        if self._auto_flush:
            self.flush()

    def scalar(self, tag: str, value: ArrayLike, step: int) -> None:
        """Writes a point of a curve."""
        self._add(self._events.scalar(tag, float(np.asarray(value).item())), step)

    def image(self, tag: str, image: ArrayLike, step: int, max_outputs: int = 3) -> None:
        """Writes images.

        Args:
            image: uint8 or floats between 0 and 1, `(height, width, channels)`, or several along a
                first axis.
            max_outputs: number of images to write.

        Raises:
            ArgumentShapeError: if `image` has another rank.
        """
        self._add(self._events.images(tag, _batch(image)[:max_outputs]), step)

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
        self._add(self._events.audio(tag, clips, sample_rate), step)

    def histogram(self, tag: str, values: ArrayLike, step: int, bins: int | None = None) -> None:
        """Writes a histogram of the finite values with `bins` buckets, 30 by default."""
        self._add(self._events.histogram(tag, np.asarray(values), bins or 30), step)

    def text(self, tag: str, textdata: str, step: int) -> None:
        """Writes a text, which is shown as Markdown."""
        self._add(self._events.text(tag, textdata), step)

    def hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes the settings of the run."""
        for summary in self._events.protos.hparams(dict(hparams), {}):
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
    return value if value.ndim == 4 else value[None]
