"""When to evaluate: after every so many steps, when the run ends, when another evaler's is best.

A policy is asked after every step. It sees the step's training summaries and, under "evalers", what
the evalers before this one have reported after the same step. One with `get_state` and `set_state`
is saved with the run.
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
    """Decides whether to evaluate."""

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        """Whether to evaluate after this step.

        Args:
            step: The step.
            train_summaries: What the training reported of it, and under "evalers" what evalers did.
        """
        ...


def every_n_steps_policy(
    n: int = 1, *, min_step: int = 1, max_step: int | None = None
) -> EvalPolicy:
    """Evaluates after every n-th step, and after the last one.

    Args:
        n: The number of steps between two evaluations.
        min_step: The first step that may be evaluated.
        max_step: The last step of the run, evaluated in any case. None: no step is.

    >>> policy = every_n_steps_policy(40, max_step=100)
    >>> [step for step in range(101) if policy(step=step, train_summaries={})]
    [40, 80, 100]
    """

    def policy(*, step: int, train_summaries: dict[str, Any]) -> bool:
        del train_summaries
        return step == max_step or (step >= min_step and step % n == 0)

    return policy


class AtEndPolicy(Configurable):
    """Evaluates when the run ends: by its last step, the end of its data, or stopped early.

    A run that is asked to stop by a signal has not ended: it goes on from there.
    """

    @config_class
    class Config(Configurable.Config):
        """Configures an AtEndPolicy.

        Attributes:
            also: A policy that says when to evaluate before; None for not at all.
        """

        also: InstantiableConfig[EvalPolicy] | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self._also: EvalPolicy | None = maybe_instantiate(config.also)

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        return bool(self._also and self._also(step=step, train_summaries=train_summaries))


class BestMetricEvalPolicy(Configurable):
    """Evaluates when the metric of an evaler that comes before is better than ever."""

    @config_class
    class Config(Configurable.Config):
        """Configures a BestMetricEvalPolicy.

        Attributes:
            metric: What to look at; its evaler must stand before this one.
            mode: "max" if more is better, "min" if less is.
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
        """The best value so far, to be saved."""
        return {"best": self._best}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved best value."""
        self._best = state["best"]
