"""The performance page matches the committed results."""

import pytest

from benchmarks.frame import headline, naming, page, results, short, table
from benchmarks.frame.results import Answer
from benchmarks.harness import Curve, counted, row

HERE = {
    "date": "2026-01-02", "weft": "1", "jax": "2", "python": "3.11", "flax": "4", "equinox": None,
    "machine": "x86_64", "cpus": 2, "memory": "1 GiB", "devices": "1 × cpu",
}  # fmt: skip
SLOW = row("a | b, Weft / raw", ([2.0] * 15, [1.0], [1.0]), at_most=1.0, why="The floor is 2.")
CURVE = Curve(
    "by_depth",
    "Depth",
    "layers",
    "ms",
    {"Weft": [(1, 1.0), (2, 2.0)]},
    ["Weft: linear"],
    {"Weft": [(1, 0.9, 1.0, 1.1), (2, 0.8, 1.0, 1.2)]},
)


def shown(**answers):
    text = f"Before.\n\n{page.BEGIN}\nold\n{page.END}\n\nAfter.\n"
    return page.updated(text, answers)


def test_page_matches_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.updated_front(text, results.load()) == text, "python -m benchmarks --page"
    text = page.RESULTS_PAGE.read_text(encoding="utf-8")
    assert page.updated(text, results.load()) == text, "python -m benchmarks --page"


def test_first_page_has_ten_numbers():
    assert len(list(headline.lines(results.load()))) == 10


def test_first_page_shows_the_range_over_ways_to_write():
    rows = [
        row("trace 24 layers, Weft Linen / raw", ([1.5] * 15, [1.0], [1.0]), at_most=None),
        row("trace 24 layers, Weft NNX / raw", ([1.25] * 15, [1.0], [1.0]), at_most=None),
        row("trace 24 layers, Haiku / raw", ([2.0] * 15, [1.0], [1.0]), at_most=None),
    ]
    shown_lines = list(headline.lines({"tracing": Answer("How fast?", HERE, rows)}))
    assert shown_lines == [("Tracing 24 layers", "1.25–1.5", "", "", "2")]


def test_every_target_is_met_or_explained():
    rows = [row for answer in results.load().values() for row in answer.rows]
    assert [row.question for row in rows if table.verdict(row) == "missed"] == []
    assert [row.question for row in rows if row.at_most is not None and 1 < row.pairs < 15] == []


def test_handwritten_text_is_preserved():
    text = shown(dispatch=Answer("How fast?", HERE, [SLOW]))
    assert text.startswith("Before.\n\n<!--") and text.endswith("-->\n\nAfter.\n")
    assert "old" not in text


def test_missed_target_is_explained_below_its_row():
    text = shown(dispatch=Answer("How fast?", HERE, [SLOW], [CURVE]))
    assert "### dispatch\n\nHow fast?\n" in text
    assert (
        r"| a \| b, Weft / raw | 2 | 2 … 2 | 15 | ≤ 1 | explained [1] | 1 s against 1 s |" in text
    )
    assert "- [1] The floor is 2.\n" in text
    assert "![Depth](performance/by_depth.svg)\n\nDepth:\n\n- Weft: linear\n" in text


@pytest.mark.parametrize(
    "question, subject, name",
    [
        ("dispatch, 8 arrays, Weft NNX / raw", "dispatch, 8 arrays / raw", "Weft NNX"),
        ("a call, Flax NNX, tree mode / raw", "a call / raw", "Flax NNX, tree mode"),
        ("in a jit, raw JAX / raw", "in a jit / raw", "raw JAX"),
        ("a scan of 48 / 12 layers, Haiku", "a scan of 48 / 12 layers", "Haiku"),
        ("import weft.nnx / import jax", "import weft.nnx / import jax", "Weft"),
        ("size of weft and its needs / of jax's", "size of weft and its needs / of jax's", "Weft"),
    ],
)
def test_library_is_parsed_from_row_name(question, subject, name):
    assert naming.library(question) == (subject, name)
    assert naming.family(name) in naming.FAMILIES


def test_overview_has_one_row_per_question_with_target():
    rows = [
        row("a call, Weft Linen / raw", ([0.5] * 15, [1.0], [1.0]), at_most=1.0),
        row("a call, Weft NNX / raw", ([2.0] * 15, [1.0], [1.0]), at_most=1.5, why="So it is."),
        row("a call, Flax NNX / raw", ([9.0] * 15, [1.0], [1.0]), at_most=None),
        row("a call, raw JAX on slots / raw", ([1.1] * 15, [1.0], [1.0]), at_most=None),
        row("without a target, Weft NNX / raw", ([9.0] * 15, [1.0], [1.0]), at_most=None),
        counted("traces", 0, at_most=0),
    ]
    assert list(short.lines({"dispatch": Answer("How fast?", HERE, rows)})) == [
        ("a call / raw", "≤ 1 or ≤ 1.5", "Linen 0.5 · NNX 2", "NNX 9", "", "", "on slots 1.1",
         "NNX explained [1]"),
        ("traces", "≤ 0", "0", "", "", "", "", "met"),
    ]  # fmt: skip


def test_machine_is_stated_once_unless_it_differs():
    same = shown(a=Answer("A?", HERE, [SLOW]), b=Answer("B?", HERE, [SLOW]))
    assert same.count("x86_64") == 1
    assert "Weft 1, JAX 2, Python 3.11, Flax 4 · x86_64; 2 CPUs, 1 GiB" in same
    assert "Not installed, so left out: Equinox, Haiku." in same
    apart = shown(a=Answer("A?", HERE, [SLOW]), b=Answer("B?", {**HERE, "cpus": 8}, [SLOW]))
    assert "2026-01-02 · Not installed, so left out: Equinox, Haiku. (b)" in apart


def test_answers_round_trip(tmp_path):
    answers = {"dispatch": Answer("How fast?", HERE, [SLOW, counted("n", 1, at_most=1)], [CURVE])}
    results.save(answers, tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == answers
    assert results.load(tmp_path / "none.json") == {}


def test_invalid_answer_type_is_rejected():
    assert Answer.of("?", HERE, [SLOW, CURVE]).curves == [CURVE]
    with pytest.raises(TypeError, match=r"run\(\) returned 3 in its list; only Row and Curve"):
        Answer.of("?", HERE, [SLOW, 3])
