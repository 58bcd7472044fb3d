"""Summary writers for experiment trackers: Weights & Biases and MLflow.

A tracker's package is imported only when a writer is created.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from weft._lazy import import_extra
from weft.config import REQUIRED, ConfigBase
from weft.config.config import value_repr
from weft.hierarchy.module import Module
from weft.serialization.directory import Directory
from weft.trainer.summary import FlatSummary
from weft.trainer.summary_writer.base import PeriodicWriter, processor_zero_only

_MAX_ID_BYTES = 1024


class _TrackerWriter(PeriodicWriter):
    """Base of the writers to a tracker, the package `_tracker`, which an extra installs."""

    _needs_allow = True  # it opens connections
    _tracker: str

    def __init__(self, cfg: PeriodicWriter.Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        needed_by = f"{self.path()}: {type(self).__name__}"
        self._package = import_extra(
            self._tracker, self._tracker, needed_by=needed_by
        )

    def _log(self, step: int, values: dict[str, Any]) -> None:
        raise NotImplementedError(type(self))

    @processor_zero_only
    def _log_number(self, step: int, name: str, value: float) -> None:
        self._log(step, {name: value})

    def _with_prefix(self, name: str) -> str:
        if not self.config.prefix:
            return name
        return f"{self.config.prefix}/{name}"

    def _stored_id(
        self, file_name: str, make: Callable[[], str]
    ) -> tuple[str, bool]:
        """Returns the run's id from a file in `dir`, or a new one, and whether it is new."""
        directory = Directory(self.config.dir)
        if directory.has_file(file_name):
            return directory.read_text(
                file_name, at_most=_MAX_ID_BYTES
            ).strip(), False
        run_id = make()
        os.makedirs(self.config.dir, exist_ok=True)
        directory.write(file_name, run_id)
        return run_id, True


class WandBWriter(_TrackerWriter):
    """Summary writer for the process's run of Weights & Biases.

    All writers of a process, such as those of a trainer and its evalers, share one run; `prefix`
    distinguishes their summaries. The first one to write starts the run with its config, and ends
    it, unless the program itself started one. The id is stored in that writer's `dir`, so that
    restarted training continues the run. Without the package wandb it raises a MissingExtraError.
    """

    _tracker = "wandb"

    class Config(PeriodicWriter.Config):
        """Configures a WandBWriter."""

        prefix: str | None = None
        """Prepended to the name of every summary, as `prefix/name`."""
        exp_name: str | None = None
        """Name of the run; None lets wandb choose one."""
        project: str | None = None
        entity: str | None = None
        """The user or team that owns the run."""
        group: str | None = None
        tags: Sequence[str] | None = None
        notes: str | None = None
        """Description of the run."""
        mode: str = "online"
        """"online", "offline" or "disabled"."""
        resume: str = "auto"
        """As in `wandb.init` for a run of the same id; "auto" continues it, like "allow"."""
        wandb_dir: str | None = None
        """Directory of wandb's own files; None for `dir`."""
        wandb_settings_kwargs: dict[str, Any] | None = None
        """Further arguments for `wandb.Settings`."""
        convert_2d_to_image: bool = False
        """Whether to show arrays with two axes as images, not histograms."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._started_run: Any = None  # by this writer, not by the program

    def _start_run(self) -> None:
        if self._package.run is not None:
            return
        cfg = self.config
        run_id, _ = self._stored_id("wandb_id", lambda: f"{time.time_ns():x}")
        resume = cfg.resume
        if resume == "auto":
            # wandb's own "auto" reads the id from its directory, not from the argument.
            resume = "allow"
        settings = None
        if cfg.wandb_settings_kwargs is not None:
            settings = self._package.Settings(**cfg.wandb_settings_kwargs)
        self._package.init(
            id=run_id,
            name=cfg.exp_name,
            project=cfg.project,
            entity=cfg.entity,
            group=cfg.group,
            tags=cfg.tags and list(cfg.tags),
            notes=cfg.notes,
            mode=cfg.mode,
            resume=resume,
            dir=cfg.wandb_dir or cfg.dir,
            settings=settings,
        )
        self._started_run = self._package.run

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        summaries = self._due(step, values)
        if summaries:
            self._log(
                step,
                {summary.path: self._convert(summary) for summary in summaries},
            )

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        self._start_run()
        self._package.config.update(
            self.format_config(config), allow_val_change=True
        )

    @processor_zero_only
    def close(self, *, failed: bool = False) -> None:
        if (
            self._started_run is not None
            and self._started_run is self._package.run
        ):
            self._package.finish(exit_code=int(failed))
        self._started_run = None

    @staticmethod
    def format_config(val: Any) -> Any:
        """Converts a config, or a value in one, to nested dicts of numbers and strings for wandb.

        >>> from weft.config import config_for_function
        >>> WandBWriter.format_config(config_for_function(round).set(number=2.5))
        {'fn': "'round'", 'ndigits': None, 'number': 2.5}
        """
        if isinstance(val, ConfigBase | dict):
            return {
                str(name): WandBWriter.format_config(value)
                for name, value in val.items()
            }
        if type(val) in (list, tuple):
            return [WandBWriter.format_config(value) for value in val]
        if val is REQUIRED:
            return "REQUIRED"
        if isinstance(val, bool | int | float | str | None):
            return val
        return value_repr(val)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._start_run()
        self._package.log(
            {self._with_prefix(name): x for name, x in values.items()},
            step=step,
        )

    def _convert(self, summary: FlatSummary) -> Any:
        """Returns a value of wandb's types."""
        wandb = self._package
        value = summary.value
        match summary.kind:
            case "HistogramSummary" | "ArraySummary":
                if value.ndim == 2 and self.config.convert_2d_to_image:
                    return wandb.Image(value)
                return wandb.Histogram(value)
            case "ImageSummary":
                return [wandb.Image(image) for image in value]
            case "AudioSummary":
                return [
                    wandb.Audio(clip, sample_rate=summary.sample_rate)
                    for clip in value
                ]
            case _:
                return value


class MLflowWriter(_TrackerWriter):
    """Summary writer that logs numbers and texts to an MLflow run, but not images, audio or arrays.

    The first write starts the run. Its id is stored in `dir`, so that restarted training continues
    it. Without the package mlflow it raises a MissingExtraError.
    """

    _tracker = "mlflow"

    class Config(PeriodicWriter.Config):
        """Configures an MLflowWriter."""

        tracking_uri: str | None = None
        """A server's address or `sqlite:///PATH`; None for MLflow's own setting, such as
        MLFLOW_TRACKING_URI, else `mlflow.db` in the working directory."""
        experiment_name: str = "Default"
        """The experiment of the run, created if it does not exist."""
        run_name: str | None = None
        """None lets MLflow choose a name."""
        tags: dict[str, str] = {}
        prefix: str | None = None
        """Prepended to names, as `prefix/name`."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._client: Any = None
        self._run_id = ""  # of the open run

    def _start_run(self) -> None:
        if self._run_id:
            return
        cfg = self.config
        client = self._client = self._package.MlflowClient(
            tracking_uri=cfg.tracking_uri
        )

        def create_run() -> str:
            experiment = client.get_experiment_by_name(cfg.experiment_name)
            if experiment is None:
                experiment_id = client.create_experiment(cfg.experiment_name)
            else:
                experiment_id = experiment.experiment_id
            run = client.create_run(
                experiment_id, tags=cfg.tags, run_name=cfg.run_name
            )
            return run.info.run_id

        self._run_id, is_new = self._stored_id("mlflow_run_id", create_run)
        if not is_new:
            client.update_run(self._run_id, status="RUNNING")

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        numbers: dict[str, float] = {}
        texts: dict[str, str] = {}
        for summary in self._due(step, values):
            if summary.kind == "ScalarSummary":
                numbers[summary.path] = summary.value
            elif summary.kind == "TextSummary":
                texts[summary.path] = summary.value
        with self._server_errors_reported():
            self._log(step, numbers)
            for path, text in texts.items():
                name = f"{self._with_prefix(path)}/step_{step:08d}.txt"
                self._client.log_text(self._run_id, text, name)

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        self._start_run()
        self._client.log_text(
            self._run_id, config.debug_string(), f"config/step_{step:08d}.txt"
        )

    @processor_zero_only
    def _log_number(self, step: int, name: str, value: float) -> None:
        with self._server_errors_reported():
            self._log(step, {name: value})

    @processor_zero_only
    def close(self, *, failed: bool = False) -> None:
        if self._run_id:
            status = "FAILED" if failed else "FINISHED"
            self._client.set_terminated(self._run_id, status)
        self._run_id = ""

    def _server_errors_reported(self) -> AbstractContextManager[None]:
        errors = (OSError, self._package.MlflowException)
        return self._errors_reported(
            self.config.tracking_uri or "MLflow's own store", errors
        )

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._start_run()
        milliseconds = int(time.time() * 1000)
        metrics: list[Any] = []
        for path, value in values.items():
            name = self._with_prefix(path)
            metrics.append(
                self._package.entities.Metric(name, value, milliseconds, step)
            )
        # MLflow accepts at most a thousand at a time.
        for i in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + 1000])
