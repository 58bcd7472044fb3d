"""The report of a run, read as a browser would: from the files in its directory to one page."""

import json
import re
from html.parser import HTMLParser

import pytest

from weft.cli.report import named, page, read_curves, render_report, write_report
from weft.trainer.run_dir import CONFIG_FILE, update_record
from weft.trainer.summary_writer.files import JSON_LINES_FILE


def write_lines(directory, reporter, lines):
    folder = directory / "summaries" / reporter
    folder.mkdir(parents=True)
    text = "".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines)
    (folder / JSON_LINES_FILE).write_text(text)


@pytest.fixture
def run_dir(tmp_path):
    train = [{"step": s, "values": {"loss": 5.0 / s, "model/rate": 0.1}} for s in range(1, 101)]
    write_lines(tmp_path, "train_train", train)
    evals = [
        {"step": s, "values": {"model/loss": 2.0, "model/bits_per_byte": 2.9}} for s in (50, 100)
    ]
    write_lines(tmp_path, "held_out", evals)
    (tmp_path / CONFIG_FILE).write_text("Trainer.Config(\n    note='<&>',\n)\n")
    update_record(
        str(tmp_path),
        baselines={"bigram": {"nats_per_token": 2.4, "bits_per_byte": 3.5}},
        samples=[{"step": 100, "prompt": "def ", "text": "f(x): <b>no</b>"}],
        starts=[{"time": "2030-01-01T00:00:00+00:00", "devices": "2 × cpu", "jax": "9.9"}],
        corpora={"input.source.corpus": {"name": "stdlib", "sha256": "abc"}},
        end={"step": 100, "reason": "max_step"},
        model={"parameters": 12_345},
    )
    return tmp_path


class Page(HTMLParser):
    """Collects the text of a page, and whatever would be fetched from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.text, self.fetched, self.open = "", [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for name, v in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        self.text += data


def test_page_describes_run_and_is_self_contained(run_dir):
    path = write_report(str(run_dir))
    assert path == run_dir / "report.html"
    source = path.read_text()
    page = Page(source)
    assert page.open == [] and page.fetched == [] and "url(" not in source
    for part in (
        "100 steps, finished",
        "12,345 parameters",
        "2 × cpu",
        "held_out",
        "2.900",
        "bigram",
        "3.500",
        "note='<&>'",
        "f(x): <b>no</b>",
        "abc",
        "9.9",
        "model/rate",
    ):
        assert part in page.text, part


def test_page_has_dark_mode_and_line_styles(run_dir):
    source = render_report(str(run_dir))
    assert "prefers-color-scheme: dark" in source
    lines = ["train, averaged", "held_out"]
    for style, name in enumerate(lines):
        assert f'<li class="series-{style}">{name}</li>' in source
        assert f".series-{style}" in source


def test_curves_are_by_reporter_and_path(run_dir):
    curves = read_curves(str(run_dir))
    assert curves["held_out"]["model/loss"] == [(50, 2.0), (100, 2.0)]
    assert len(curves["train_train"]["loss"]) == 100


def test_run_without_summaries_has_a_page(tmp_path):
    page = Page(render_report(str(tmp_path)))
    assert "No summaries were written yet." in page.text and page.open == []


def test_non_numeric_values_are_omitted(tmp_path):
    write_lines(
        tmp_path,
        "train_train",
        [
            {"step": 1, "values": {"loss": 2.0, "note": "text"}},
            {"step": 2, "values": {"loss": "nan"}},
        ],
    )
    page = render_report(str(tmp_path))
    assert not re.search(r"\bnan\b", page) and "2.000" in page


def test_stopped_run_is_reported(tmp_path):
    update_record(str(tmp_path), end={"step": 7, "reason": "SIGTERM"})
    assert "7 steps, stopped by SIGTERM" in Page(render_report(str(tmp_path))).text


def test_shallowest_name_is_used():
    assert named({"a/b/loss": 1, "a/loss": 2, "xloss": 3}, "loss") == 2
    assert named({"xloss": 3}, "loss") is None


def test_page_has_no_external_resources():
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

    text = page("a <b> & c", "<p>body</p>")
    Reader().feed(text)
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "<p>body</p>" in text
    assert not [tag for tag, attrs in seen if tag == "script" or {"src", "href"} & set(attrs)]
    assert "http" not in text.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in text
