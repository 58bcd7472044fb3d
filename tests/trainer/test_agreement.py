"""What processes of a run have in common, seen from process 1; see also `tests/faults`."""

import importlib
import json

import jax
import pytest

from weft.config import Configurable, Required, config_class, config_for_function
from weft.distributed.peers import StopRequest
from weft.errors import ProcessesDifferError
from weft.trainer.agreement import check_processes_agree, facts
from weft.trainer.run_lock import run_lock


class Run(Configurable):
    """Fake trainer: only the fields of its config are read."""

    @config_class
    class Config(Configurable.Config):
        dir: Required[str]
        input: object = None
        fn: object = None
        status_port: int | None = None


class Meeting:
    """Process 0, as seen from process 1."""

    has_peers = True

    def __init__(self, first):
        self._first = json.dumps(first).encode()

    def from_first(self, data):
        return self._first

    def agreed(self, doing, own):
        return own


@pytest.fixture
def cfg(tmp_path):
    with run_lock(str(tmp_path)):
        yield Run.default_config().set(dir=str(tmp_path), input=Run.default_config())


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Compares with what process 0 had."""

    def compare(first, cfg, **kwargs):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        check_processes_agree(Meeting(first), cfg, lock=None, **kwargs)

    return compare


def first_facts(cfg, **kwargs):
    with run_lock(cfg.dir) as lock:
        return facts(cfg, lock=lock, **kwargs)


def test_settings_of_jax_are_compared(cfg, compare):
    first = first_facts(cfg)
    with (
        jax.enable_x64(True),
        pytest.raises(ProcessesDifferError, match="jax_enable_x64 is True, there False"),
    ):
        compare(first, cfg)


def test_code_of_recipes_and_classes_is_compared(cfg, compare, tmp_path, monkeypatch):
    code = tmp_path / "own_code_of_process.py"
    code.write_text("def model():\n    return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    cfg.fn = config_for_function(importlib.import_module("own_code_of_process").model)
    recipe = {"name": "own.py:recipe", "sha256": "1" * 64, "neighbors": {"a.py": "1" * 64}}
    first = first_facts(cfg, recipe={**recipe, "neighbors": {"a.py": "1" * 64, "b.py": ""}})
    compare(first, cfg, recipe=recipe)
    code.write_text("def model():\n    return 2\n", encoding="utf-8")
    with pytest.raises(ProcessesDifferError) as caught:
        compare(first, cfg, recipe={**recipe, "sha256": "2" * 64, "neighbors": {"a.py": "2" * 64}})
    text = str(caught.value)
    assert f"the source of own_code_of_process is {code} with the SHA-256 " in text
    assert "the recipe is own.py:recipe with the SHA-256 222222222222…, there own.py" in text
    assert "the recipe's module a.py is of the SHA-256 222222222222…, there of the SHA" in text


def test_path_of_the_directory_may_differ_but_not_the_directory(cfg, compare, tmp_path):
    (tmp_path / "mounted").symlink_to(tmp_path, target_is_directory=True)
    first = first_facts(cfg)
    compare(first, cfg.clone(dir=str(tmp_path / "mounted")))
    other = tmp_path / "other"
    with run_lock(str(other)), pytest.raises(ProcessesDifferError, match="is another directory"):
        compare(first, cfg.clone(dir=str(other)))


def test_directory_of_another_machine_is_named(cfg, compare, monkeypatch):
    monkeypatch.setattr("weft.trainer.agreement._SAME_PATH_SECONDS", 0.1)
    first = first_facts(cfg)._replace(lock="the lock on that machine")
    with pytest.raises(ProcessesDifferError, match="on this machine it is another directory"):
        compare(first, cfg)


def test_requests_to_stop_are_left_to_the_run(cfg, compare, monkeypatch):
    monkeypatch.setattr(Meeting, "agreed", lambda *args: StopRequest("signal", "SIGTERM"))
    compare(first_facts(cfg), cfg)


def test_own_port_is_no_difference(cfg, compare):
    compare(first_facts(cfg), cfg.clone(status_port=8080))


def test_many_and_long_differences_are_cut(cfg, compare):
    cfg.fn = {f"key{i}": "x" * 1000 for i in range(9)}
    with pytest.raises(ProcessesDifferError) as caught:
        compare(first_facts(cfg.clone(fn=None)), cfg)
    text = str(caught.value)
    assert text.startswith("process 1 of 2 differs from process 0:\n  fn is absent, there None\n")
    assert "fn['key0'] is 'xxx" in text and "\n  and 5 more\n" in text and len(text) < 3000
