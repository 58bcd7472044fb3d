"""Plots of results, and the errors of those that cannot be drawn."""

import sys

import numpy as np
import pytest

from weft import errors
from weft.report import plots

STEPS = np.array([1, 2, 3])
TRAIN = {
    "step": STEPS,
    "kl": np.array([0.1, 0.2, 0.3]),
    "learning_rate": np.ones(3),
    "loss": np.array([3.0, 2.0, 1.0]),
}
VALIDATION = {
    "step": np.array([2]),
    "loss": np.array([2.5]),
    "accuracy": np.array([0.5]),
    "confusion_matrix": np.ones((1, 2, 2)),
}


def test_history_has_a_panel_for_each_name():
    panels = {axes.get_title(): axes for axes in plots.history_figure(TRAIN, VALIDATION).axes}
    assert list(panels) == ["loss", "kl", "accuracy", "learning_rate"]
    train, validation = panels["loss"].lines
    np.testing.assert_array_equal(train.get_xydata(), [[1, 3], [2, 2], [3, 1]])
    np.testing.assert_array_equal(validation.get_xydata(), [[2, 2.5]])
    assert [text.get_text() for text in panels["loss"].get_legend().get_texts()] == [
        "train",
        "validation",
    ]
    assert len(panels["kl"].lines) == len(panels["accuracy"].lines) == 1


def test_history_without_validation_has_no_legend():
    loss, *_ = plots.history_figure(TRAIN, {}).axes
    assert loss.get_legend() is None and loss.get_title() == "loss"


def test_confusion_matrix_has_counts_by_class():
    matrix = np.array([[3.0, 1.0], [0.0, 0.0]])
    (axes,) = plots.confusion_figure(matrix, ["cat", "dog"]).axes
    counts = {text.get_position(): text.get_text() for text in axes.texts}
    assert counts == {(0, 0): "3", (1, 0): "1", (0, 1): "0", (1, 1): "0"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog"]
    assert axes.get_xlabel() == "predicted" and axes.get_ylabel() == "true"


def test_wrong_number_of_names_is_refused():
    with pytest.raises(errors.ArgumentValueError, match="names has 1 names for 2 classes"):
        plots.confusion_figure(np.eye(2), ["cat"])


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(errors.MissingExtraError, match=r"needs the package matplotlib.*\[viz\]"):
        plots.history_figure(TRAIN, {})
