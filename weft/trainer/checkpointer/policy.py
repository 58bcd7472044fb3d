"""Policies that decide when to save, after which steps, and which older checkpoints to keep.

Garbage collection deletes the others. A checkpoint is kept if at least one of these rules keeps it:

    keep_last_n=2              the newest two
    keep_every_n_steps=1000    beginning with the oldest, each at least 1000 steps after the last
    keep_every_n_seconds=3600  the same by the time of saving
    keep_best=...              those with the best value of an evaler's metric at their step
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from weft import config as config_lib
from weft.distributed.preemption import DelayedMax
from weft.errors import CheckpointPolicyError, StepIntervalError, did_you_mean
from weft.serialization.untrusted import check_json
from weft.trainer.checkpointer.host_state import RunState
from weft.trainer.summary import due_summaries


class CheckpointPolicy(Protocol):
    """Function that decides whether to save; saved itself if it has `get_state` and `set_state`."""

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        """Returns whether to save, given the summaries of the evalers that ran after this step."""
        ...


def every_n_steps_policy(n: int = 1, *, min_step: int = 1) -> CheckpointPolicy:
    """Returns a policy that saves after every n-th step, from `min_step` on.

    Raises StepIntervalError if n is below 1.

    >>> policy = every_n_steps_policy(50)
    >>> [step for step in range(1, 151) if policy(step=step, evaler_summaries={})]
    [50, 100, 150]
    """
    if n < 1:
        raise StepIntervalError("save_policy.n", n)
    return lambda *, step, evaler_summaries: step >= min_step and step % n == 0


save_every_n_steps_policy = every_n_steps_policy
"""The same, under the name that `weft.trainer` offers."""


def every_n_steps_and_last_policy(
    n: int = 1, *, min_step: int = 1, max_step: int
) -> CheckpointPolicy:
    """Returns a policy that saves after every n-th step from `min_step` on and after `max_step`."""
    every_n_steps = every_n_steps_policy(n, min_step=min_step)
    return lambda *, step, evaler_summaries: (
        step == max_step
        or every_n_steps(step=step, evaler_summaries=evaler_summaries)
    )


class EvalMetric(NamedTuple):
    """Number that an evaler reports, by its path in the summaries, such as "model/loss"."""

    evaler_name: str
    metric_name: str


def scalars_of(
    step: int, evaler_summaries: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Returns the numbers that evalers reported after a step, by evaler name and path."""
    scalars: dict[str, dict[str, float]] = {}
    for name, summaries in evaler_summaries.items():
        scalars[name] = {}
        for summary in due_summaries(step, summaries, every_n_steps=1):
            if summary.kind == "ScalarSummary":
                scalars[name][summary.path] = float(summary.value)
    return scalars


def metric_value(
    metric: EvalMetric,
    step: int,
    evaler_summaries: dict[str, Any],
    *,
    user: str,
) -> float | None:
    """Returns the value of a metric; None if the evaler did not run after this step.

    Raises CheckpointPolicyError, with the name of the metric's `user`, if it is not reported.
    """
    evaler, name = metric
    if evaler not in evaler_summaries:
        return None
    scalars = scalars_of(step, {evaler: evaler_summaries[evaler]})[evaler]
    if name not in scalars:
        raise CheckpointPolicyError(
            f"{user} uses {name!r}, which the evaler {evaler!r} does not report. "
            f"{did_you_mean(name, scalars)}"
        )
    return scalars[name]


def check_mode(mode: str | None, *, user: str) -> int:
    """Returns 1 for "max" and -1 for "min"; raises CheckpointPolicyError for another mode."""
    if mode not in ("max", "min"):
        raise CheckpointPolicyError(
            f"{user} got mode={mode!r}; expected 'max' or 'min'."
        )
    if mode == "min":
        return -1
    return 1


class EverySecondsPolicy(config_lib.Configurable):
    """Policy that saves when some time has passed since the last save or the start of the run.

    With several processes, the first clock that reaches it decides; all save after the next step.
    """

    class Config(config_lib.Configurable.Config):
        """Configures an EverySecondsPolicy; after `seconds`, the current step completes first."""

        seconds: config_lib.Required[float] = config_lib.REQUIRED

    def __init__(self, config: Config):
        super().__init__(config)
        if not config.seconds > 0:
            raise CheckpointPolicyError(
                f"EverySecondsPolicy got seconds={config.seconds!r}; expected more than 0."
            )
        self._last_save = time.monotonic()
        self._max_over_processes = DelayedMax()

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        is_due_here = time.monotonic() - self._last_save >= self.config.seconds
        is_due = bool(self._max_over_processes(is_due_here))
        if is_due:
            self._last_save = time.monotonic()
        return is_due


class AnyPolicy(config_lib.Configurable):
    """Policy that saves when at least one of several policies does."""

    class Config(config_lib.Configurable.Config):
        policies: config_lib.Required[
            Sequence[config_lib.InstantiableConfig[CheckpointPolicy]]
        ] = config_lib.REQUIRED

    def __init__(self, config: Config):
        super().__init__(config)
        self._policies: list[CheckpointPolicy] = []
        for policy in config.policies:
            self._policies.append(config_lib.maybe_instantiate(policy))
        states = RunState(
            {str(i): policy for i, policy in enumerate(self._policies)}
        )
        self.get_state = states.get_state
        self.set_state = states.set_state

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        is_due = False
        for policy in self._policies:  # all are called, since some count steps
            if policy(step=step, evaler_summaries=evaler_summaries):
                is_due = True
        return is_due


class BestMetric(config_lib.Configurable):
    """Base of policies for steps at which a metric improves on its best value so far.

    The best value is saved with the run. The config of a subclass has `metric` and `mode`.
    """

    _min_delta = 0.0  # smallest change that counts as an improvement

    def __init__(self, config: Any, *, name: str | None = None):
        super().__init__(config)
        self._metric: EvalMetric = config.metric
        self._name = name or type(self).__name__
        self._sign = check_mode(config.mode, user=self._name)
        self._best: float | None = None

    def improves(
        self, step: int, evaler_summaries: dict[str, Any]
    ) -> bool | None:
        """Returns whether the metric has its best value so far; None if it was not evaluated."""
        value = metric_value(
            self._metric, step, evaler_summaries, user=self._name
        )
        if value is None:
            return None
        if self._best is None:
            has_improved = not math.isnan(value)
        else:
            has_improved = self._sign * (value - self._best) > self._min_delta
        if has_improved:
            self._best = value
        return has_improved

    def get_state(self) -> dict[str, Any]:
        """Returns the best value so far."""
        return {"best": self._best}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved best value."""
        check_json(state, {"best": (None, float)})
        self._best = state["best"]


class BestMetricPolicy(BestMetric):
    """Policy that saves when a metric improves on its best value so far, also across restarts."""

    class Config(config_lib.Configurable.Config):
        """Configures a BestMetricPolicy; `mode` is "max" if larger is better, else "min"."""

        metric: config_lib.Required[EvalMetric] = config_lib.REQUIRED
        mode: str | None = "max"

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        return bool(self.improves(step, evaler_summaries))


class KeepBest(config_lib.Configurable):
    """Rule that keeps the checkpoints with the best values of a metric.

    Only checkpoints at whose step the evaler ran qualify: run both at the same steps.
    """

    class Config(config_lib.Configurable.Config):
        """Configures a KeepBest."""

        metric: config_lib.Required[EvalMetric] = config_lib.REQUIRED
        mode: str = "max"
        """"max" if larger is better, "min" if smaller is."""
        n: int = 1
        """Number of checkpoints to keep."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._sign = check_mode(config.mode, user="KeepBest")
        if config.n < 1:
            raise CheckpointPolicyError(
                f"KeepBest got n={config.n}; expected 1 or more."
            )

    def kept(self, facts: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Returns the steps to keep, given the facts of each step's manifest."""
        evaler, name = self.config.metric
        ranked_steps: list[tuple[float, int]] = []
        for step, step_facts in facts.items():
            metrics = step_facts.get("metrics", {}).get(evaler, {})
            value = metrics.get(name, math.nan)
            if not math.isnan(value):  # NaN is never kept
                ranked_steps.append((self._sign * value, step))
        ranked_steps.sort()  # ties go to the newer step
        return {step for _, step in ranked_steps[-self.config.n :]}


def kept_steps(
    facts: Mapping[int, Mapping[str, Any]],
    *,
    last_n: int,
    every_n_steps: int | None = None,
    every_n_seconds: float | None = None,
    best: KeepBest | None = None,
) -> set[int]:
    """Returns the steps whose checkpoints are kept, given manifest facts by ascending step.

    >>> sorted(kept_steps({step: {} for step in range(10, 101, 10)}, last_n=2, every_n_steps=30))
    [10, 40, 70, 90, 100]
    """
    steps = set(list(facts)[-last_n:])
    if every_n_steps is not None:
        steps |= _spaced_steps({step: step for step in facts}, every_n_steps)
    if every_n_seconds is not None:
        times = {
            step: step_facts.get("saved_at", math.nan)
            for step, step_facts in facts.items()
        }
        steps |= _spaced_steps(times, every_n_seconds)
    if best is not None:
        steps |= best.kept(facts)
    return steps


def _spaced_steps(positions: Mapping[int, float], distance: float) -> set[int]:
    """Returns the first step, and each whose position is so far from the last one."""
    steps: set[int] = set()
    last_position = -math.inf
    for step, position in positions.items():
        if position - last_position >= distance:
            steps.add(step)
            last_position = position
    return steps
