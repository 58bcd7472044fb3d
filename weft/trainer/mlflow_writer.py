"""Summary writer for MLflow, which is imported only when a writer is created."""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from weft.config import ConfigBase, config_class
from weft.errors import MissingExtraError
from weft.hierarchy.module import Module
from weft.trainer.base_writer import PeriodicWriter, processor_zero_only


class MLflowWriter(PeriodicWriter):
    """Summary writer that logs numbers and texts to an MLflow run, but not images, audio or arrays.

    The first write starts the run. Its id is stored in `dir`, so that restarted training continues
    it. Without the package mlflow it raises a MissingExtraError.
    """

    _needs_allow = True  # it opens connections

    @config_class
    class Config(PeriodicWriter.Config):
        """Configures an MLflowWriter.

        Attributes:
            tracking_uri: A server's address or `sqlite:///PATH`; None for MLflow's own setting,
                such as MLFLOW_TRACKING_URI, else `mlflow.db` in the working directory.
            experiment_name: The experiment of the run, created if it does not exist.
            run_name: None lets MLflow choose a name.
            prefix: Prepended to names, as `prefix/name`.
        """

        tracking_uri: str | None = None
        experiment_name: str = "Default"
        run_name: str | None = None
        tags: dict[str, str] = {}
        prefix: str | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        try:
            import mlflow.tracking  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtraError(
                f"{self.path()}: MLflowWriter needs the package mlflow, which cannot be imported "
                f"({error}). Install it with `pip install 'weft[mlflow]'`, or use another "
                "summary_writer."
            ) from error
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run_id = ""  # of the open run

    def _start_run(self) -> None:
        if self._run_id:
            return
        cfg = self.config
        os.makedirs(cfg.dir, exist_ok=True)
        self._client = self._mlflow.MlflowClient(tracking_uri=cfg.tracking_uri)
        path = os.path.join(cfg.dir, "mlflow_run_id")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self._run_id = file.read().strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(cfg.experiment_name)
        experiment_id = (
            self._client.create_experiment(cfg.experiment_name)
            if experiment is None
            else experiment.experiment_id
        )
        run = self._client.create_run(experiment_id, tags=cfg.tags, run_name=cfg.run_name)
        self._run_id = run.info.run_id
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._run_id)

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        shown = self._due(step, values)
        with self._server_errors_reported():
            self._log(step, {s.path: s.value for s in shown if s.kind == "ScalarSummary"})
            for text in (s for s in shown if s.kind == "TextSummary"):
                name = f"{self._named(text.path)}/step_{step:08d}.txt"
                self._client.log_text(self._run_id, text.value, name)

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        self._start_run()
        self._client.log_text(self._run_id, config.debug_string(), f"config/step_{step:08d}.txt")

    @processor_zero_only
    def log_average_step_time(self, step: int, step_times: Sequence[float]) -> None:
        if not len(step_times):
            return
        with self._server_errors_reported():
            self._log(step, {"average_step_time": sum(step_times) / len(step_times)})

    @processor_zero_only
    def close(self, *, failed: bool = False) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
        self._run_id = ""

    def _server_errors_reported(self) -> AbstractContextManager[None]:
        errors = (OSError, self._mlflow.MlflowException)
        return self._errors_reported(self.config.tracking_uri or "MLflow's own store", errors)

    def _named(self, path: str) -> str:
        return f"{self.config.prefix}/{path}" if self.config.prefix else path

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._start_run()
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        metrics = [metric(self._named(path), value, now, step) for path, value in values.items()]
        # MLflow accepts at most a thousand at a time.
        for i in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + 1000])
