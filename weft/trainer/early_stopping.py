"""Early stopping: a run ends when an evaler's metric has not improved for a while."""

from typing import Any

from weft.config import REQUIRED, Configurable, Required, config_class
from weft.errors import EarlyStoppingError
from weft.trainer.checkpoint_policy import EvalMetric, check_mode, metric_value
from weft.training import early_stopping


class EarlyStopping(Configurable):
    """Decides when to stop; its state is saved with the run.

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
            metric: The metric to watch, such as `EvalMetric("held_out", "loss")`.
            mode: "min" if smaller is better, "max" if larger is.
            patience: Number of consecutive evaluations without improvement that are allowed; the
                next one ends the run.
            min_delta: Smallest change that counts as an improvement.
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
        """True if the run should end."""
        return self._state.should_stop

    def check(self, evalers: Any) -> None:
        """Raises EarlyStoppingError if the run's evalers do not include that of the metric."""
        name = self.config.metric[0]
        if name not in evalers:
            raise EarlyStoppingError(
                f"early_stopping uses the evaler {name!r}, which the run does not have; it has "
                f"{', '.join(evalers) or 'none'}. Set early_stopping.metric to one of these, or "
                "add it to evalers."
            )

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        """Records the metric after a step, if it was evaluated; returns whether to stop."""
        value = metric_value(self.config.metric, step, evaler_summaries, of="early_stopping")
        if value is not None:
            self._state = self._state.update(self._sign * value)
        return self.should_stop

    def get_state(self) -> dict[str, Any]:
        """Returns the best value so far and the count of evaluations since."""
        state, none_yet = self._state, self._state.best_metric == float("inf")
        return {
            "best": None if none_yet else self._sign * state.best_metric,
            "count": state.patience_count,
            "should_stop": state.should_stop,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved state; the patience of this config decides whether to stop."""
        best, count = state["best"], state["count"]
        self._state = self._state.replace(
            best_metric=float("inf") if best is None else self._sign * best,
            patience_count=count,
            should_stop=count > self.config.patience,
        )
