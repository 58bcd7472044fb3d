"""Interface of the summary writers, and their handling of disk errors.

The trainer calls a writer at every step, and the writer picks the summaries that are due. A disk
error never ends a run: it is logged once, and the writer continues when the disk is back.
"""

import contextlib
import enum
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from weft.config import REQUIRED, ConfigBase, Required
from weft.errors import CheckpointSaveError, StepIntervalError
from weft.hierarchy.module import Module
from weft.trainer.hooks import Hook
from weft.trainer.summary import FlatSummary, SummaryKind, due_summaries
from weft.typing import Nested, NestedTensor

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class CheckpointerAction(enum.StrEnum):
    """Actions of a checkpointer that writers log."""

    SAVE = "SAVE"
    RESTORE = "RESTORE"


def processor_zero_only(fn: F) -> F:
    """Wraps a function to run only in process 0; in the other processes it returns None."""

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> object:
        if jax.process_index() != 0:
            return None
        return fn(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


@contextlib.contextmanager
def closing_writers(writers: "Iterable[BaseWriter]") -> Iterator[None]:
    """Closes writers after the block, also if an error ends it."""
    try:
        yield
    except BaseException:
        _close_all(writers, failed=True)
        raise
    _close_all(writers, failed=False)


def _close_all(writers: "Iterable[BaseWriter]", failed: bool) -> None:
    """Closes all writers; logs a warning for each that fails."""
    for writer in writers:
        try:
            writer.close(failed=failed)
        except Exception as error:
            logger.warning(
                "%s was not closed: %s: %s",
                writer.path(),
                type(error).__name__,
                error,
            )


class SummaryHook(Hook):
    """Hook that writes the summaries of each step, and logs its loss at an interval."""

    def __init__(self, writer: "BaseWriter", log_every_n_steps: int | None):
        self._write = writer
        self._log_every_n_steps = log_every_n_steps
        self._failed_saves = 0

    def on_summaries(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> None:
        loss = outputs["loss"]
        self._write(step, {"loss": loss, **outputs["summaries"]})
        if self._log_every_n_steps and step % self._log_every_n_steps == 0:
            logger.info("step %d: loss %.4f", step, float(loss))

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        self._failed_saves += 1
        self._write(step, {"failed_saves": self._failed_saves})


class BaseWriter(Module):
    """Base of the writers. A subclass defines `__call__` and `log_config`."""

    _needs_allow = ("dir",)  # a trainer sets it

    class Config(Module.Config):
        dir: Required[str] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._dir = cfg.dir
        self._has_failed = False  # the last write

    def __call__(self, step: int, values: dict[str, Any]) -> None:
        """Writes a step's summaries: scalars, arrays and strings in nested dicts.

        Values may be on devices; only those due at this step are copied to the host.
        """
        raise NotImplementedError(type(self))

    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        """Writes a config as text, which applies from `step` on."""
        raise NotImplementedError(type(self))

    def log_checkpoint(
        self,
        ckpt_dir: str,
        *,
        state: Nested[Any],
        action: CheckpointerAction,
        step: int = 0,
    ) -> None:
        """Records that the checkpoint of a step was saved or restored."""

    def log_average_step_time(
        self, step: int, step_times: Sequence[float]
    ) -> None:
        """Writes the average of `step_times`, the seconds of steps that end with `step`."""
        if len(step_times):
            self._log_number(
                step, "average_step_time", sum(step_times) / len(step_times)
            )

    def _log_number(self, step: int, name: str, value: float) -> None:
        """Writes a number regardless of the interval."""

    def flush(self) -> None:
        """Flushes buffered summaries to their files."""

    def close(self, *, failed: bool = False) -> None:
        """Flushes and closes the writer, after an error if `failed`; a later write reopens it."""

    @contextlib.contextmanager
    def _errors_reported(
        self,
        destination: str | None = None,
        errors: tuple[type[Exception], ...] = (OSError,),
    ) -> Iterator[None]:
        """Logs one warning for a series of write errors; None is the writer's directory."""
        destination = destination or self._dir
        try:
            yield
        except errors as error:
            if not self._has_failed:
                logger.warning(
                    "%s cannot write to %s: %s. Training continues; summaries are lost until "
                    "writing succeeds again.",
                    self.path(),
                    destination,
                    error,
                )
            self._has_failed = True
        else:
            if self._has_failed:
                logger.warning(
                    "%s can write to %s again.", self.path(), destination
                )
            self._has_failed = False


def with_dir(cfg: BaseWriter.Config, directory: str) -> BaseWriter.Config:
    """Returns the config of a writer that writes to a directory, unless it has its own."""
    if cfg.dir is not REQUIRED:
        return cfg
    return cfg.clone(dir=directory)


class PeriodicWriter(BaseWriter):
    """Base of the writers that show summaries only at some steps."""

    class Config(BaseWriter.Config):
        """Configures a PeriodicWriter.

        A number below 1 is a StepIntervalError.
        """

        write_every_n_steps: int = 1
        """Number of steps between two writes of a summary."""
        write_every_n_steps_map: dict[SummaryKind, int] | None = None
        """The same by kind of summary, such as `{"ImageSummary": 100}`."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._every_n_steps = cfg.write_every_n_steps
        self._every_n_steps_by_kind = cfg.write_every_n_steps_map
        intervals = {"write_every_n_steps": cfg.write_every_n_steps}
        for kind, interval in (cfg.write_every_n_steps_map or {}).items():
            intervals[f"write_every_n_steps_map[{kind!r}]"] = interval
        for name, interval in intervals.items():
            if interval < 1:
                raise StepIntervalError(f"{self.path()}.{name}", interval)

    def _due(self, step: int, values: Mapping[str, Any]) -> list[FlatSummary]:
        return due_summaries(
            step,
            values,
            every_n_steps=self._every_n_steps,
            every_n_steps_by_kind=self._every_n_steps_by_kind,
        )


class NoOpWriter(BaseWriter):
    """Writer that discards all summaries."""

    def __call__(self, step: int, values: dict[str, Any]) -> None:
        del step, values

    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        del config, step


class CompositeWriter(BaseWriter):
    """Writer that forwards all calls to several writers."""

    class Config(BaseWriter.Config):
        """Configures a CompositeWriter; a writer without a `dir` writes in the composite's."""

        writers: Required[dict[str, BaseWriter.Config]] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._writers: list[Any] = []
        for name, writer in cfg.writers.items():
            self._writers.append(
                self._add_child(name, with_dir(writer, cfg.dir))
            )

    @property
    def writers(self) -> list[BaseWriter]:
        """The writers, in the order of the config."""
        return list(self._writers)

    def __call__(self, step: int, values: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer(step, values)

    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        for writer in self._writers:
            writer.log_config(config, step=step)

    def log_checkpoint(
        self,
        ckpt_dir: str,
        *,
        state: Nested[Any],
        action: CheckpointerAction,
        step: int = 0,
    ) -> None:
        for writer in self._writers:
            writer.log_checkpoint(
                ckpt_dir, state=state, action=action, step=step
            )

    def log_average_step_time(
        self, step: int, step_times: Sequence[float]
    ) -> None:
        for writer in self._writers:
            writer.log_average_step_time(step, step_times)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self, *, failed: bool = False) -> None:
        _close_all(self._writers, failed)
