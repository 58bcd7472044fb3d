"""What all summary writers share: their interface, and what they do about a disk that refuses.

A writer is asked at every step and picks what is due. Writing is never worth a training run: an
error of the disk is reported once, the training goes on, and so does the writer when it can again.
"""

import contextlib
import enum
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from weft.config import REQUIRED, ConfigBase, Required, config_class
from weft.hierarchy.module import Module
from weft.trainer.summary_values import Shown, SummaryKind, due_summaries
from weft.typing import Nested

F = TypeVar("F", bound=Callable[..., Any])


class CheckpointerAction(enum.StrEnum):
    """What a checkpointer has done."""

    SAVE = "SAVE"
    RESTORE = "RESTORE"


def processor_zero_only(fn: F) -> F:
    """Lets only the first of several processes run a function; the others get None.

    Args:
        fn: A function that writes something that one process writes for all.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if jax.process_index() == 0 else None

    return call  # pyright: ignore[reportReturnType]


@contextlib.contextmanager
def writers_of_a_run(writers: "Iterable[BaseWriter]") -> Iterator[None]:
    """Closes writers after the block, also if an error ends it.

    Args:
        writers: to be closed.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        _close_all(writers, failed)


def _close_all(writers: "Iterable[BaseWriter]", failed: bool) -> None:
    """Closes writers. One that fails at that is named in a warning, and the others are closed."""
    for writer in writers:
        try:
            writer.close(failed=failed)
        except Exception as error:
            logging.getLogger(__name__).warning(
                "%s was not closed: %s: %s", writer.path(), type(error).__name__, error
            )


class BaseWriter(Module):
    """Base of the writers. A subclass defines `__call__` and `log_config`."""

    _needs_allow = ("dir",)  # a trainer sets it

    @config_class
    class Config(Module.Config):
        """Configures a BaseWriter.

        Attributes:
            dir: The directory to write in.
        """

        dir: Required[str] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._is_refused = False

    def __call__(self, step: int, values: dict[str, Any]) -> None:
        """Writes a step's summaries.

        Args:
            step: The step.
            values: Summaries, scalars, arrays and strings, in nested dicts; values may be on
                devices, and only those that are due at this step are copied from there.
        """
        raise NotImplementedError(type(self))

    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        """Writes a config as text.

        Args:
            config: Such as the trainer's.
            step: The step from which on it holds.
        """
        raise NotImplementedError(type(self))

    def log_checkpoint(
        self, ckpt_dir: str, *, state: Nested[Any], action: CheckpointerAction, step: int = 0
    ) -> None:
        """Writes that a checkpoint was saved or restored.

        Args:
            ckpt_dir: The checkpoint's directory.
            state: What it holds.
            action: What was done.
            step: Its step.
        """

    def log_average_step_time(self, step: int, step_times: Sequence[float]) -> None:
        """Writes how long steps take.

        Args:
            step: The last of them.
            step_times: Seconds of each.
        """

    def flush(self) -> None:
        """Brings everything that was written to where it can be read."""

    def close(self, *, failed: bool = False) -> None:
        """Flushes, and gives back what is held open. Whatever is written later opens it again.

        Args:
            failed: Whether an error ends the run.
        """

    @contextlib.contextmanager
    def _errors_reported(
        self, where: str = "", errors: tuple[type[Exception], ...] = (OSError,)
    ) -> Iterator[None]:
        """Turns an error of writing into one warning for as long as it lasts.

        Args:
            where: What is written to; "" for the directory.
            errors: The errors.
        """
        log, where = logging.getLogger(__name__), where or self.config.dir
        try:
            yield
        except errors as error:
            if not self._is_refused:
                log.warning(
                    "%s cannot write to %s: %s. The training goes on; summaries are lost until it "
                    "can again.",
                    self.path(),
                    where,
                    error,
                )
            self._is_refused = True
        else:
            if self._is_refused:
                log.warning("%s can write to %s again.", self.path(), where)
            self._is_refused = False


class PeriodicWriter(BaseWriter):
    """Base of the writers that show summaries at some steps only."""

    @config_class
    class Config(BaseWriter.Config):
        """Configures a PeriodicWriter.

        Attributes:
            write_every_n_steps: Steps between two times that a summary is shown.
            write_every_n_steps_map: The same for summaries of some kinds, such as
                `{"ImageSummary": 100}`.
        """

        write_every_n_steps: int = 1
        write_every_n_steps_map: dict[SummaryKind, int] | None = None

    def _due(self, step: int, values: Mapping[str, Any]) -> list[Shown]:
        """What is to be shown of a step's summaries."""
        cfg = self.config
        return due_summaries(
            step,
            values,
            every_n_steps=cfg.write_every_n_steps,
            every_n_steps_by_kind=cfg.write_every_n_steps_map,
        )


class NoOpWriter(BaseWriter):
    """Writes nothing."""

    def __call__(self, step: int, values: dict[str, Any]) -> None:
        del step, values

    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        del config, step


class CompositeWriter(BaseWriter):
    """Hands everything to several writers.

    Example:
        >>> cfg = CompositeWriter.default_config().set(
        ...     name="writer",
        ...     dir="/tmp/run",
        ...     writers={"quiet": NoOpWriter.default_config()},
        ... )
        >>> cfg.instantiate(parent=None).writers
        [<NoOpWriter writer.quiet>]
    """

    @config_class
    class Config(BaseWriter.Config):
        """Configures a CompositeWriter.

        Attributes:
            writers: The writers by name; one without a `dir` writes in the composite's.
        """

        writers: Required[dict[str, BaseWriter.Config]] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._writers = []
        for name, writer in cfg.writers.items():
            writer = writer if writer.dir is not REQUIRED else writer.clone(dir=cfg.dir)
            self._writers.append(self._add_child(name, writer))

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
        self, ckpt_dir: str, *, state: Nested[Any], action: CheckpointerAction, step: int = 0
    ) -> None:
        for writer in self._writers:
            writer.log_checkpoint(ckpt_dir, state=state, action=action, step=step)

    def log_average_step_time(self, step: int, step_times: Sequence[float]) -> None:
        for writer in self._writers:
            writer.log_average_step_time(step, step_times)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self, *, failed: bool = False) -> None:
        _close_all(self._writers, failed)
