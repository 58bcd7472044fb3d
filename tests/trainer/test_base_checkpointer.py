import pytest

from weft.errors import CheckpointNotFoundError
from weft.trainer.base_checkpointer import BaseCheckpointer


class Listed(BaseCheckpointer):
    """Finds its steps in the names of files, and remembers how it was stopped."""

    @classmethod
    def checkpoint_paths(cls, base_dir):
        return [f"{base_dir}/step_00000002", f"{base_dir}/step_00000010"]

    def stop(self, *, has_exception=False):
        self.stopped = has_exception


def test_steps_are_read_from_paths():
    assert sorted(Listed.checkpoint_steps("runs")) == [2, 10]
    assert Listed.latest_checkpoint_step("runs") == 10
    assert Listed.latest_checkpoint_path("runs") == "runs/step_00000010"


def test_without_a_checkpoint_there_is_no_latest(monkeypatch):
    monkeypatch.setattr(Listed, "checkpoint_paths", classmethod(lambda cls, base_dir: []))
    with pytest.raises(CheckpointNotFoundError, match="runs"):
        Listed.latest_checkpoint_path("runs")


def test_a_block_stops_it_and_tells_it_of_an_exception():
    checkpointer = Listed.default_config().set(name="c", dir="runs").instantiate(parent=None)
    with checkpointer:
        pass
    assert checkpointer.stopped is False
    with pytest.raises(KeyError), checkpointer:
        raise KeyError("x")
    assert checkpointer.stopped is True
