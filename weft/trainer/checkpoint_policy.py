"""When to save: policies that look at the step and at what the evalers found."""

from typing import Any, NamedTuple, Protocol

from weft.config import REQUIRED, Configurable, Required, config_class
from weft.config.names import did_you_mean
from weft.errors import CheckpointPolicyError
from weft.trainer.summary_values import due_summaries


class CheckpointPolicy(Protocol):
    """Decides whether to save. One with `get_state` and `set_state` is saved itself."""

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        """Whether to save after this step.

        Args:
            step: The step.
            evaler_summaries: The summaries of each evaler that ran after this step, by its name.
        """
        ...


def every_n_steps_policy(n: int = 1, *, min_step: int = 1) -> CheckpointPolicy:
    """Saves after every n-th step.

    Args:
        n: The number of steps between two checkpoints.
        min_step: The first step that may be saved.

    >>> policy = every_n_steps_policy(50)
    >>> [step for step in range(1, 151) if policy(step=step, evaler_summaries={})]
    [50, 100, 150]
    """

    def policy(*, step: int, evaler_summaries: dict[str, Any]) -> bool:
        del evaler_summaries
        return step >= min_step and step % n == 0

    return policy


def every_n_steps_and_last_policy(
    n: int = 1, *, min_step: int = 1, max_step: int
) -> CheckpointPolicy:
    """Saves after every n-th step, and after the last one.

    Args:
        n: The number of steps between two checkpoints.
        min_step: The first step that may be saved.
        max_step: The last step of the run.
    """
    every_n_steps = every_n_steps_policy(n, min_step=min_step)

    def policy(*, step: int, evaler_summaries: dict[str, Any]) -> bool:
        return step == max_step or every_n_steps(step=step, evaler_summaries=evaler_summaries)

    return policy


class EvalMetric(NamedTuple):
    """A number that an evaler reports.

    Attributes:
        evaler_name: The name of the evaler.
        metric_name: The path of the number in its summaries, such as "model/loss".
    """

    evaler_name: str
    metric_name: str


class BestMetricPolicy(Configurable):
    """Saves when a metric is better than at each time before, also before the run was restarted."""

    @config_class
    class Config(Configurable.Config):
        """Configures a BestMetricPolicy.

        Attributes:
            metric: What to look at.
            mode: "max" if more is better, "min" if less is.
        """

        metric: Required[EvalMetric] = REQUIRED
        mode: str | None = "max"

    def __init__(self, config: Config):
        super().__init__(config)
        if config.mode not in ("max", "min"):
            raise CheckpointPolicyError(
                f"BestMetricPolicy got mode={config.mode!r}; expected 'max' or 'min'."
            )
        self._sign = 1 if config.mode == "max" else -1
        self._best: float | None = None

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        name, metric = self.config.metric
        if name not in evaler_summaries:
            return False  # the evaler did not run after this step
        shown = due_summaries(step, evaler_summaries[name], every_n_steps=1)
        scalars = {leaf.path: leaf.value for leaf in shown if leaf.kind == "ScalarSummary"}
        if metric not in scalars:
            raise CheckpointPolicyError(
                f"BestMetricPolicy looks at {metric!r}, which the evaler {name!r} does not report. "
                f"{did_you_mean(metric, scalars)}"
            )
        value = scalars[metric]
        # NaN is never better, and everything is better than nothing.
        better = value == value if self._best is None else self._sign * (value - self._best) > 0
        if better:
            self._best = value
        return better

    def get_state(self) -> dict[str, Any]:
        """The best value so far, to be saved."""
        return {"best": self._best}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved best value."""
        self._best = state["best"]
