"""`weft lr-find`: a learning rate for a recipe, from a short run whose rate grows at each step.

The loss is constant while the rate is too small, falls, and rises when the rate is too
large. The rate at which it falls fastest, over the logarithm of the rate, is a good peak for a
schedule (Smith, 2017, "Cyclical learning rates for training neural networks").

    rate of step i = min_rate * (max_rate / min_rate) ** (i / (num_steps - 1))
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from rich.table import Table

from weft.cli import configs, train
from weft.config import config_for_function
from weft.errors import LearningRateSearchError
from weft.report import display
from weft.trainer import (
    BaseCheckpointer,
    Hook,
    NoOpWriter,
    SpmdTrainer,
    schedule,
)
from weft.trainer.trainer_config_modifier import (
    apply_config_modifiers,
    find_values,
    outermost,
)
from weft.typing import Nested, Tensor

_DECAY = 0.9
_LEAST_STEPS = 20
_LEAST_STEPS_PER_TENFOLD = 3
# A loss of this multiple of the smallest one ends the search.
_DIVERGED_FACTOR = 4.0


@dataclasses.dataclass(frozen=True)
class LearningRateSearch:
    """Result of a search.

    Attributes:
        rates: The learning rate of each completed step.
        smoothed: The exponential moving average of the losses.
        suggestion: The rate at which the smoothed loss falls fastest.
        fields: The fields of the trainer's config that hold a learning rate.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float
    fields: list[str]


def exponential_sweep(
    *, min_rate: float, max_rate: float, num_steps: int
) -> schedule.ScheduleFn:
    """Returns a schedule that grows by equal factors from step 1 to step `num_steps`.

    >>> rate = exponential_sweep(min_rate=1e-4, max_rate=1.0, num_steps=5)
    >>> [round(float(rate(i)), 4) for i in range(1, 6)]
    [0.0001, 0.001, 0.01, 0.1, 1.0]
    """

    def rate(step: int | Tensor) -> Tensor:
        share = (jnp.asarray(step, jnp.float32) - 1) / (num_steps - 1)
        return jnp.exp(
            math.log(min_rate) + share * math.log(max_rate / min_rate)
        )

    return rate


def find_learning_rate(
    cfg: SpmdTrainer.Config,
    *,
    min_rate: float = 1e-6,
    max_rate: float = 1.0,
    num_steps: int = 100,
) -> LearningRateSearch:
    """Runs the first steps of a trainer's config with a growing learning rate.

    Every field `learning_rate` of the learner is replaced, in a copy. Nothing is evaluated, saved
    or written to the run's directory. A loss that is not finite or far above its best ends it.

    Raises LearningRateSearchError if the arguments do not describe a sweep, it has too few steps,
    the learner has no field `learning_rate`, or the loss does not fall.
    """
    if not 0 < min_rate < max_rate:
        raise LearningRateSearchError(
            f"a sweep from {min_rate=:g} to {max_rate=:g}; expected 0 < min_rate < max_rate."
        )
    steps_per_tenfold = num_steps / math.log10(max_rate / min_rate)
    if num_steps < _LEAST_STEPS or steps_per_tenfold < _LEAST_STEPS_PER_TENFOLD:
        least_steps = max(
            _LEAST_STEPS,
            math.ceil(num_steps * _LEAST_STEPS_PER_TENFOLD / steps_per_tenfold),
        )
        raise LearningRateSearchError(
            f"{num_steps} steps are too few for rates from {min_rate:g} to {max_rate:g}: the loss "
            "of a batch varies more than it falls from one to the next. Expected "
            f"{least_steps} steps or more."
        )
    cfg = apply_config_modifiers(cfg).clone()

    def is_rate(path: str, value: object) -> bool:
        return path.rpartition(".")[2] == "learning_rate"

    fields = outermost(find_values(cfg.learner, is_rate))
    if not fields:
        raise LearningRateSearchError(
            "the learner's config has no field `learning_rate` to sweep; use an optimizer with an "
            "argument of this name."
        )
    sweep = {"min_rate": min_rate, "max_rate": max_rate, "num_steps": num_steps}
    for path in fields:
        rate_cfg = config_for_function(exponential_sweep).set(**sweep)
        cfg.learner.set_recursively(path, value=rate_cfg)
    losses = _Losses()
    with tempfile.TemporaryDirectory() as directory:
        cfg.set(
            dir=directory,
            max_step=num_steps,
            evalers={},
            early_stopping=None,
            throughput=None,
            start_trace_steps=[],
            summary_writer=NoOpWriter.default_config(),
            checkpointer=NoCheckpoints.default_config(),
        )
        with contextlib.suppress(_DivergedError):
            cfg.instantiate(parent=None).run(listener=losses, progress=False)
    rate = exponential_sweep(
        min_rate=min_rate, max_rate=max_rate, num_steps=num_steps
    )
    rates = [float(rate(step)) for step in range(1, len(losses.values) + 1)]
    smoothed = _smoothed(losses.values)
    return LearningRateSearch(
        rates=rates,
        losses=losses.values,
        smoothed=smoothed,
        suggestion=_suggestion(rates, smoothed),
        fields=[f"learner.{field}" for field in fields],
    )


def _smoothed(losses: Sequence[float]) -> list[float]:
    averages: list[float] = []
    average = 0.0
    for i, loss in enumerate(losses):
        average = _DECAY * average + (1 - _DECAY) * loss
        averages.append(
            average / (1 - _DECAY ** (i + 1))
        )  # without the bias of the start at 0
    return averages


def _suggestion(rates: Sequence[float], smoothed: Sequence[float]) -> float:
    slopes = [
        loss - previous for previous, loss in itertools.pairwise(smoothed)
    ]
    # The first averages are of few losses and therefore noisy.
    first = min(len(slopes) // 10, 5)
    steepest = min(
        range(first, len(slopes)), key=slopes.__getitem__, default=None
    )
    if steepest is None or slopes[steepest] >= 0:
        raise LearningRateSearchError(
            f"the loss does not fall at any rate from {rates[0]:g} to {rates[-1]:g}: it starts at "
            f"{smoothed[0]:.4g} and ends at {smoothed[-1]:.4g}. Sweep other rates, or use more "
            "steps."
        )
    return rates[steepest]


class _DivergedError(Exception):
    """Loss far above its best value."""


class _Losses(Hook):
    """Hook that keeps finite losses, and ends the run when they diverge."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(
        self, step: int, outputs: dict[str, Any], batch: Nested[Tensor]
    ) -> None:
        loss = float(outputs["loss"])
        if not math.isfinite(loss):
            raise _DivergedError
        self.values.append(loss)
        # A factor is not meaningful for losses below zero, such as log densities.
        if loss > _DIVERGED_FACTOR * min(self.values) > 0:
            raise _DivergedError


class NoCheckpoints(BaseCheckpointer):
    """Checkpointer that saves nothing."""

    Config = BaseCheckpointer.Config

    def save(self, **kwargs: object) -> bool:
        return False

    def restore(
        self, *, step: int | None = None, state: Nested[Any]
    ) -> tuple[int | None, Nested[Any]]:
        return None, state

    def wait_until_finished(self) -> None:
        pass

    def stop(self, *, has_exception: bool = False) -> None:
        pass


_ROWS = 20
_BAR_WIDTH = 40


def run(arguments: argparse.Namespace) -> int:
    """Prints the loss per learning rate, and the rate at which it falls fastest."""
    recipe, overrides = train.split_arguments(arguments.recipe_and_overrides)
    search = find_learning_rate(
        configs.load_config(recipe, overrides, **arguments.trust),
        min_rate=arguments.min,
        max_rate=arguments.max,
        num_steps=arguments.steps,
    )
    console = display.table_console()
    console.print(loss_table(search))
    display.print_words(
        console,
        f"The loss falls fastest at a learning rate of {search.suggestion:.2g}, a good first "
        f"peak value for {', '.join(search.fields)}.",
    )
    return 0


def loss_table(search: LearningRateSearch) -> Table:
    """Returns a table of smoothed losses, with a bar for each sampled rate."""
    table = Table("rate", "loss", "", box=None)
    low, high = min(search.smoothed), max(search.smoothed)
    last = len(search.rates) - 1
    # Evenly selected steps, each once if there are fewer than rows.
    steps = sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)})
    steepest = search.rates.index(search.suggestion)
    nearest = min(steps, key=lambda step: abs(step - steepest))
    for step in steps:
        loss = search.smoothed[step]
        share = (loss - low) / (high - low) if high > low else 0.0
        bar = "█" * max(1, round(_BAR_WIDTH * share))
        if step == nearest:
            bar += " ← falls fastest"
        table.add_row(f"{search.rates[step]:.2e}", f"{loss:.4f}", bar)
    return table
