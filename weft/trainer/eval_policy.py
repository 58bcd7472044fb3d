"""Evaluation policies: every n steps, at the end of the run, when another evaler's metric is best.

The evaler calls its policy after every step with the training summaries and, under "evalers", the
summaries of earlier evalers at the same step. A policy with `get_state` and `set_state` is saved.
"""

from typing import Any, Protocol

from weft.config import (
    REQUIRED,
    Configurable,
    InstantiableConfig,
    Required,
    config_class,
    maybe_instantiate,
)
from weft.trainer.checkpoint_policy import EvalMetric, check_mode, metric_value


class EvalPolicy(Protocol):
    """Function that decides whether to evaluate."""

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        """Returns whether to evaluate after this step."""
        ...


def every_n_steps_policy(
    n: int = 1, *, min_step: int = 1, max_step: int | None = None
) -> EvalPolicy:
    """Returns a policy that evaluates after every n-th step from `min_step` on, and `max_step`.

    >>> policy = every_n_steps_policy(40, max_step=100)
    >>> [step for step in range(101) if policy(step=step, train_summaries={})]
    [40, 80, 100]
    """

    def policy(*, step: int, train_summaries: dict[str, Any]) -> bool:
        del train_summaries
        return step == max_step or (step >= min_step and step % n == 0)

    return policy


class AtEndPolicy(Configurable):
    """Policy that evaluates at the end of a run: its last step, the end of its data, an early stop.

    A run that a signal stops has not ended; it continues later.
    """

    @config_class
    class Config(Configurable.Config):
        """Configures an AtEndPolicy.

        Attributes:
            also: A policy for evaluations before the end; None for none.
        """

        also: InstantiableConfig[EvalPolicy] | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self._also: EvalPolicy | None = maybe_instantiate(config.also)

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        return bool(self._also and self._also(step=step, train_summaries=train_summaries))


class BestMetricEvalPolicy(Configurable):
    """Policy that evaluates when the metric of an earlier evaler has its best value so far."""

    @config_class
    class Config(Configurable.Config):
        """Configures a BestMetricEvalPolicy.

        Attributes:
            metric: The metric; its evaler must precede this one.
            mode: "max" if larger is better, "min" if smaller is.
        """

        metric: Required[EvalMetric] = REQUIRED
        mode: str = "min"

    def __init__(self, config: Config):
        super().__init__(config)
        self._sign = check_mode(config.mode, of=type(self).__name__)
        self._best: float | None = None

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        evalers = train_summaries.get("evalers", {})
        value = metric_value(self.config.metric, step, evalers, of=type(self).__name__)
        if value is None or value != value:  # NaN is never better
            return False
        if self._best is not None and self._sign * (value - self._best) <= 0:
            return False
        self._best = value
        return True

    def get_state(self) -> dict[str, Any]:
        """Returns the best value so far."""
        return {"best": self._best}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved best value."""
        self._best = state["best"]
