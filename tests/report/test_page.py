"""The report of a run, read as a browser would: from the files in its directory to one page."""

import datetime
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from weft.errors import RunDirError
from weft.report.page import render_report, run_page, write_report
from weft.report.rendering import render
from weft.report.results import Results, config_values, read_results
from weft.trainer.run_dir import CONFIG_FILE, update_record
from weft.trainer.summary_writer.event_file import EventFile, scalar
from weft.trainer.summary_writer.files import JSON_LINES_FILE

START = 1_900_000_000.0


def write_lines(directory, reporter, lines):
    folder = directory / "summaries" / reporter
    folder.mkdir(parents=True)
    text = "".join(json.dumps({"time": START + line["step"], **line}) + "\n" for line in lines)
    (folder / JSON_LINES_FILE).write_text(text, encoding="utf-8")


@pytest.fixture
def run_dir(tmp_path):
    train = [{"step": s, "values": {"loss": 5.0 / s, "model/rate": 0.1}} for s in range(1, 101)]
    write_lines(tmp_path, "train_train", train)
    evals = [
        {"step": s, "values": {"model/loss": 2.0, "model/bits_per_byte": 2.9}} for s in (50, 100)
    ]
    write_lines(tmp_path, "held_out", evals)
    (tmp_path / CONFIG_FILE).write_text("Trainer.Config(\n    note='<&>',\n)\n", encoding="utf-8")
    update_record(
        str(tmp_path),
        baselines={"bigram": {"nats_per_token": 2.4, "bits_per_byte": 3.5}},
        samples=[{"step": 100, "prompt": "def ", "text": "f(x): <b>no</b>"}],
        starts=[{"time": "2030-03-17T17:46:35+00:00", "devices": "2 × cpu", "jax": "9.9"}],
        corpora={"input.source.corpus": {"name": "stdlib", "sha256": "abc"}},
        end={"step": 100, "reason": "max_step"},
        model={"parameters": 12_345, "trained": 45},
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
    source = path.read_text(encoding="utf-8")
    page = Page(source)
    assert page.open == [] and page.fetched == [] and "url(" not in source
    for part in (
        "100 steps, finished",
        "12,345, 45 of them trained",
        "1:45",  # from the start to the last summary
        "1 steps/s",
        "2 × cpu",
        "held_out",
        "50",  # all evaluations
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


def test_curves_of_event_files_void_steps_before_a_restart(tmp_path):
    folder = tmp_path / "summaries" / "train_train"
    for first, last in ((1, 5), (3, 6)):
        file = EventFile(str(folder))
        file.start_session(first)
        for step in range(first, last):
            file.add(scalar("loss", 10.0 * first + step), step)
        file.close()
    with open(file.path, "ab") as running:
        running.write(b"\x10\0\0\0")  # an incomplete record
    results = read_results(str(tmp_path))
    losses = [(1, 11), (2, 12), (3, 33), (4, 34), (5, 35)]
    assert results.curves == {"train_train": {"loss": losses}}
    assert results.last_step == 5 and [step for _, step in results.times] == [1, 2, 3, 4, 5]


def test_config_values_are_by_path():
    text = (
        "a.b.C(\n  n=3,\n  d={'x': D(dim=1), 2: [1, 2]},\n  f=config_for_function(m.f)(k='s'),\n)"
    )
    assert config_values(text) == {
        "n": "3",
        "d.x": "D",
        "d.x.dim": "1",
        "d.2": "[1, 2]",
        "f": "config_for_function(m.f)",
        "f.k": "'s'",
    }
    assert config_values("not <a> config") == {"config": "not <a> config"}


def copied(run_dir, directory, note):
    shutil.copytree(run_dir, directory)
    (directory / CONFIG_FILE).write_text(
        f"Trainer.Config(\n    note='{note}',\n    same=1,\n)\n", encoding="utf-8"
    )
    return str(directory)


def test_runs_are_compared(run_dir):
    a = copied(run_dir, run_dir.parent / "runs" / "wide", "<wide>")
    b = copied(run_dir, run_dir.parent / "runs" / "deep", "<deep>")
    write_lines(Path(b), "again", [{"step": 9, "values": {"loss": 1.25, "f1": 0.5}}])
    source = render_report(a, b)
    page = Page(source)
    assert page.open == [] and page.fetched == []
    found = ("100 steps, finished", "again f1", "1.25", "'<wide>'", "'<deep>'")
    for part in ("wide and deep", *found):
        assert part in page.text, part
    assert "same" not in page.text
    assert '<li class="series-1">deep</li>' in source and 'path class="series-1"' in source
    assert "wide (1)" in render_report(a, a) and "All fields are equal." in render_report(a, a)


def test_other_directories_are_refused(tmp_path):
    with pytest.raises(RunDirError, match=r"is not the directory of a run.*runs/lm"):
        render_report(str(tmp_path))


def test_run_without_summaries_has_a_page(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("Trainer.Config()", encoding="utf-8")
    page = Page(render_report(str(tmp_path)))
    assert "no steps yet" in page.text
    assert "No summaries were written yet." in page.text and page.open == []


def test_stopped_run_is_reported(tmp_path):
    update_record(str(tmp_path), end={"step": 7, "reason": "SIGTERM"})
    assert "7 steps, stopped by SIGTERM" in Page(render_report(str(tmp_path))).text


def test_failed_run_names_its_error(tmp_path):
    update_record(str(tmp_path), end={"step": 7, "reason": "OSError: no <disk>"})
    assert "7 steps, ended by OSError: no <disk>" in Page(render_report(str(tmp_path))).text


HOSTILE = "</title></pre><script>alert(1)</script><b title=\"' onload='x'\">&amp;"


def test_texts_of_a_run_are_not_markup(run_dir):
    """Wherever a stranger's directory has a text, the page shows the same text."""
    strange = run_dir.parent / HOSTILE.replace("/", "∕")
    copied(run_dir, strange, f'"""{HOSTILE}"""')
    record = json.loads((strange / "run.json").read_text(encoding="utf-8"))
    record["baselines"][HOSTILE] = record["baselines"].pop("bigram")
    record["samples"] = [{"step": 100, "prompt": HOSTILE, "text": HOSTILE}]
    record["starts"] = [{HOSTILE: HOSTILE, "time": "2030-03-17T17:46:35+00:00", "jax": HOSTILE}]
    record["corpora"] = {HOSTILE: {"name": HOSTILE, "sha256": HOSTILE, HOSTILE: "x"}}
    record["end"] = {"step": 100, "reason": HOSTILE}
    update_record(str(strange), **record)
    values = {f"model/{HOSTILE.replace('/', '')}": 3.0, "loss": 1.0}
    write_lines(strange, "<i>evaler", [{"step": step, "values": values} for step in (1, 2)])
    for other_runs in ([], [run_dir]):
        plain = Tags(render_report(str(run_dir), *map(str, other_runs)))
        hostile = Tags(render_report(str(strange), *map(str, other_runs)))
        assert set(hostile.seen) <= set(plain.seen) | {("section", "class")}
    text = Page(render_report(str(strange))).text
    assert text.count(HOSTILE) > 10 and "<i>evaler" in text


class Tags(HTMLParser):
    """Collects the elements of a page with the names of their attributes."""

    def __init__(self, page):
        super().__init__()
        self.seen = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, *(name for name, _ in attrs)))


def test_page_has_no_external_resources(run_dir):
    source = render_report(str(run_dir))
    assert "script" not in {tag for tag, *_ in Tags(source).seen}
    assert not {"src", "href"} & {name for _, *names in Tags(source).seen for name in names}
    assert "http" not in source.replace("http-equiv", "")


def test_newest_and_best_evaluations_are_a_table():
    run = Results("run")
    assert run_page(run).highlights is None
    run.curves["held_out"] = {
        "loss": [(1, 3.0), (2, 2.0), (3, 2.5)],
        "accuracy": [(1, 0.5), (2, 0.4), (3, 0.45)],
    }
    newest = ["held_out, newest", "2.500", "0.450", "3"]
    table = run_page(run).highlights
    assert table.head == ["", "loss", "accuracy", "step"]
    assert table.rows == [newest, ["held_out, best loss", "2.000", "0.400", "2"]]
    run.config = (
        "T.Config(checkpointer=C.Config(keep_best=K.Config(mode='max', "
        "metric=EvalMetric(evaler_name='held_out', metric_name='accuracy'))))"
    )
    table = run_page(run).highlights
    assert table.rows == [newest, ["held_out, best accuracy", "3.000", "0.500", "1"]]


def test_report_says_where_the_time_went():
    record = {
        "starts": [{"time": "2030-03-17T17:00:00+00:00"}],
        "times": {
            "until": datetime.datetime(2030, 3, 17, 17, 10, tzinfo=datetime.UTC).timestamp(),
            "seconds": {"steps": 300.0, "lost": 60.0, "restarts": 120.0},
        },
    }
    page = run_page(Results("run", record))
    assert ("goodput", "50.0%") in page.facts.rows
    rows = {title: (time, share) for title, time, share in page.goodput.rows}
    assert rows["steps that count"] == ("5:00", "50.0%")
    assert rows["lost steps"] == ("1:00", "10.0%")
    assert rows["starts and restarts"] == ("2:00", "20.0%")
    assert rows["other"] == ("2:00", "20.0%")
    assert "Where the time went" in render("run.html", title="run", run=page)
    assert run_page(Results("run", {})).goodput is None
