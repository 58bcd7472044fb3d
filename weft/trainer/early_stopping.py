"""Early stopping: a run ends when what an evaler measures has not improved for a while."""

from typing import Any

from weft.config import REQUIRED, Configurable, Required, config_class
from weft.errors import EarlyStoppingError
from weft.trainer.checkpoint_policy import EvalMetric, check_mode, metric_value
from weft.training import early_stopping


class EarlyStopping(Configurable):
    """Says when to stop; how long nothing has improved is saved with the run.

    Example:
        >>> cfg = EarlyStopping.default_config().set(metric=EvalMetric("held_out", "loss"))
        >>> stopping = cfg.set(patience=1).instantiate()
        >>> [stopping(step=i, evaler_summaries={"held_out": {"loss": x}})
        ...  for i, x in enumerate([2.0, 1.0, 1.5, 1.5])]
        [False, False, False, True]
    """

    @config_class
    class Config(Configurable.Config):
        """Configures an EarlyStopping.

        Attributes:
            metric: What to look at, as `EvalMetric("held_out", "loss")`.
            mode: "min" if less is better, "max" if more is.
            patience: How many evaluations in a row may pass without an improvement before the next
                such one ends the run.
            min_delta: By how much the metric must improve to count.
        """

        metric: Required[EvalMetric] = REQUIRED
        mode: str = "min"
        patience: int = 0
        min_delta: float = 0.0

    def __init__(self, config: Config):
        super().__init__(config)
        if config.patience < 0 or config.min_delta < 0:
            raise EarlyStoppingError(
                f"early_stopping got patience={config.patience} and min_delta={config.min_delta:g};"
                " expected numbers that are not negative."
            )
        self._sign = -check_mode(config.mode, of="early_stopping")
        self._state = early_stopping.EarlyStopping(
            min_delta=config.min_delta, patience=config.patience
        )

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end."""
        return self._state.should_stop

    def check(self, evalers: Any) -> None:
        """Checks that the evaler that it looks at is one of the run's.

        Args:
            evalers: Their names.

        Raises:
            EarlyStoppingError: If it is not.
        """
        name = self.config.metric[0]
        if name not in evalers:
            raise EarlyStoppingError(
                f"early_stopping looks at the evaler {name!r}, which is none of the run's: "
                f"{', '.join(evalers) or 'there are none'}. Name one of them in "
                "early_stopping.metric, or add it to evalers."
            )

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        """Looks at what the evalers report.

        Args:
            step: After which they ran.
            evaler_summaries: The summaries of each that ran, by its name.

        Returns:
            Whether the run is to end.
        """
        value = metric_value(self.config.metric, step, evaler_summaries, of="early_stopping")
        if value is not None:
            self._state = self._state.update(self._sign * value)
        return self.should_stop

    def get_state(self) -> dict[str, Any]:
        """The best value so far and the count since, to be saved."""
        state, none_yet = self._state, self._state.best_metric == float("inf")
        return {
            "best": None if none_yet else self._sign * state.best_metric,
            "count": state.patience_count,
            "should_stop": state.should_stop,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; whether to stop is judged by the patience of this config."""
        best, count = state["best"], state["count"]
        self._state = self._state.replace(
            best_metric=float("inf") if best is None else self._sign * best,
            patience_count=count,
            should_stop=count > self.config.patience,
        )
