"""Charts as a reader of the page gets them: XML with the lines where the values are."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.report.charts import (
    Series,
    line_chart,
    smoothed,
    ticks,
)
from weft.report.rendering import environment


def drawn(*args, **kwargs):
    """Returns a chart as the SVG element of a page."""
    chart = line_chart(*args, **kwargs)
    return str(environment().get_template("parts.html").module.svg(chart)).strip()


def elements(svg, tag):
    return [e for e in ET.fromstring(svg).iter() if e.tag == tag]


def test_line_descends_as_values_decrease():
    svg = drawn([Series("held_out", [(0, 4.0), (10, 1.0)], dots=True)], y_title="loss")
    first, last = elements(svg, "circle")
    assert float(first.get("cx")) < float(last.get("cx"))
    assert float(first.get("cy")) < float(last.get("cy"))  # y grows downwards in SVG
    assert [e.text for e in elements(svg, "text") if e.get("class") == "title"] == ["loss", "step"]


def test_values_of_all_lines_are_shown_under_the_pointer():
    lines = [
        Series("each step", [(0, 5.0), (2, 3.0)], faint=True),
        Series("train", [(0, 4.0), (5, 2.0), (10, 1.0)]),
        Series("held_out", [(5, 2.5)], 1, dots=True),
    ]
    svg = drawn(lines, y_title="loss")
    groups = [e for e in ET.fromstring(svg).iter() if e.get("class") == "at"]
    texts = [e.text for group in groups for e in group.iter() if e.tag == "text"]
    assert texts == ["step 0 · train 4", "step 5 · train 2 · held_out 2.5", "step 10 · train 1"]
    rects = [e for group in groups for e in group.iter() if e.tag == "rect"]
    edges = [(float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in rects]
    assert all(after[0] <= before[1] for before, after in pairwise(edges))  # no gaps
    many = drawn([Series("train", [(i, 1.0 + i) for i in range(5000)])], y_title="loss")
    assert len([e for e in ET.fromstring(many).iter() if e.get("class") == "at"]) == 80


def test_lines_and_labels_stay_inside_the_drawing():
    series = Series("loss", [(0, 4.0), (10, 1.0)], dots=True)
    svg = drawn([series], y_title="loss", width=400, height=320)
    assert svg.startswith('<svg viewBox="0 0 400 320"')
    labels = [(float(e.get("x")), float(e.get("y"))) for e in elements(svg, "text")]
    dots = [(float(e.get("cx")), float(e.get("cy"))) for e in elements(svg, "circle")]
    assert all(0 < x < 400 and 0 < y < 320 for x, y in labels + dots)
    assert dots[0][0] < 80 and dots[-1][0] > 320


def test_nonfinite_values_are_omitted_from_the_chart():
    points = [(0, math.nan), (1, 2.0), (2, math.inf), (3, 1.0)]
    svg = drawn([Series("loss", points)], y_title="x")
    assert "nan" not in svg and "inf" not in svg
    empty = drawn([Series("loss", [(0, math.nan)])], y_title="x")
    assert empty.count("<path") == drawn([], y_title="x").count("<path")


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    "values", [(1e-15, 2e-15), (1e308, -1e308), (5e-324, -5e-324), (0.0, 1e-310), (3e38, 1.0)]
)
def test_values_of_any_size_are_drawn_or_omitted(values, is_log):
    points = [(0, values[0]), (2**53, values[1])]
    levels = {"not a number": math.nan, "infinite": math.inf, "last": values[1]}
    svg = drawn([Series("s", points)], y_title="y", levels=levels, is_log=is_log)
    assert "nan" not in svg and "inf" not in svg
    if values == (1e-15, 2e-15):
        assert ">2e-15<" in svg  # a tick


@settings(deadline=None, max_examples=50)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_ticks_enclose_values_and_match_requested_count(low, spread, about):
    found = ticks(low, low + spread, about)
    slack = 1e-6 * max(abs(low), spread)
    assert found[0] <= low + slack and found[-1] >= low + spread - slack
    assert 2 <= len(found) <= about + 3


def test_smoothing_removes_noise_keeps_trend():
    points = [(i, 100.0 - i + (-1) ** i) for i in range(100)]
    smooth = [y for _, y in smoothed(points)]
    assert all(a > b for a, b in pairwise(smooth[5:]))
    assert abs(smooth[-1] - 1.0) < 6
    assert smoothed(points[:8]) == points[:8]  # too few to average
