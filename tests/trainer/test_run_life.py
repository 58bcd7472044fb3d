import json
import signal
import urllib.request

from weft.recipes.lm import lm_tiny
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


def test_all_writers_are_told_where_a_run_goes_on():
    class Reporter:
        def __init__(self):
            self.summary_writer, self.told = self, []

        def log_checkpoint(self, path, *, state, action, step):
            self.told.append((path, action, step))

    reporters = [Reporter(), Reporter()]
    void_later_summaries(reporters, "run/checkpoints", step=4, state={})
    assert [r.told for r in reporters] == [[("run/checkpoints", CheckpointerAction.RESTORE, 4)]] * 2
