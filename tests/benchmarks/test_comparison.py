import re

import pytest

from benchmarks.frame.comparison import compare
from benchmarks.frame.results import Answer
from benchmarks.harness import Curve, counted, row

HERE = {"machine": "x", "cpus": 2, "memory": "1 GiB", "devices": "1 × cpu"}


def line(question, *ratios):
    return row(question, (list(ratios), [1.0], [1.0]), at_most=1.0)


def answer(*rows, **place):
    return {"dispatch": Answer("How fast?", {**HERE, **place}, list(rows))}


def report(before, after):
    return list(compare(before, after).lines())


def test_changes_beyond_noise_are_reported_with_both_numbers():
    before = answer(line("a", 1.0, 1.1, 1.2), line("b", 2.0, 2.1, 2.2), line("c", 1.0, 1.5, 2.0))
    after = answer(line("a", 0.5, 0.6, 0.7), line("b", 3.0, 3.1, 3.2), line("c", 1.0, 1.8, 2.2))
    assert report(before, after) == [
        "Compared with the last commit: 2 of 3 lines moved beyond noise.",
        "worse: b: 2.1 (2.05 … 2.15) -> 3.1 (3.05 … 3.15)",
        "better: a: 1.1 (1.05 … 1.15) -> 0.6 (0.55 … 0.65)",
    ]


def grown(*ratios, **more):
    """Returns a curve of one library, at 1, 10, 100 … by its ratios to raw JAX: low, median and
    high.
    """
    beside = [(10**i, *of) for i, of in enumerate(ratios)]
    points = [(x, median) for x, _, median, _ in beside]
    curve = Curve("calls", "Calls", "arrays", "µs", {"Weft": points}, [], {"Weft": beside})
    return {"growth": Answer("How?", {**HERE, **more}, [], [curve])}


def test_changed_curve_is_reported_at_its_last_point():
    flat = [(0.9, 1.0, 1.1)] * 4
    assert report(grown(*flat), grown(*flat)) == [
        "Compared with the last commit: 0 of 1 lines moved beyond noise."
    ]
    steep = grown(*flat[:2], (1.2, 1.4, 1.9), (2.9, 3.0, 3.4))
    assert report(grown(*flat), steep) == [
        "Compared with the last commit: 1 of 1 lines moved beyond noise.",
        "worse: Calls, Weft at 1,000: 1 (0.9 … 1.1) -> 3 (2.9 … 3.4)",
    ]
    assert report(steep, grown(*flat))[1].startswith("better: Calls, Weft at 1,000: 3 (2.9 … 3.4)")


@pytest.mark.parametrize(
    "after",
    [
        [(1.2, 1.3, 1.4), (1.2, 1.3, 1.4), (0.9, 1.0, 1.1), (0.9, 1.0, 1.1)],  # not where it grows
        [(0.9, 1.0, 1.1)] * 3 + [(1.5, 1.6, 1.7)],  # one point
        [(0.9, 1.0, 1.1)] * 2 + [(0.95, 1.3, 1.9)] * 2,  # ratios that overlap
        [(0.9, 1.0, 1.1)] * 2 + [(1.2, 1.3, 1.4), (0.7, 0.8, 0.85)],  # up and down
        [(0.9, 1.0, 1.1)] * 2 + [(1.001, 1.04, 1.05)] * 2,  # less than 5 %
    ],
    ids=["below", "one", "overlap", "both ways", "little"],
)
def test_curve_within_noise_is_not_reported(after):
    before = [(0.9, 1.0, 1.0)] * 4
    assert not compare(grown(*before), grown(*after)).moves


def test_curves_are_compared_at_common_points():
    before, after = grown(*[(0.9, 1.0, 1.1)] * 2), grown(*[(1.9, 2.0, 2.1)] * 4)
    assert report(before, after)[1] == "worse: Calls, Weft at 10: 1 (0.9 … 1.1) -> 2 (1.9 … 2.1)"


def test_changes_below_five_percent_are_ignored():
    before = answer(line("a", 1.0, 1.001, 1.002))
    assert not compare(before, answer(line("a", 1.048, 1.049, 1.05))).moves
    assert compare(before, answer(line("a", 1.06, 1.061, 1.062))).moves


def test_counts_have_no_noise_margin():
    before, after = answer(counted("n", 0, at_most=0)), answer(counted("n", 1, at_most=0))
    assert report(before, after)[1] == "worse: n: 0 (counted) -> 1 (counted)"
    assert not compare(after, after).moves


def test_new_and_removed_lines_and_machine_change_are_reported():
    before = answer(line("a", 1.0, 1.0), line("old", 1.0, 1.0))
    after = answer(line("a", 1.0, 1.0), line("new", 1.0, 1.0), cpus=8)
    assert report(before, after) == [
        "Compared with the last commit: 0 of 1 lines moved beyond noise.",
        "There, another machine answered: dispatch.",
        "new: new",
        "gone: old",
    ]


def test_only_measured_questions_are_compared():
    before = answer(line("a", 1.0, 1.0)) | {"depth": Answer("", HERE, [line("d", 1.0, 1.0)])}
    assert report(before, answer(line("a", 1.0, 1.0))) == [
        "Compared with the last commit: 0 of 1 lines moved beyond noise."
    ]


def test_missing_previous_results_are_reported():
    assert re.search("Nothing of this was committed", report({}, answer(line("a", 1.0, 1.0)))[0])
