"""Which checkpoints are kept: those that any one of the rules keeps.

keep_last_n=2              the newest two
keep_every_n_steps=1000    beginning with the oldest, each at least 1000 steps after the last
keep_every_n_seconds=3600  likewise by the time at which they were saved
keep_best=...              the best by what an evaler reported after the same step
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from weft.config import REQUIRED, Configurable, Required, config_class
from weft.errors import CheckpointPolicyError
from weft.trainer.checkpoint_policy import EvalMetric, check_mode


class KeepBest(Configurable):
    """Keeps the checkpoints with the best values of a metric, among those that have one.

    A checkpoint has one if the evaler ran after its step: let both be due at the same steps.
    """

    @config_class
    class Config(Configurable.Config):
        """Configures a KeepBest.

        Attributes:
            metric: What to look at.
            mode: "max" if more is better, "min" if less is.
            n: How many are kept.
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
        """The steps that are kept.

        Args:
            facts: what the manifest of each step says.
        """
        evaler, name = self.config.metric
        values = {
            s: f.get("metrics", {}).get(evaler, {}).get(name, math.nan) for s, f in facts.items()
        }
        # Of equal ones the newer; one that is NaN never.
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
    """The steps whose checkpoints are kept.

    Args:
        facts: what the manifest of each step says, by steps ascending.
        last_n: how many of the newest.
        every_n_steps: how far apart others are; None for none.
        every_n_seconds: how far apart in time others are; None for none.
        best: keeps the best; None for none.

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
    """Those that are at least so far from the last one kept."""
    kept: set[int] = set()
    last = -math.inf
    for step in steps:
        if distance is not None and place(step) - last >= distance:
            kept.add(step)
            last = place(step)
    return kept
