"""Each fuzzer for a few seconds, always with the same cases; and what runs the fuzzers."""

import logging
import re
import time
import types

import hypothesis.strategies as st
import pytest

from tests.fuzz import error_messages, harness


@pytest.mark.parametrize("name", harness.names())
def test_short_run_passes(name):
    fuzzer = harness.fuzzer(name)
    checked, finding = harness.search(fuzzer, fuzzer.SHORT)
    assert finding is None, finding.text(fuzzer)
    assert checked


def planted(check):
    return types.SimpleNamespace(
        CASES=st.lists(st.integers(0, 100)), check=check, source=lambda case: f"check({case})"
    )


def test_finding_is_shrunk_and_printed():
    def check(case):
        assert sum(case) < 50, "too much"

    _, finding = harness.search(planted(check), 200, seed=3)
    assert finding.case == [50]
    assert finding.text(planted(check)).endswith("\n\ncheck([50])\n")
    assert "# AssertionError: too much" in finding.text(planted(check))


def test_hang_is_a_finding():
    def check(case):
        time.sleep(10 if 7 in case else 0)

    _, finding = harness.search(planted(check), 500, seed=0, seconds_per_case=0.1)
    assert finding.case == [7]
    assert isinstance(finding.error, harness.Hang)


def test_cases_are_determined_by_seed():
    def cases(seed):
        seen = []
        harness.search(planted(lambda case: seen.append(tuple(case))), 20, seed)
        return seen

    assert cases(1) == cases(1) != cases(2)


def test_run_reports_progress(monkeypatch):
    monkeypatch.setattr(harness, "fuzzer", lambda name: planted(lambda case: None))
    cleared, lines = [], []
    # Else later tests would trace and compile again.
    monkeypatch.setattr(harness.jax, "clear_caches", lambda: cleared.append(True))
    assert harness.fuzz("mine", minutes=0.002, seed=5, say=lines.append) is None
    assert len(lines) == 1 and cleared
    assert lines[0].startswith("mine: seeds 5 to ")
    assert lines[0].endswith("no finding")


JUDGED = """
class Wrong(ValueError): ...
def join_error(names): return Wrong(", ".join(names))
def log_it(x): log.warning("%s", x.shape)
def of_raise(x): raise Wrong(f"{x.shape} is wrong")
def of_builder(x): raise join_error(x)
def of_block(x):
    if x:
        shape = x.shape
        raise Wrong(f"{shape} is wrong")
def of_handler(x):
    try:
        x[5]
    except IndexError as error:
        raise Wrong(x.shape) from error
def of_private(x): return x._own
def of_assert(x): assert x is None
def of_own_name(x): return unknown
def of_loop(x): return of_loop(x)
def on_purpose(x): raise Wrong("a message")
def of_user(x):
    if x:
        return x.shape
    raise Wrong("a message")
def of_checked(x):
    if x:
        on_purpose(x)
        return None
    raise Wrong("a message")
"""


@pytest.mark.parametrize("name", re.findall(r"def (\w+)", JUDGED))
def test_errors_from_inside_of_messages_are_faults(name, tmp_path, monkeypatch):
    file = tmp_path / "judged.py"
    file.write_text(JUDGED, encoding="utf-8")
    monkeypatch.setattr(error_messages, "SOURCE", tmp_path)
    functions = {"log": logging}
    exec(compile(JUDGED, file, "exec"), functions)
    with pytest.raises(Exception) as caught:
        functions[name]([1])
    is_answer = name in ("join_error", "on_purpose", "of_user", "of_checked")
    assert (error_messages.fault(caught.value) is None) == is_answer
