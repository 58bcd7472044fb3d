"""Result of an evaluation of a language model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TASKS = ("perplexity", "multiple-choice", "exact-match", "pass@k")


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Metrics of a language model on a data set.

    Attributes:
        task: "perplexity", "multiple-choice", "exact-match" or "pass@k".
        metrics: values by name.
        standard_errors: of those metrics that are means over examples.
        num_examples: number of rows, or of documents.
        examples: what the model said of each row, as values of JSON.
    """

    task: str
    metrics: Mapping[str, float]
    standard_errors: Mapping[str, float]
    num_examples: int
    examples: Sequence[Mapping[str, Any]] = dataclasses.field(
        default=(), repr=False
    )

    def as_json(self) -> dict[str, Any]:
        """Returns the result as a value of JSON; numbers that are not finite are null."""
        return {
            "task": self.task,
            "num_examples": self.num_examples,
            "metrics": _finite(self.metrics),
            "standard_errors": _finite(self.standard_errors),
            "examples": [dict(example) for example in self.examples],
        }


def means(values: Mapping[str, Sequence[float]]) -> tuple[dict, dict]:
    """Returns the means of values by name, and their standard errors.

    The error is that of the mean of a sample, `s / sqrt(n)`, with n - 1 degrees of freedom; there
    is none for a single value.

    >>> means({"accuracy": [1.0, 0.0, 1.0, 1.0]})
    ({'accuracy': 0.75}, {'accuracy': 0.25})
    """
    averages: dict[str, float] = {}
    standard_errors: dict[str, float] = {}
    for name, numbers in values.items():
        averages[name] = float(np.mean(numbers))
        if len(numbers) > 1:
            deviation = float(np.std(numbers, ddof=1))
            standard_errors[name] = deviation / math.sqrt(len(numbers))
    return averages, standard_errors


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {
        name: value if math.isfinite(value) else None
        for name, value in values.items()
    }
