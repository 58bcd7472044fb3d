"""Display, record and report of every run."""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import IO, Any, cast

import jax
from rich.console import Console

from weft.errors import WeftError, describe_error
from weft.report.display import (
    Display,
    TextConsole,
    make_display,
    parameter_sizes,
)
from weft.report.page import write_report
from weft.trainer.hooks import Hook, RunningTrainer
from weft.trainer.run_dir import update_record
from weft.typing import NestedTensor

logger = logging.getLogger(__name__)


class RunRecorder(Hook):
    """Hook that records the size of the model, and how the run ended, in its directory.

    Neither a full disk nor a damaged file of the record or the summaries ends the run.
    """

    def __init__(self, directory: str):
        self._directory = directory
        self._step = 0

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> None:
        sizes = parameter_sizes(trainer)
        self._update(
            model={"parameters": sizes.count, "trained": sizes.trained},
            end=None,
        )
        self._step = trainer.step

    def on_step(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> None:
        self._step = step

    def on_end(self, step: int, reason: str) -> None:
        self._update(end={"step": step, "reason": reason})

    def on_error(self, error: BaseException) -> None:
        """Records the error that ended the run."""
        text = describe_error(error).partition("\n")[0]
        self._update(end={"step": self._step, "reason": text})

    def write_report(self) -> str | None:
        """Writes the report of the run and returns its path, None if it cannot be written."""
        with errors_logged("the report of the run cannot be written"):
            return str(write_report(self._directory))

    def _update(self, **values: object) -> None:
        with errors_logged("the record of the run cannot be written"):
            update_record(self._directory, **values)


@contextlib.contextmanager
def errors_logged(message: str) -> Iterator[None]:
    """Logs an error of what follows the steps of a run: its last checkpoint is saved by then."""
    try:
        yield
    except Exception as error:
        # The texts of those two say what happened; others may be a single word.
        if isinstance(error, OSError | WeftError):
            logger.warning("%s: %s", message, error)
        else:
            logger.warning("%s: %s: %s", message, type(error).__name__, error)


class _Stderr:
    """Standard error without what cannot be written, for want of a reader or of disk space."""

    def __init__(self) -> None:
        self._stream = sys.stderr or io.StringIO()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def error_console() -> Console:
    """Returns a console on the standard error that never fails."""
    return TextConsole(file=cast(IO[str], _Stderr()), highlight=False)


@contextlib.contextmanager
def reported(directory: str, progress: bool | Display) -> Iterator[list[Hook]]:
    """Yields the hooks that show and record a run.

    Afterwards the report is written, also if an error ended the run. Only the first process makes
    a display, and records.
    `progress` is the display to use; True for one on the standard error, False for none.
    """
    is_first = jax.process_index() == 0
    hooks: list[Hook] = []
    display = recorder = None
    if isinstance(progress, Display):
        display = progress
    elif progress and is_first:
        display = make_display(error_console(), directory)
    if display is not None:
        hooks.append(display)
    if is_first:
        recorder = RunRecorder(directory)
        hooks.append(recorder)
    with display or contextlib.nullcontext():
        try:
            yield hooks
        except BaseException as error:
            if recorder is not None:
                recorder.on_error(error)
                recorder.write_report()
            raise
        if recorder is None:
            return
        path = recorder.write_report()
        if display is not None and path is not None:
            display.on_report(path)
