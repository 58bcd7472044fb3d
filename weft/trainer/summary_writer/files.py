"""Summary writers to files: TensorBoard's event files, and JSON lines for scripts and `tail -f`.

A writer receives the nested summaries of a step; the name of a summary is its path, `model/loss`.
The JSON lines are

    {"step": 20, "time": 1760000000.0, "values": {"loss": 2.3}, "arrays": {"f1": [0.5, 0.7]}}
    {"step": 20, "time": 1760000000.1, "checkpoint": {"action": "SAVE", "dir": "…/step_00000020"}}

A restarted run appends. If it restored an earlier step, its RESTORE line voids the lines of later
steps, and `read_json_lines` omits them.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import jax
import numpy as np

from weft.config import ConfigBase
from weft.errors import RunDirError
from weft.hierarchy.module import Module
from weft.serialization.directory import Directory
from weft.serialization.untrusted import (
    MAX_COUNT,
    check_json,
    check_local_path,
    parse_json,
)
from weft.trainer.summary import SummaryKind
from weft.trainer.summary_writer import event_file
from weft.trainer.summary_writer.base import (
    CheckpointerAction,
    PeriodicWriter,
    processor_zero_only,
)
from weft.typing import Nested

logger = logging.getLogger(__name__)

_DEFAULT_FLUSH_SECONDS = 120.0
_MAX_NUMBERS = 10_000


def _table(path: str, array: np.ndarray) -> Any:
    lines = np.array2string(
        array, precision=6, threshold=_MAX_NUMBERS, max_line_width=200
    )
    # Indentation makes it a Markdown code block, which keeps the line breaks.
    return event_file.text(path, textwrap.indent(lines, "    "))


_PROTOS: dict[SummaryKind, Callable[..., Any]] = {
    "ArraySummary": _table,
    "AudioSummary": event_file.audio,
    "HistogramSummary": event_file.histogram,
    "ImageSummary": event_file.images,
    "ScalarSummary": event_file.scalar,
    "TextSummary": event_file.text,
}


class SummaryWriter(PeriodicWriter):
    """Writer of TensorBoard event files: scalars, histograms, texts, images and audio.

    A restarted run writes another file in the same directory. If it restored an earlier step than
    the last one written, `log_checkpoint` makes TensorBoard discard the steps in between.
    """

    class Config(PeriodicWriter.Config):
        """Configures a SummaryWriter."""

        max_queue: int = 1000
        """Number of events that may be buffered in memory."""
        flush_ms: float | None = None
        """Maximum age of buffered events in milliseconds, checked at each step; None for
        120,000."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._file: event_file.EventFile | None = None
        self._max_queue = cfg.max_queue
        self._flush_seconds = _DEFAULT_FLUSH_SECONDS
        if cfg.flush_ms is not None:
            self._flush_seconds = cfg.flush_ms / 1000
        self._num_buffered = 0
        self._last_flush = time.monotonic()

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        protos = []
        for path, kind, value, sample_rate in self._due(step, values):
            arguments = [path, value]
            if sample_rate is not None:
                arguments.append(sample_rate)
            protos.append(_PROTOS[kind](*arguments))
        self._add(step, protos)

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        # Indentation makes it a Markdown code block, which keeps the line breaks.
        lines = textwrap.indent(config.debug_string(), "    ")
        self._add(step, [event_file.text("trainer_config", lines)])
        self.flush()

    @processor_zero_only
    def log_checkpoint(
        self,
        ckpt_dir: str,
        *,
        state: Nested[Any],
        action: CheckpointerAction,
        step: int = 0,
    ) -> None:
        if action == CheckpointerAction.SAVE:
            self._write(lambda file: file.add_checkpoint(ckpt_dir, step))
        else:
            self._write(lambda file: file.start_session(step + 1))

    @processor_zero_only
    def _log_number(self, step: int, name: str, value: float) -> None:
        self._add(step, [event_file.scalar(name, value)])

    @contextlib.contextmanager
    def as_default(self) -> Iterator[event_file.EventFile | None]:
        """Yields the event file to code that makes its own protocol buffers.

        In the block, `file.add(proto, step)` writes one regardless of the interval; the file is
        flushed afterwards. It yields None on other processes, and while the disk fails.
        """
        if jax.process_index() == 0:
            self._write(lambda file: None)
        yield self._file
        self.flush()

    @processor_zero_only
    def flush(self) -> None:
        if self._file is not None:
            self._write(event_file.EventFile.flush)
            self._num_buffered = 0
            self._last_flush = time.monotonic()

    @processor_zero_only
    def close(self, *, failed: bool = False) -> None:
        self.flush()
        self._drop_file()

    def _add(self, step: int, protos: list[Any]) -> None:
        protos = [proto for proto in protos if proto is not None]
        if protos:
            step_proto, *other_protos = protos
            for proto in other_protos:
                step_proto.MergeFrom(proto)
            self._write(lambda file: file.add(step_proto, step))
            self._num_buffered += len(protos)
        is_old = time.monotonic() - self._last_flush >= self._flush_seconds
        if self._num_buffered > self._max_queue or is_old:
            self.flush()

    def _write(self, action: Callable[[event_file.EventFile], None]) -> None:
        with self._errors_reported():
            try:
                self._file = self._file or event_file.EventFile(self._dir)
                action(self._file)
            except OSError:
                self._drop_file()  # it may end within a record; the next file is complete
                raise

    def _drop_file(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            file.close()


JSON_LINES_FILE = "summaries.jsonl"


class JsonLinesWriter(PeriodicWriter):
    """Writer that appends one JSON object per line to `summaries.jsonl` in `dir`.

    It ignores images, sound and histograms. Each line is flushed at once and survives the process.
    """

    Config = PeriodicWriter.Config

    def __init__(self, cfg: PeriodicWriter.Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        check_local_path(cfg.dir, f"{self.path()}.dir")
        self._has_appended = False

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        fields: dict[str, dict[str, Any]] = {}
        for summary in self._due(step, values):
            if summary.kind in ("ScalarSummary", "TextSummary"):
                fields.setdefault("values", {})[summary.path] = _as_json(
                    summary.value
                )
            elif summary.kind == "ArraySummary":
                fields.setdefault("arrays", {})[summary.path] = _as_json(
                    summary.value
                )
        if (
            "arrays" in fields
            and len(json.dumps(fields["arrays"])) > _MAX_ARRAYS_BYTES
        ):
            names = ", ".join(fields.pop("arrays"))
            logger.warning(
                "The arrays of step %d are too large for a line: %s.",
                step,
                names,
            )
        if fields:
            self._append(step, **fields)

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        self._append(step, config=config.debug_string())

    @processor_zero_only
    def log_checkpoint(
        self,
        ckpt_dir: str,
        *,
        state: Nested[Any],
        action: CheckpointerAction,
        step: int = 0,
    ) -> None:
        self._append(step, checkpoint={"action": action.value, "dir": ckpt_dir})

    @processor_zero_only
    def _log_number(self, step: int, name: str, value: float) -> None:
        self._append(step, values={name: value})

    def _append(self, step: int, **fields: object) -> None:
        line = json.dumps(
            {"step": int(step), "time": time.time(), **fields}, allow_nan=False
        )
        with self._errors_reported():
            os.makedirs(self.config.dir, exist_ok=True)
            directory = Directory(self.config.dir)
            with directory.open_to_append(JSON_LINES_FILE) as file:
                if not _drop_partial_line(file):
                    raise directory.refusal(JSON_LINES_FILE, "ends in no line")
                if not self._has_appended:
                    _drop_damaged_lines(
                        file, directory.full_path(JSON_LINES_FILE)
                    )
                file.write(line.encode() + b"\n")
            self._has_appended = True


_MAX_FILE_BYTES = 2**30
_MAX_LINE_BYTES = 2**24
_MAX_ARRAYS_BYTES = 2**23
_LINE_FORM = {
    "step": int,
    "time": float,
    "values?": {str: (float, str)},
    "arrays?": {str: list},
    "checkpoint?": {"action": str},
}


_Json = float | str | list["_Json"]


def _as_json(value: float | str | np.generic | np.ndarray) -> _Json:
    """Returns a number, a text or an array, as nested lists, for JSON."""
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return [_as_json(row) for row in value]
    if isinstance(value, np.generic | np.ndarray):
        return _as_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # not a number in JSON; `float` parses its name
    return value


def _drop_partial_line(file: BinaryIO) -> bool:
    """Truncates an incomplete last line, left by a killed process or a full disk.

    Returns whether it is one: no line is longer than 16 MiB.
    """
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _MAX_LINE_BYTES)
    file.seek(max(0, size - 1))
    if not size or file.read() == b"\n":
        return True
    file.seek(start)
    end = start + file.read(_MAX_LINE_BYTES).rfind(b"\n") + 1
    if end == start > 0:
        return False
    file.truncate(end)
    return True


def _drop_damaged_lines(file: BinaryIO, path: str) -> None:
    """Truncates last lines that are not JSON, left by a crash of the machine."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_LINE_BYTES))
    lines = file.read(_MAX_LINE_BYTES).splitlines(keepends=True)
    if size > _MAX_LINE_BYTES:
        del lines[0]  # its start is missing
    end = size
    while lines and not _is_json(lines[-1]):
        end -= len(lines.pop())
    if end < size:
        logger.warning(
            "%s ends in %d bytes that are damaged. They are removed.",
            path,
            size - end,
        )
        file.truncate(end)


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def read_json_lines(path: str) -> list[dict[str, Any]]:
    """Returns the lines of a `JsonLinesWriter`'s file or directory, except voided ones.

    Last lines that are not JSON, as a crash of the machine leaves them, are reported and left out.

    Raises RunDirError if another line is not one that the writer writes, and an OSError if the file
    cannot be read; FileRefusedError if it is a link, no regular file, or larger than 1 GiB.
    """
    if os.path.isdir(path):
        path = os.path.join(path, JSON_LINES_FILE)
    folder, name = os.path.split(path)
    records: list[dict[str, Any]] = []
    damage: RunDirError | None = None
    with Directory(folder or os.curdir).open(
        name, at_most=_MAX_FILE_BYTES
    ) as file:
        for number in itertools.count(1):
            line = file.readline(_MAX_LINE_BYTES)
            if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                break
            location = f"{path}, line {number}"
            try:
                record = _parse_line(line)
            except ValueError as error:
                damage = damage or _line_error(location, error)
                continue
            if damage is not None:
                raise damage
            _check_line(record, location)
            action = record.get("checkpoint", {}).get("action")
            if action == CheckpointerAction.RESTORE.value:
                records = [
                    earlier
                    for earlier in records
                    if earlier["step"] <= record["step"]
                ]
            values = record.get("values", {})
            for summary_path, value in values.items():
                if value in ("nan", "inf", "-inf"):
                    values[summary_path] = float(value)
            records.append(record)
    if damage is not None:
        logger.warning("%s This line and those after it are left out.", damage)
    return records


def _parse_line(line: bytes) -> Any:
    if not line.endswith(b"\n"):
        raise ValueError(f"it has more than {_MAX_LINE_BYTES:,} bytes")
    return parse_json(line)


def _check_line(record: Any, location: str) -> None:
    """Raises a RunDirError unless a line is one that the writer writes; makes arrays of lists."""
    try:
        check_json(record, _LINE_FORM)
        if not 0 <= record["time"] <= MAX_COUNT:
            raise ValueError(
                f"time is {record['time']!r}; expected seconds since 1970"
            )
        # Lists of unequal lengths, or of what is not a number, are not arrays.
        arrays = record.get("arrays", {})
        for name, value in arrays.items():
            arrays[name] = np.array(value, float)
    except (TypeError, ValueError) as error:
        raise _line_error(location, error) from error


def _line_error(location: str, error: Exception) -> RunDirError:
    return RunDirError(f"{location} cannot be read: {error}. Remove the line.")
