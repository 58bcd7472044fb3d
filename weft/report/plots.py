"""Draws results of runs with Matplotlib, which the extra `viz` installs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weft import errors
from weft._lazy import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL_WIDTH, _PANEL_HEIGHT = 4.5, 3.2  # inches
_MAX_COLUMNS = 3


def history_figure(
    train: Mapping[str, np.ndarray], validation: Mapping[str, np.ndarray]
) -> "Figure":
    """Draws values by step, in a panel for each name.

    Args:
        train: the "step" of each value and columns of values, of shape (steps,).
        validation: the same of the evaluations; may be empty.

    Columns of arrays, such as confusion matrices, are left out.

    Raises:
        MissingExtraError: if Matplotlib is not installed.
    """
    names: list[str] = []
    for columns in (train, validation):
        for name, column in columns.items():
            is_drawn = name != "step" and column.ndim == 1
            if is_drawn and name not in names:
                names.append(name)
    names.sort(key=_panel_order)
    num_columns = max(1, min(len(names), _MAX_COLUMNS))
    num_rows = max(1, -(-len(names) // num_columns))
    figure = _new_figure(num_columns * _PANEL_WIDTH, num_rows * _PANEL_HEIGHT)
    for index, name in enumerate(names):
        axes = figure.add_subplot(num_rows, num_columns, index + 1)
        if name in train:
            axes.plot(train["step"], train[name], label="train", linewidth=1)
        if name in validation:
            axes.plot(
                validation["step"],
                validation[name],
                label="validation",
                marker="o",
                markersize=4,
            )
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if validation:
            axes.legend()
    return figure


def _panel_order(name: str) -> int:
    """Sorts the loss before the metrics, and the learning rate after them."""
    return {"loss": 0, "learning_rate": 2}.get(name, 1)


def confusion_figure(
    matrix: np.ndarray, names: Sequence[str] | None = None
) -> "Figure":
    """Draws a confusion matrix with its counts.

    Args:
        matrix: counts of shape (classes, classes); rows are true classes, columns predicted ones.
        names: names of the classes; their numbers if None.

    Raises:
        MissingExtraError: if Matplotlib is not installed.
        ArgumentValueError: if there are not as many names as classes.
    """
    num_classes = len(matrix)
    if names is None:
        names = [str(index) for index in range(num_classes)]
    if len(names) != num_classes:
        raise errors.ArgumentValueError(
            f"names has {len(names)} names for {num_classes} classes; give one for each class."
        )
    side = max(3.5, 0.45 * num_classes + 1.5)
    figure = _new_figure(side, side)
    axes = figure.add_subplot()
    # Rows add up to 1, so that a rare class is as visible as a frequent one.
    totals = np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    shares = matrix / totals
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row in range(num_classes):
        for column in range(num_classes):
            is_dark = shares[row, column] > 0.5
            axes.text(
                column,
                row,
                f"{matrix[row, column]:.0f}",
                ha="center",
                va="center",
                color="white" if is_dark else "black",
            )
    axes.set_xticks(range(num_classes), names)
    axes.set_yticks(range(num_classes), names)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    return figure


def _new_figure(width: float, height: float) -> "Figure":
    matplotlib_figure = import_extra(
        "matplotlib.figure", "viz", needed_by="a plot", package="matplotlib"
    )
    return matplotlib_figure.Figure(
        figsize=(width, height), layout="constrained"
    )
