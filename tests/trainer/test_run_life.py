import json
import signal
import urllib.request

import pytest

from tests.sockets import connected, reading
from weft.errors import ProcessesNotReadyError
from weft.recipes.lm import lm_tiny
from weft.trainer.companions import Companions, Wish, in_company
from weft.trainer.interruption import StopRun
from weft.trainer.progress import RunListener
from weft.trainer.run_life import run_life, void_later_summaries
from weft.trainer.summary_writer import CheckpointerAction


def test_what_a_run_does_is_on_its_page_until_it_is_asked_to_stop(tmp_path, caplog):
    cfg = lm_tiny().set(dir=str(tmp_path), status_port=0)
    with run_life(cfg, None) as (stop, listener):
        assert isinstance(listener, RunListener)
        stop.doing("running step 7")
        url = caplog.messages[-1].split()[-1]
        with urllib.request.urlopen(f"{url}json", timeout=10) as answer:
            assert json.load(answer)["doing"] == "running step 7"
        signal.raise_signal(signal.SIGTERM)
        assert stop.wanted


def test_one_that_does_not_come_to_the_run_is_named_before_anything_waits_for_it(tmp_path):
    cfg = lm_tiny().set(dir=str(tmp_path), readiness_timeout_seconds=0.3)
    here, there = connected()
    reading(there)
    names = {1: "process 1 of 2 (host h, pid 7)"}
    with (
        pytest.raises(ProcessesNotReadyError, match=r"within 0\.3 s: process 1 of 2 .*starting"),
        in_company(Companions(0, {1: here}, names, end_seconds=1e6)),
        run_life(cfg, None),
    ):
        raise AssertionError("the run continues without it")


def test_a_run_that_is_asked_to_stop_before_or_after_its_steps_is_over(tmp_path):
    class Listener(RunListener):
        def on_end(self, step, reason):
            self.ended = (step, reason)

    cfg, listener = lm_tiny().set(dir=str(tmp_path)), Listener()
    with run_life(cfg, listener, lambda: 7):
        raise StopRun(Wish("signal", "SIGTERM"))
    assert listener.ended == (7, "SIGTERM")


def test_all_writers_are_told_where_a_run_goes_on():
    class Reporter:
        def __init__(self):
            self.summary_writer, self.told = self, []

        def log_checkpoint(self, path, *, state, action, step):
            self.told.append((path, action, step))

    reporters = [Reporter(), Reporter()]
    void_later_summaries(reporters, "run/checkpoints", step=4, state={})
    assert [r.told for r in reporters] == [[("run/checkpoints", CheckpointerAction.RESTORE, 4)]] * 2
