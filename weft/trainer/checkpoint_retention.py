"""Retention of checkpoints: a checkpoint is kept if at least one of these rules keeps it.

keep_last_n=2              the newest two
keep_every_n_steps=1000    beginning with the oldest, each at least 1000 steps after the last
keep_every_n_seconds=3600  the same by the time of saving
keep_best=...              those with the best value of an evaler's metric at their step
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from weft.config import REQUIRED, Configurable, Required, config_class
from weft.errors import CheckpointPolicyError
from weft.trainer.checkpoint_policy import EvalMetric, check_mode


class KeepBest(Configurable):
    """Rule that keeps the checkpoints with the best values of a metric.

    Only checkpoints at whose step the evaler ran qualify: run both at the same steps.
    """

    @config_class
    class Config(Configurable.Config):
        """Configures a KeepBest.

        Attributes:
            mode: "max" if larger is better, "min" if smaller is.
            n: Number of checkpoints to keep.
        """

        metric: Required[EvalMetric] = REQUIRED
        mode: str = "max"
        n: int = 1

    def __init__(self, config: Config):
        super().__init__(config)
        self._sign = check_mode(config.mode, of="KeepBest")
        if config.n < 1:
            raise CheckpointPolicyError(f"KeepBest got n={config.n}; expected 1 or more.")

    def kept(self, facts: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Returns the steps to keep, given the facts of each step's manifest."""
        evaler, name = self.config.metric
        values = {
            s: f.get("metrics", {}).get(evaler, {}).get(name, math.nan) for s, f in facts.items()
        }
        # Ties go to the newer step; NaN is never kept.
        best = sorted((self._sign * v, step) for step, v in values.items() if not math.isnan(v))
        return {step for _, step in best[-self.config.n :]}


def kept_steps(
    facts: Mapping[int, Mapping[str, Any]],
    *,
    last_n: int,
    every_n_steps: int | None = None,
    every_n_seconds: float | None = None,
    best: KeepBest | None = None,
) -> set[int]:
    """Returns the steps whose checkpoints are kept.

    Args:
        facts: facts of each step's manifest, by steps ascending.
        last_n: number of the newest to keep.
        every_n_steps: smallest distance in steps of others to keep; None for none.
        every_n_seconds: smallest distance in time of others to keep; None for none.

    >>> sorted(kept_steps({step: {} for step in range(10, 101, 10)}, last_n=2, every_n_steps=30))
    [10, 40, 70, 90, 100]
    """
    kept = set(list(facts)[-last_n:])
    kept |= _apart(facts, every_n_steps, lambda step: step)
    kept |= _apart(facts, every_n_seconds, lambda step: facts[step].get("saved_at", math.nan))
    return kept if best is None else kept | best.kept(facts)


def _apart(
    steps: Mapping[int, Any], distance: float | None, place: Callable[[int], float]
) -> set[int]:
    """Returns the steps at least `distance` from the one kept before."""
    kept: set[int] = set()
    last = -math.inf
    for step in steps:
        if distance is not None and place(step) - last >= distance:
            kept.add(step)
            last = place(step)
    return kept
