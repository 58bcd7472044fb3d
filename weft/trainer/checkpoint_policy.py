"""Save policies: decisions from the step and the evalers' summaries whether to save."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from weft.config import (
    REQUIRED,
    Configurable,
    InstantiableConfig,
    Required,
    config_class,
    maybe_instantiate,
)
from weft.config.names import did_you_mean
from weft.errors import CheckpointPolicyError
from weft.trainer.exchanged_numbers import LargestNumberLater
from weft.trainer.python_savables import PythonSavable
from weft.trainer.summary_values import due_summaries


class CheckpointPolicy(Protocol):
    """Function that decides whether to save; saved itself if it has `get_state` and `set_state`."""

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        """Returns whether to save, given the summaries of the evalers that ran after this step."""
        ...


def every_n_steps_policy(n: int = 1, *, min_step: int = 1) -> CheckpointPolicy:
    """Returns a policy that saves after every n-th step, from `min_step` on.

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
    """Returns a policy that saves after every n-th step from `min_step` on and after `max_step`."""
    every_n_steps = every_n_steps_policy(n, min_step=min_step)

    def policy(*, step: int, evaler_summaries: dict[str, Any]) -> bool:
        return step == max_step or every_n_steps(step=step, evaler_summaries=evaler_summaries)

    return policy


class EvalMetric(NamedTuple):
    """Number that an evaler reports, by its path in the summaries, such as "model/loss"."""

    evaler_name: str
    metric_name: str


def scalars_of(step: int, evaler_summaries: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the numbers that evalers reported after a step, by evaler name and path."""
    return {
        name: {
            leaf.path: float(leaf.value)
            for leaf in due_summaries(step, summaries, every_n_steps=1)
            if leaf.kind == "ScalarSummary"
        }
        for name, summaries in evaler_summaries.items()
    }


def metric_value(
    metric: EvalMetric, step: int, evaler_summaries: dict[str, Any], *, of: str
) -> float | None:
    """Returns the value of a metric; None if the evaler did not run after this step.

    Raises:
        CheckpointPolicyError: If the evaler does not report it; names the caller, `of`.
    """
    evaler, name = metric
    if evaler not in evaler_summaries:
        return None
    scalars = scalars_of(step, {evaler: evaler_summaries[evaler]})[evaler]
    if name not in scalars:
        raise CheckpointPolicyError(
            f"{of} uses {name!r}, which the evaler {evaler!r} does not report. "
            f"{did_you_mean(name, scalars)}"
        )
    return scalars[name]


def check_mode(mode: str | None, *, of: str) -> int:
    """Returns 1 for "max" and -1 for "min"; raises CheckpointPolicyError for another mode."""
    if mode not in ("max", "min"):
        raise CheckpointPolicyError(f"{of} got mode={mode!r}; expected 'max' or 'min'.")
    return 1 if mode == "max" else -1


class EverySecondsPolicy(Configurable):
    """Policy that saves when some time has passed since the last save or the start of the run.

    With several processes, the first clock that reaches it decides; all save after the next step.
    """

    @config_class
    class Config(Configurable.Config):
        """Configures an EverySecondsPolicy.

        Attributes:
            seconds: The time between two checkpoints; the current step is completed first.
        """

        seconds: Required[float] = REQUIRED

    def __init__(self, config: Config):
        super().__init__(config)
        if not config.seconds > 0:
            raise CheckpointPolicyError(
                f"EverySecondsPolicy got seconds={config.seconds!r}; expected more than 0."
            )
        self._last = time.monotonic()
        self._all = LargestNumberLater()

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        due = self._all(time.monotonic() - self._last >= self.config.seconds)
        if due:
            self._last = time.monotonic()
        return bool(due)


class AnyPolicy(Configurable):
    """Policy that saves when at least one of several policies does."""

    @config_class
    class Config(Configurable.Config):
        """Configures an AnyPolicy."""

        policies: Required[Sequence[InstantiableConfig[CheckpointPolicy]]] = REQUIRED

    def __init__(self, config: Config):
        super().__init__(config)
        self._policies: list[CheckpointPolicy] = [maybe_instantiate(p) for p in config.policies]

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        said = [p(step=step, evaler_summaries=evaler_summaries) for p in self._policies]
        return any(said)  # all are called, since some count steps

    def get_state(self) -> dict[str, Any]:
        """Returns the states of the stateful policies by position."""
        return {
            str(i): policy.get_state()
            for i, policy in enumerate(self._policies)
            if isinstance(policy, PythonSavable)
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores saved states."""
        for i, policy in enumerate(self._policies):
            if isinstance(policy, PythonSavable) and str(i) in state:
                policy.set_state(state[str(i)])


class BestMetricPolicy(Configurable):
    """Policy that saves when a metric improves on its best value so far, also across restarts."""

    @config_class
    class Config(Configurable.Config):
        """Configures a BestMetricPolicy.

        Attributes:
            mode: "max" if larger is better, "min" if smaller is.
        """

        metric: Required[EvalMetric] = REQUIRED
        mode: str | None = "max"

    def __init__(self, config: Config):
        super().__init__(config)
        self._sign = check_mode(config.mode, of="BestMetricPolicy")
        self._best: float | None = None

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        value = metric_value(self.config.metric, step, evaler_summaries, of="BestMetricPolicy")
        if value is None:
            return False  # the evaler did not run after this step
        # NaN is never better; any other first value is the best.
        better = value == value if self._best is None else self._sign * (value - self._best) > 0
        if better:
            self._best = value
        return better

    def get_state(self) -> dict[str, Any]:
        """Returns the best value so far."""
        return {"best": self._best}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved best value."""
        self._best = state["best"]
