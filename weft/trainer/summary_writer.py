"""Summary writers, with one for TensorBoard defined here.

A writer receives the nested summaries of a step; the name of a summary is its path, `model/loss`.
`CompositeWriter` combines several writers.
"""

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from weft.config import ConfigBase, config_class
from weft.hierarchy.module import Module
from weft.trainer import event_file
from weft.trainer.base_writer import (
    BaseWriter,
    CheckpointerAction,
    CompositeWriter,
    NoOpWriter,
    PeriodicWriter,
    processor_zero_only,
)
from weft.trainer.event_file import EventFile
from weft.trainer.json_lines_writer import JsonLinesWriter, read_json_lines
from weft.trainer.mlflow_writer import MLflowWriter
from weft.trainer.summary_values import Shown, SummaryKind
from weft.trainer.wandb_writer import WandBWriter
from weft.typing import Nested

__all__ = [
    "BaseWriter",
    "CheckpointerAction",
    "CompositeWriter",
    "JsonLinesWriter",
    "MLflowWriter",
    "NoOpWriter",
    "SummaryKind",
    "SummaryWriter",
    "WandBWriter",
    "processor_zero_only",
    "read_json_lines",
]

_DEFAULT_FLUSH_SECONDS = 120.0


class SummaryWriter(PeriodicWriter):
    """Writer of TensorBoard event files: scalars, histograms, texts, images and audio.

    A restarted run writes another file in the same directory. If it restored an earlier step than
    the last one written, `log_checkpoint` makes TensorBoard discard the steps in between, such that
    each step has one value.
    """

    @config_class
    class Config(PeriodicWriter.Config):
        """Configures a SummaryWriter.

        Attributes:
            max_queue: Number of events that may be buffered in memory.
            flush_ms: Maximum age of buffered events in milliseconds, checked at each step; None for
                120,000.
        """

        max_queue: int = 1000
        flush_ms: float | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._file: EventFile | None = None
        self._waiting = 0
        self._last_flush = time.monotonic()

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        protos = [_to_proto(shown) for shown in self._due(step, values)]
        self._add(step, protos)

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        # Indentation makes it a Markdown code block, which keeps the line breaks.
        lines = textwrap.indent(config.debug_string(), "    ")
        self._add(step, [event_file.text("trainer_config", lines)])
        self.flush()

    @processor_zero_only
    def log_checkpoint(
        self, ckpt_dir: str, *, state: Nested[Any], action: CheckpointerAction, step: int = 0
    ) -> None:
        del state
        if action == CheckpointerAction.SAVE:
            self._write(lambda file: file.add_checkpoint(ckpt_dir, step))
        else:
            self._write(lambda file: file.start_session(step + 1))

    @processor_zero_only
    def log_average_step_time(self, step: int, step_times: Sequence[float]) -> None:
        if len(step_times):
            average = sum(step_times) / len(step_times)
            self._add(step, [event_file.scalar("average_step_time", average)])

    @contextlib.contextmanager
    def as_default(self) -> Iterator[EventFile | None]:
        """Yields the event file to code that makes its own protocol buffers.

        In the block, `file.add(proto, step)` writes one regardless of the interval; the file is
        flushed afterwards. On processes other than the first, and while the disk fails, it yields
        None.

        Example:
            >>> import tempfile
            >>> cfg = SummaryWriter.default_config().set(name="writer", dir=tempfile.mkdtemp())
            >>> writer = cfg.instantiate(parent=None)
            >>> with writer.as_default() as file:
            ...     file.add(event_file.scalar("temperature", 21.5), step=1)
            >>> writer.close()
        """
        if jax.process_index() == 0:
            self._write(lambda file: None)
        yield self._file
        self.flush()

    @processor_zero_only
    def flush(self) -> None:
        if self._file is not None:
            self._write(EventFile.flush)
            self._waiting = 0
            self._last_flush = time.monotonic()

    @processor_zero_only
    def close(self, *, failed: bool = False) -> None:
        del failed
        self.flush()
        self._drop_file()

    def _add(self, step: int, protos: list[Any]) -> None:
        protos = [proto for proto in protos if proto is not None]
        if protos:
            self._write(lambda file: [file.add(proto, step) for proto in protos])
            self._waiting += len(protos)
        cfg = self.config
        patience = _DEFAULT_FLUSH_SECONDS if cfg.flush_ms is None else cfg.flush_ms / 1000
        if self._waiting > cfg.max_queue or time.monotonic() - self._last_flush >= patience:
            self.flush()

    def _write(self, action: Callable[[EventFile], Any]) -> None:
        """Runs an action on the event file, opening it if needed."""
        with self._errors_reported():
            try:
                self._file = self._file or EventFile(self.config.dir)
                action(self._file)
            except OSError:
                self._drop_file()  # it may end within a record; the next file is complete
                raise

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _to_proto(shown: Shown) -> Any:
    match shown.kind:
        case "ScalarSummary":
            return event_file.scalar(shown.path, shown.value)
        case "TextSummary":
            return event_file.text(shown.path, shown.value)
        case "HistogramSummary":
            return event_file.histogram(shown.path, shown.value)
        case "ImageSummary":
            return event_file.images(shown.path, shown.value)
        case _:
            return event_file.audio(shown.path, shown.value, shown.sample_rate or 0)
