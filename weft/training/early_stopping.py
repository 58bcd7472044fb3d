"""Early stopping when a metric no longer decreases."""

from typing import Any

from weft import struct


class EarlyStopping(struct.PyTreeNode):
    """State that counts how long a metric, where smaller is better, has not improved.

    Attributes:
        min_delta: minimum improvement that counts.
        patience: number of consecutive updates without improvement before the next one stops.
        patience_count: number of updates since the best metric.
        should_stop: whether training should end; stays True.

    Example:
        >>> stopping = EarlyStopping(min_delta=0.1, patience=1)
        >>> for loss in (1.0, 0.5, 0.45, 0.6):
        ...     stopping = stopping.update(loss)
        ...     print(stopping.best_metric, stopping.has_improved, stopping.should_stop)
        1.0 True False
        0.5 True False
        0.5 False False
        0.5 False True
    """

    min_delta: float = 0
    patience: int = 0
    best_metric: float = float("inf")
    patience_count: int = 0
    should_stop: bool = False
    has_improved: bool = False

    def reset(self) -> "EarlyStopping":
        """Returns the state before the first update."""
        return EarlyStopping(min_delta=self.min_delta, patience=self.patience)

    def update(self, metric: Any) -> "EarlyStopping":
        """Returns the state after an evaluation with a scalar metric; NaN is not an improvement."""
        if self.best_metric - metric > self.min_delta:
            return self.replace(best_metric=metric, patience_count=0, has_improved=True)
        return self.replace(
            patience_count=self.patience_count + 1,
            should_stop=self.should_stop or self.patience_count >= self.patience,
            has_improved=False,
        )
