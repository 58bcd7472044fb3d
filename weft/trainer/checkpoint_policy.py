"""When to save: policies that look at the step and at what the evalers found."""

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


def scalars_of(step: int, evaler_summaries: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers that evalers report, by the name of the evaler and the path of the number.

    Args:
        step: After which they ran.
        evaler_summaries: The summaries of each by its name.
    """
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
    """The number that a policy looks at, None if the evaler did not run after this step.

    Args:
        metric: Which number.
        step: After which the evalers ran.
        evaler_summaries: The summaries of each by its name.
        of: Who asks, for the error.

    Raises:
        CheckpointPolicyError: If the evaler does not report it.
    """
    evaler, name = metric
    if evaler not in evaler_summaries:
        return None
    scalars = scalars_of(step, {evaler: evaler_summaries[evaler]})[evaler]
    if name not in scalars:
        raise CheckpointPolicyError(
            f"{of} looks at {name!r}, which the evaler {evaler!r} does not report. "
            f"{did_you_mean(name, scalars)}"
        )
    return scalars[name]


def check_mode(mode: str | None, *, of: str) -> int:
    """1 if more is better, -1 if less is.

    Args:
        mode: "max" or "min".
        of: Whose it is, for the error.

    Raises:
        CheckpointPolicyError: If it is neither.
    """
    if mode not in ("max", "min"):
        raise CheckpointPolicyError(f"{of} got mode={mode!r}; expected 'max' or 'min'.")
    return 1 if mode == "max" else -1


class EverySecondsPolicy(Configurable):
    """Saves when so many seconds have passed since the last time, or since the run began.

    Of several processes the first whose clock says so decides, and all save after the next step.
    """

    @config_class
    class Config(Configurable.Config):
        """Configures an EverySecondsPolicy.

        Attributes:
            seconds: The time between two checkpoints; the step under way is ended first.
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
    """Saves when at least one of several policies says so."""

    @config_class
    class Config(Configurable.Config):
        """Configures an AnyPolicy.

        Attributes:
            policies: Configs of policies.
        """

        policies: Required[Sequence[InstantiableConfig[CheckpointPolicy]]] = REQUIRED

    def __init__(self, config: Config):
        super().__init__(config)
        self._policies: list[CheckpointPolicy] = [maybe_instantiate(p) for p in config.policies]

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        said = [p(step=step, evaler_summaries=evaler_summaries) for p in self._policies]
        return any(said)  # each was asked, whatever another says: some keep count

    def get_state(self) -> dict[str, Any]:
        """The states of those that have one, by their position."""
        return {
            str(i): policy.get_state()
            for i, policy in enumerate(self._policies)
            if isinstance(policy, PythonSavable)
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from saved states."""
        for i, policy in enumerate(self._policies):
            if isinstance(policy, PythonSavable) and str(i) in state:
                policy.set_state(state[str(i)])


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
        self._sign = check_mode(config.mode, of="BestMetricPolicy")
        self._best: float | None = None

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        value = metric_value(self.config.metric, step, evaler_summaries, of="BestMetricPolicy")
        if value is None:
            return False  # the evaler did not run after this step
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
