import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from weft.config import config_for_function
from weft.errors import (
    CheckpointNotFoundError,
    CheckpointPolicyError,
    CheckpointSaveError,
    DamagedCheckpointError,
    RunDirError,
)
from weft.trainer.checkpointer import (
    AnyPolicy,
    BaseCheckpointer,
    BestMetricPolicy,
    Checkpointer,
    EvalMetric,
    KeepBest,
    drop_learner_optimizer_cfg,
    every_n_steps_policy,
    write_index_file,
)
from weft.trainer.checkpointer import checkpointer as module
from weft.trainer.summary_writer import SummaryWriter


class Listed(BaseCheckpointer):
    """Finds its steps in the names of files, and remembers how it was stopped."""

    @classmethod
    def checkpoint_paths(cls, base_dir):
        return [f"{base_dir}/step_00000002", f"{base_dir}/step_00000010"]

    def stop(self, *, has_exception=False):
        self.stopped = has_exception


def test_context_manager_stops_with_the_exception():
    checkpointer = Listed.default_config().set(name="c", dir="runs").instantiate(parent=None)
    with checkpointer:
        pass
    assert checkpointer.stopped is False
    with pytest.raises(KeyError), checkpointer:
        raise KeyError("x")
    assert checkpointer.stopped is True


class Iterator:
    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(**kwargs):
        cfg = Checkpointer.default_config().set(name="checkpointer", dir=str(tmp_path / "ckpts"))
        made.append(cfg.set(**kwargs).instantiate(parent=None))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.stop()


@pytest.fixture
def removed_once(monkeypatch):
    """Lets a failed save look for late files no more, for failures after all are written."""
    monkeypatch.setattr("weft.trainer.checkpointer.storage._REMOVAL_SECONDS", (0.0,))


def state_of(step):
    return {"w": jnp.full((8, 4), float(step)), "count": step, "it": Iterator(step)}


TARGET: dict[str, Any] = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "count": 0}


def target():
    return {**TARGET, "it": Iterator()}


def save_steps(checkpointer, *steps):
    for step in steps:
        assert checkpointer.save(step=step, state=state_of(step))
    checkpointer.wait_until_finished()


def steps_in(checkpointer):
    return Checkpointer.checkpoint_steps(checkpointer.config.dir)


def check_restored(step, state, expected):
    assert step == expected
    assert float(state["w"][0, 0]) == expected
    assert state["count"] == state["it"].position == expected


# Saving and restoring.


def test_newest_or_requested_step_is_restored(make):
    save_steps(make(keep_last_n=3), 1, 2, 3)
    checkpointer = make()
    check_restored(*checkpointer.restore(state=target()), 3)
    check_restored(*checkpointer.restore(step=2, state=target()), 2)
    assert checkpointer.ckpt_dir(2) == Checkpointer.checkpoint_paths(checkpointer.config.dir)[1]
    assert Checkpointer.latest_checkpoint_step(checkpointer.config.dir) == 3
    assert Checkpointer.latest_checkpoint_path(checkpointer.config.dir) == checkpointer.ckpt_dir(3)


def test_no_checkpoint_returns_the_state(make):
    checkpointer, state = make(), target()
    step, restored = checkpointer.restore(state=state)
    assert step is None
    assert restored is state
    assert not os.path.exists(checkpointer.config.dir)
    assert steps_in(checkpointer) == []
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint in"):
        Checkpointer.latest_checkpoint_step(checkpointer.config.dir)
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint in"):
        checkpointer.restore(step=3, state=state)


def test_missing_step(make):
    checkpointer = make(keep_last_n=2)
    save_steps(checkpointer, 10, 20)
    with pytest.raises(CheckpointNotFoundError, match=r"of step 15 .*There are: 10, 20"):
        checkpointer.restore(step=15, state=target())


def test_policy_applies_unless_forced_and_steps_save_once(make):
    policy = config_for_function(every_n_steps_policy).set(n=2)
    checkpointer = make(save_policy=policy, keep_last_n=9)
    assert not checkpointer.save(step=1, state=state_of(1))
    assert checkpointer.save(step=2, state=state_of(2))
    assert not checkpointer.save(step=2, state=state_of(2), force=True)
    assert checkpointer.save(step=3, state=state_of(3), force=True)
    checkpointer.wait_until_finished()
    assert not checkpointer.save(step=3, state=state_of(3), force=True)
    assert steps_in(checkpointer) == [2, 3]
    again = make(save_policy=policy)
    again.restore(state=target())
    assert not again.save(step=3, state=state_of(3), force=True)


def test_run_continues_with_another_policy(make, caplog):
    best = BestMetricPolicy.default_config().set(metric=EvalMetric("valid", "loss"))
    first = make(save_policy=AnyPolicy.default_config().set(policies=[best]))
    first.save(step=1, state=state_of(1), evaler_summaries={"valid": {"loss": 1.0}}, force=True)
    first.wait_until_finished()
    second = make(save_policy=best)
    assert second.restore(state=target())[0] == 1
    assert "save_policy starts fresh" in caplog.text and "has no 'best'" in caplog.text


def test_policy_gets_evaler_summaries(make):
    policy = BestMetricPolicy.default_config().set(metric=EvalMetric("valid", "accuracy"))
    checkpointer = make(save_policy=policy, keep_last_n=9)
    saved = [
        checkpointer.save(step=i, state=state_of(i), evaler_summaries={"valid": {"accuracy": a}})
        for i, a in enumerate([0.1, 0.5, 0.3, 0.6])
    ]
    assert saved == [True, True, False, True]
    assert not checkpointer.save(step=5, state=state_of(5))
    checkpointer.wait_until_finished()
    # After a restart, the best so far is still known.
    again = make(save_policy=policy, keep_last_n=9)
    assert again.restore(state=target())[0] == 3
    assert not again.save(step=6, state=state_of(6), evaler_summaries={"valid": {"accuracy": 0.55}})


def test_step_that_is_saved_again_is_replaced(make):
    save_steps(make(keep_last_n=2), 1, 2)
    checkpointer = make(keep_last_n=2)
    checkpointer.restore(step=1, state=target())
    checkpointer.save(step=2, state=state_of(2) | {"count": 77})
    checkpointer.wait_until_finished()
    assert steps_in(checkpointer) == [1, 2]
    assert checkpointer.restore(state=target())[1]["count"] == 77
    assert sorted(os.listdir(checkpointer.config.dir)) == ["step_00000001", "step_00000002"]


@pytest.mark.usefixtures("removed_once")
def test_synchronous_save_commits_or_raises(make, monkeypatch):
    checkpointer = make(asynchronous=False)
    for step in (1, 2):
        assert checkpointer.save(step=step, state=state_of(step))
        assert steps_in(checkpointer) == [step]
    with monkeypatch.context() as patch:
        patch.setattr(module.dirs, "commit_dir", lambda path: 1 / 0)
        with pytest.raises(
            CheckpointSaveError, match=r"step 3 .*ZeroDivisionError.*Complete checkpoints: 2\."
        ):
            checkpointer.save(step=3, state=state_of(3))
    assert checkpointer.save(step=3, state=state_of(3))
    assert steps_in(checkpointer) == [3]


class TrainerState(NamedTuple):
    model: Any
    learner: Any


@pytest.mark.parametrize("container", [dict, TrainerState])
def test_state_filter_omits_parts(make, container):
    state = container(model={"w": jnp.ones(2)}, learner={"optimizer": {"mu": jnp.ones(2)}, "n": 4})
    checkpointer = make()
    checkpointer.save(step=1, state=state)
    checkpointer.wait_until_finished()
    new = container(
        model={"w": jnp.zeros(2)}, learner={"optimizer": {"other": jnp.zeros(3)}, "n": 0}
    )
    filtered = make(restore_state_filter=drop_learner_optimizer_cfg())
    _, restored = filtered.restore(state=new)
    restored = restored if container is dict else restored._asdict()
    assert float(restored["model"]["w"][0]) == 1.0
    assert restored["learner"] == {"n": 4}


# Retention.


def test_best_is_kept_while_newest_are_removed(make):
    best = KeepBest.default_config().set(metric=EvalMetric("valid", "loss"), mode="min")
    checkpointer = make(keep_last_n=2, keep_best=best)
    left = []
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 1.5, 0.5, 2.0], 1):
        summaries = {"valid": {"loss": jnp.array(loss)}}
        checkpointer.save(step=step, state=state_of(step), evaler_summaries=summaries)
        checkpointer.wait_until_finished()
        left.append(steps_in(checkpointer))
    assert left[2:] == [[2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7]]
    # A restarted process knows the metric of each checkpoint.
    again = make(keep_last_n=1, keep_best=best)
    again.restore(state=target())
    again.save(step=8, state=state_of(8))
    again.wait_until_finished()
    assert steps_in(again) == [6, 8]


def test_all_rules_together(make, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    best = KeepBest.default_config().set(metric=EvalMetric("valid", "accuracy"), n=2)
    checkpointer = make(
        keep_last_n=1, keep_every_n_steps=40, keep_every_n_seconds=60, keep_best=best
    )
    for step, accuracy in zip(range(10, 101, 10), [0, 1, 2, 9, 3, 4, 8, 5, 6, 7], strict=True):
        now[0] += 25
        summaries = {"valid": {"accuracy": accuracy}}
        checkpointer.save(step=step, state=state_of(step), evaler_summaries=summaries)
    checkpointer.wait_until_finished()
    # By steps 10, 50, 90; by time 10, 40, 70, 100; the best 40 and 70; the last 100.
    assert steps_in(checkpointer) == [10, 40, 50, 70, 90, 100]


def test_garbage_collection_interval(make):
    checkpointer = make(gc_loop_interval_seconds=3600)
    save_steps(checkpointer, 1, 2, 3)
    assert steps_in(checkpointer) == [1, 2, 3]


def test_later_checkpoints_do_not_displace_the_restored(make):
    save_steps(make(keep_last_n=9), 10, 20, 30)
    checkpointer = make(keep_last_n=1)
    checkpointer.restore(step=10, state=target())
    save_steps(checkpointer, 15)
    assert steps_in(checkpointer) == [15, 20, 30]


def test_keeping_none_fails(make):
    with pytest.raises(CheckpointPolicyError, match="checkpointer: keep_last_n=0; expected 1"):
        make(keep_last_n=0)


def test_failed_removal_is_reported(make, monkeypatch, caplog):
    def refuse(path):
        raise PermissionError("not yours")

    monkeypatch.setattr(module.dirs, "remove_dir", refuse)
    checkpointer = make()
    save_steps(checkpointer, 1, 2)
    assert steps_in(checkpointer) == [1, 2]
    assert "step_00000001 cannot be removed: not yours" in caplog.text


# Damage.


def first_file_of(checkpointer, step):
    (path,) = Path(checkpointer.ckpt_dir(step), "arrays", "d").iterdir()
    return path


def overwrite(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


DAMAGE = {
    "flipped byte": lambda c, s: overwrite(first_file_of(c, s), 70, b"\xff"),
    "zeroed block": lambda c, s: overwrite(first_file_of(c, s), 0, bytes(128)),
    "truncated": lambda c, s: os.truncate(first_file_of(c, s), 100),
    "deleted": lambda c, s: os.unlink(first_file_of(c, s)),
    "metadata": lambda c, s: os.unlink(os.path.join(c.ckpt_dir(s), "arrays", "manifest.ocdbt")),
    "index": lambda c, s: overwrite(os.path.join(c.ckpt_dir(s), "index"), 3, b"x"),
    "iterator": lambda c, s: shutil.rmtree(os.path.join(c.ckpt_dir(s), "python")),
    "no manifest": lambda c, s: os.unlink(os.path.join(c.ckpt_dir(s), "manifest.json")),
    "empty manifest": lambda c, s: os.truncate(os.path.join(c.ckpt_dir(s), "manifest.json"), 0),
    "empty directory": lambda c, s: [
        shutil.rmtree(c.ckpt_dir(s)),
        os.mkdir(c.ckpt_dir(s)),
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_named_and_previous_restored(make, damage, caplog):
    saver = make(keep_last_n=3)
    save_steps(saver, 1, 2, 3)
    DAMAGE[damage](saver, 3)
    checkpointer = make(keep_last_n=3)
    with caplog.at_level(logging.WARNING):
        check_restored(*checkpointer.restore(state=target()), 2)
    assert f"The checkpoint {saver.ckpt_dir(3)} (" in caplog.text
    assert "is damaged. Restoring the previous one instead." in caplog.text
    (found,) = checkpointer.damaged_checkpoints
    assert found.path == saver.ckpt_dir(3)
    assert found.damage
    # An explicit request is rejected.
    with pytest.raises(DamagedCheckpointError, match=r"step_00000003 .* Restore another step: 1"):
        checkpointer.restore(step=3, state=target())
    # And when the run gets there again, a whole one takes its place.
    save_steps(checkpointer, 3)
    check_restored(*checkpointer.restore(step=3, state=target()), 3)


def test_all_damaged_raises(make):
    checkpointer = make(keep_last_n=3)
    save_steps(checkpointer, 1, 2)
    for step in (1, 2):
        DAMAGE["flipped byte"](checkpointer, step)
    with pytest.raises(DamagedCheckpointError) as error:
        checkpointer.restore(state=target())
    assert "every checkpoint in" in str(error.value)
    for step in (1, 2):
        name = os.path.relpath(first_file_of(checkpointer, step), checkpointer.ckpt_dir(step))
        assert f"step_0000000{step} ({name}: its content has changed)" in str(error.value)


def test_all_processes_skip_a_checkpoint_damaged_for_one(make, monkeypatch, caplog):
    save_steps(make(keep_last_n=2), 1, 2)
    answers = iter([1, 0, 0])  # of all about step 2, about step 1, about the arrays of step 1
    monkeypatch.setattr(module, "max_over_processes", lambda mine: next(answers))
    check_restored(*make().restore(state=target()), 1)
    assert "step_00000002 (another process found damage" in caplog.text


def test_damaged_one_does_not_count_as_kept(make):
    saver = make(keep_last_n=9)
    save_steps(saver, 1, 2, 3)
    DAMAGE["flipped byte"](saver, 3)
    checkpointer = make(keep_last_n=2)
    check_restored(*checkpointer.restore(state=target()), 2)
    save_steps(checkpointer, 4)
    assert steps_in(checkpointer) == [2, 4]


# Failures.


def test_unwritable_directory(make, tmp_path):
    (tmp_path / "ckpts").write_text("a file is in the way", encoding="utf-8")
    with pytest.raises(
        CheckpointSaveError, match=r"step 1 could not be saved in .*checkpoints: none"
    ):
        make().save(step=1, state=state_of(1))


def test_directory_that_is_not_in_utf8(make, tmp_path):
    name = os.fsdecode("kraków".encode("iso8859-2"))
    with pytest.raises(RunDirError, match="is not in UTF-8"):
        make(dir=str(tmp_path / name)).save(step=1, state=state_of(1))
    assert not list(tmp_path.iterdir())


def test_failure_in_another_process_raises_here(make, monkeypatch):
    checkpointer = make()
    with monkeypatch.context() as patch:
        patch.setattr(module, "broadcast_from_first", lambda mine: 1)
        with pytest.raises(CheckpointSaveError, match=r"process 0 could not make .*_00000001.tmp"):
            checkpointer.save(step=1, state=state_of(1))
    shutil.rmtree(checkpointer.config.dir)
    for worst, lacks_room in ((1, True), (2, False)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "max_over_processes", lambda mine, worst=worst: worst)
            checkpointer.save(step=2, state=state_of(2))
            with pytest.raises(CheckpointSaveError, match="another process could not") as found:
                checkpointer.wait_until_finished()
        assert found.value.lacks_room is lacks_room


@pytest.mark.usefixtures("removed_once")
def test_failed_background_save_raises_and_next_succeeds(make, monkeypatch):
    checkpointer = make(keep_last_n=1)
    save_steps(checkpointer, 1)

    def fail(ckpt_dir, facts):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.manifest, "write_manifest", fail)
        assert checkpointer.save(step=2, state=state_of(2))
        checkpointer._storage._thread.join()
    # It takes no room on the full disk, and existing checkpoints stay.
    assert os.listdir(checkpointer.config.dir) == ["step_00000001"]

    message = r"step 2 could not be saved .*the disk.* is full.*Complete checkpoints: 1\. Free disk"
    with pytest.raises(CheckpointSaveError, match=message):
        checkpointer.save(step=3, state=state_of(3))
    checkpointer.wait_until_finished()
    check_restored(*checkpointer.restore(state=target()), 3)
    assert steps_in(checkpointer) == [3]


@pytest.mark.usefixtures("removed_once")
@pytest.mark.parametrize("has_exception", [False, True])
def test_save_failure_does_not_hide_the_run_exception(make, monkeypatch, caplog, has_exception):
    checkpointer = make()
    monkeypatch.setattr(module.dirs, "commit_dir", lambda path: 1 / 0)
    expected = KeyError if has_exception else CheckpointSaveError
    with pytest.raises(expected) as raised, checkpointer:
        checkpointer.save(step=2, state=state_of(2))
        if has_exception:
            raise KeyError("the run's own")
    assert "step 2 could not be saved" in (caplog.text if has_exception else str(raised.value))


# The contents of a checkpoint, and its listeners.


def index_writer(note):
    def write(ckpt_dir, index):
        write_index_file(ckpt_dir=ckpt_dir, index=index)
        with open(os.path.join(ckpt_dir, "note"), "w", encoding="utf-8") as file:
            file.write(note)

    return write


def test_custom_index_writer(make):
    checkpointer = make(index_writer=config_for_function(index_writer).set(note="hi"))
    save_steps(checkpointer, 4)
    assert "note" in os.listdir(checkpointer.ckpt_dir(4))
    check_restored(*checkpointer.restore(state=target()), 4)


def test_summary_writer_logs_it(make, read_events, tmp_path):
    checkpointer = make(summary_writer=SummaryWriter.default_config())
    save_steps(checkpointer, 4)
    checkpointer.restore(state=target())
    checkpointer.stop()
    names = [name for name in os.listdir(tmp_path / "ckpts") if "tfevents" in name]
    (name,) = names
    saved, restored = read_events(str(tmp_path / "ckpts" / name))[1:]
    assert saved.session_log.checkpoint_path == checkpointer.ckpt_dir(4)
    assert (saved.step, restored.step) == (4, 5)


def test_cleanup(make):
    checkpointer = make(keep_last_n=2)
    save_steps(checkpointer, 1, 2)
    Checkpointer.cleanup_checkpoint(checkpointer.ckpt_dir(1))
    Checkpointer.cleanup_checkpoint(checkpointer.ckpt_dir(1))
    assert steps_in(checkpointer) == [2]


def test_next_save_removes_leftovers_of_killed_processes(make):
    checkpointer = make()
    save_steps(checkpointer, 1)
    shutil.copytree(checkpointer.ckpt_dir(1), checkpointer.ckpt_dir(2) + ".tmp")
    shutil.copytree(checkpointer.ckpt_dir(1), checkpointer.ckpt_dir(7) + ".trash")
    assert make().restore(state=target())[0] == 1
    assert len(os.listdir(checkpointer.config.dir)) == 3
    save_steps(checkpointer, 2)
    assert os.listdir(checkpointer.config.dir) == ["step_00000002"]
