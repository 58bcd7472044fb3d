"""Summary writer for Weights & Biases, which is imported only when a writer is created."""

import os
import time
from collections.abc import Sequence
from typing import Any

from weft.config import REQUIRED, ConfigBase, config_class
from weft.config.show import value_repr
from weft.errors import MissingExtraError
from weft.hierarchy.module import Module
from weft.trainer.base_writer import PeriodicWriter, processor_zero_only
from weft.trainer.summary_values import Shown


class WandBWriter(PeriodicWriter):
    """Summary writer for the process's run of Weights & Biases.

    All writers of a process, such as those of a trainer and its evalers, share one run; `prefix`
    distinguishes their summaries. The first one to write starts the run with its config, and ends
    it, unless the program itself started one. The id is stored in that writer's `dir`, so that
    restarted training continues the run. Without the package wandb it raises a MissingExtraError.
    """

    _needs_allow = True  # it opens connections

    @config_class
    class Config(PeriodicWriter.Config):
        """Configures a WandBWriter.

        Attributes:
            prefix: Prepended to the name of every summary, as `prefix/name`.
            exp_name: Name of the run; None lets wandb choose one.
            entity: The user or team that owns the run.
            notes: Description of the run.
            mode: "online", "offline" or "disabled".
            resume: As in `wandb.init` for a run of the same id; "auto" continues it, like "allow".
            wandb_dir: Directory of wandb's own files; None for `dir`.
            wandb_settings_kwargs: Further arguments for `wandb.Settings`.
            convert_2d_to_image: Whether to show arrays with two axes as images instead of
                histograms.
        """

        prefix: str | None = None
        exp_name: str | None = None
        project: str | None = None
        entity: str | None = None
        group: str | None = None
        tags: Sequence[str] | None = None
        notes: str | None = None
        mode: str = "online"
        resume: str = "auto"
        wandb_dir: str | None = None
        wandb_settings_kwargs: dict[str, Any] | None = None
        convert_2d_to_image: bool = False

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtraError(
                f"{self.path()}: WandBWriter needs the package wandb, which cannot be imported "
                f"({error}). Install it with `pip install 'weft[wandb]'`, or use another "
                "summary_writer."
            ) from error
        self._wandb: Any = wandb
        self._own_run: Any = None  # started by this writer

    def _start_run(self) -> None:
        if self._wandb.run is not None:
            return
        cfg = self.config
        os.makedirs(cfg.dir, exist_ok=True)
        settings = cfg.wandb_settings_kwargs
        self._wandb.init(
            id=self._run_id(),
            name=cfg.exp_name,
            project=cfg.project,
            entity=cfg.entity,
            group=cfg.group,
            tags=cfg.tags and list(cfg.tags),
            notes=cfg.notes,
            mode=cfg.mode,
            # wandb's own "auto" reads the id from its directory, not from the argument.
            resume="allow" if cfg.resume == "auto" else cfg.resume,
            dir=cfg.wandb_dir or cfg.dir,
            settings=None if settings is None else self._wandb.Settings(**settings),
        )
        self._own_run = self._wandb.run

    def _run_id(self) -> str:
        path = os.path.join(self.config.dir, "wandb_id")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        run_id = f"{time.time_ns():x}"
        with open(path, "w", encoding="utf-8") as file:
            file.write(run_id)
        return run_id

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        shown = self._due(step, values)
        if shown:
            self._log(step, {leaf.path: self._convert(leaf) for leaf in shown})

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        del step
        self._start_run()
        self._wandb.config.update(self.format_config(config), allow_val_change=True)

    @processor_zero_only
    def log_average_step_time(self, step: int, step_times: Sequence[float]) -> None:
        if len(step_times):
            self._log(step, {"average_step_time": sum(step_times) / len(step_times)})

    @processor_zero_only
    def close(self, *, failed: bool = False) -> None:
        if self._own_run is not None and self._own_run is self._wandb.run:
            self._wandb.finish(exit_code=int(failed))
        self._own_run = None

    @staticmethod
    def format_config(val: Any) -> Any:
        """Converts a config, or a value in one, to nested dicts of numbers and strings for wandb.

        >>> from weft.config import config_for_function
        >>> WandBWriter.format_config(config_for_function(round).set(number=2.5))
        {'fn': "'round'", 'ndigits': None, 'number': 2.5}
        """
        if isinstance(val, ConfigBase):
            return {name: WandBWriter.format_config(value) for name, value in val.items()}
        if isinstance(val, dict):
            return {str(name): WandBWriter.format_config(value) for name, value in val.items()}
        if type(val) in (list, tuple):
            return [WandBWriter.format_config(value) for value in val]
        if val is REQUIRED:
            return "REQUIRED"
        return val if isinstance(val, bool | int | float | str | None) else value_repr(val)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        prefix = self.config.prefix
        self._start_run()
        named = {f"{prefix}/{name}": v for name, v in values.items()} if prefix else values
        self._wandb.log(named, step=step)

    def _convert(self, shown: Shown) -> Any:
        wandb, value = self._wandb, shown.value
        match shown.kind:
            case "HistogramSummary":
                if value.ndim == 2 and self.config.convert_2d_to_image:
                    return wandb.Image(value)
                return wandb.Histogram(value)
            case "ImageSummary":
                return [wandb.Image(image) for image in value]
            case "AudioSummary":
                return [wandb.Audio(clip, sample_rate=shown.sample_rate) for clip in value]
            case _:
                return value
