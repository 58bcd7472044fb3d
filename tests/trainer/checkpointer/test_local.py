"""Local checkpoints, on which host and in which run they count, and what else they meet."""

import errno
import functools
import json
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft.config import config_for_function
from weft.errors import PathNotLocalError, RunDirError, StepIntervalError
from weft.trainer.checkpointer import Checkpointer, every_n_steps_policy, local, manifest


class Iterator:
    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def sharding(*axes):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    return NamedSharding(mesh, PartitionSpec(*axes))


def state_of(step, *axes, position=None):
    """State with values of a step; `position` is that of the iterator, if it is another one."""
    axes = axes or ("data",)
    return {
        "w": jax.device_put(jnp.arange(32.0).reshape(8, 4) + step, sharding(*axes)),
        "half": jax.device_put(jnp.full(8, step, jnp.bfloat16), sharding("model")),
        "everywhere": jax.device_put(jnp.asarray(step), sharding()),
        "key": jax.device_put(jax.random.key(step), sharding()),
        "host": np.full(3, step),
        "empty": jnp.zeros((0, 3)),
        "next_step": step + 1,
        "it": Iterator(step if position is None else position),
    }


def numbers(state):
    state = dict(state, key=jax.random.key_data(state["key"]), it=state["it"].position)
    return jax.tree.map(np.asarray, state)


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "memory"


@pytest.fixture
def start(tmp_path, memory):
    """Begins a start of a run, which has the number 7 unless another one is given."""

    def begin(run=7, **fields):
        cfg = Checkpointer.default_config().set(
            name="checkpointer",
            dir=str(tmp_path / "run" / "checkpoints"),
            save_policy=config_for_function(every_n_steps_policy).set(n=10),
            local_dir=str(memory),
            local_every_n_steps=2,
            **fields,
        )
        checkpointer = cfg.instantiate(parent=None)
        checkpointer.use_local(run)
        return checkpointer

    return begin


def run_until(checkpointer, last, first=1):
    """Runs steps, and ends as a process that is killed some time later."""
    for step in range(first, last + 1):
        is_durable = checkpointer.save(step=step, state=lambda step=step: state_of(step))
        assert is_durable == (step % 10 == 0)
    checkpointer.stop(has_exception=True)


def restored_step(checkpointer, *axes):
    """Restores, and compares all values."""
    step, state = checkpointer.restore(state=state_of(0, *axes, position=-1))
    if step is None:
        return None
    jax.tree.map(np.testing.assert_array_equal, numbers(state), numbers(state_of(step)))
    assert state["w"].sharding == sharding(*(axes or ("data",)))
    assert state["half"].dtype == jnp.bfloat16
    return step


def local_steps(memory):
    return sorted(int(path.name[5:]) for path in memory.glob("*/process_*/step_*"))


def test_start_continues_from_newest_local_checkpoint(start, memory, caplog):
    run_until(start(), 17)
    assert local_steps(memory) == [14, 16]
    with caplog.at_level(logging.INFO):
        checkpointer = start()
        assert restored_step(checkpointer) == 16
    assert "continues from the local checkpoint" in caplog.text
    assert "newest durable one is of step 10" in caplog.text
    # It is not a durable one, which the same step may still become.
    assert checkpointer.save(step=16, state=state_of(16), force=True)
    checkpointer.stop()
    assert local_steps(memory) == []  # the run has ended, and memory is free
    assert Checkpointer.checkpoint_steps(checkpointer.config.dir) == [16]


def test_start_before_first_durable_checkpoint_continues(start):
    run_until(start(), 5)
    assert restored_step(start()) == 4


def test_newer_durable_checkpoint_is_used(start, memory, caplog):
    run_until(start(), 21)
    assert local_steps(memory) == [16, 18]
    assert restored_step(start()) == 20
    assert "No local checkpoint is used: " in caplog.text
    assert "step_00000018 is not newer. The newest durable one is of step 20." in caplog.text
    assert local_steps(memory) == []


def test_checkpoints_of_another_run_are_not_used(start, memory, caplog):
    run_until(start(), 5)
    checkpointer = start(run=8)  # as after --fresh, in the same directory
    assert restored_step(checkpointer) is None
    assert "is of another run. There is no durable one." in caplog.text
    assert local_steps(memory) == []
    run_until(checkpointer, 3)
    assert restored_step(start(run=8)) == 2


def test_run_in_another_directory_leaves_those_of_the_first(start, tmp_path, memory):
    run_until(start(), 5)
    cfg = start().config.clone(dir=str(tmp_path / "other" / "checkpoints"))
    other = cfg.instantiate(parent=None)
    other.use_local(7)
    assert restored_step(other) is None
    other.stop()
    assert local_steps(memory) == [2, 4]


def test_another_number_of_processes_uses_durable_checkpoint(start, memory, caplog):
    run_until(start(), 15)
    (folder,) = memory.glob("*/process_0_of_1")
    folder.rename(folder.with_name("process_0_of_2"))
    assert restored_step(start()) == 10
    assert "are of 2 processes, and there are 1 now" in caplog.text
    assert local_steps(memory) == []


def test_another_layout_uses_durable_checkpoint(start, caplog):
    run_until(start(), 15)
    assert restored_step(start(), None, "model") == 10
    assert "had no shard ((0, 8), (0, 2)) of 'w'; the layout is another one now" in caplog.text


def test_damaged_checkpoint_is_passed_over(start, memory, caplog):
    run_until(start(), 15)
    newest, older = sorted(memory.glob("*/*/step_*"), reverse=True)
    with open(newest / "shards", "r+b") as file:
        file.seek(40)
        file.write(b"damage")
    (newest.parent / "step_00000016.tmp").mkdir()  # half written
    assert restored_step(start()) == 12

    (older / "manifest.json").unlink()
    assert restored_step(start()) == 10
    assert "step_00000014 is damaged: shards: its content has changed" in caplog.text
    assert local_steps(memory) == []


def forge(ckpt_dir, name, change):
    """Changes a JSON file of a checkpoint, or its facts, and writes a manifest that fits."""
    facts = json.loads((ckpt_dir / "manifest.json").read_text(encoding="utf-8"))["facts"]
    if name == "facts":
        change(facts)
    else:  # `change` may return another value
        path = ckpt_dir / name
        content = json.loads(path.read_text(encoding="utf-8"))
        content = change(content) or content
        path.write_text(json.dumps(content), encoding="utf-8")
    (ckpt_dir / "manifest.json").unlink()
    manifest.write_manifest(str(ckpt_dir), facts=facts)


def test_forged_checkpoint_is_passed_over(start, memory, tmp_path, caplog):
    run_until(start(), 15)
    before = shutil.copytree(memory, tmp_path / "before")
    (ckpt_dir,) = memory.glob("*/*/step_00000014")
    shards = json.loads((ckpt_dir / "shards.json").read_text(encoding="utf-8"))
    w = [path for path, _, _ in shards].index("w")

    def set_to(index, value):
        return lambda shards: shards[w].__setitem__(index, value)

    facts = [{key: value} for key in ("after", "start") for value in (None, "x", [], 2**70)]
    facts.append({"after": float("nan")})
    forgeries = [
        ("facts", functools.partial(lambda facts, change: facts.update(change), change=change))
        for change in facts
    ]
    forgeries += [("shards.json", set_to(1, value)) for value in (5, [5], [["a", "b"]])]
    forgeries += [("shards.json", set_to(2, value)) for value in ("nonsense", "object", ["f4"], 5)]
    forgeries += [("shards.json", set_to(0, [])), ("shards.json", lambda _: {"a": 1})]
    for name, change in forgeries:
        forge(ckpt_dir, name, change)
        assert restored_step(start()) == 12, (name, change)
        shutil.rmtree(memory)
        shutil.copytree(before, memory)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_failed_restore_changes_no_object(start, memory):
    checkpointer = start()
    for step in (2, 3, 4):
        state = state_of(step) | {"first": Iterator(step)}
        checkpointer.save(step=step, state=state)
    checkpointer.stop(has_exception=True)
    for path in memory.glob("*/*/step_*"):
        (file,) = path.glob("python/*/it.json")
        forge(path, file.relative_to(path), lambda content: {"state": {}})
    state = state_of(0) | {"first": Iterator(-1)}
    assert start().restore(state=state)[0] is None
    assert state["first"].position == -1


def test_damaged_state_of_a_policy_is_passed_over(start, memory):
    run_until(start(), 15)
    (ckpt_dir,) = memory.glob("*/*/step_00000014")
    (ckpt_dir / "save_policy.json").write_text("[]", encoding="utf-8")
    forge(ckpt_dir, "facts", lambda facts: None)
    assert restored_step(start()) == 12


@pytest.mark.parametrize("place", ["*/process_0_of_1", "*/process_0_of_1/step_00000014"])
def test_fifo_in_memory_is_not_waited_for(start, memory, place):
    run_until(start(), 15)
    (path,) = memory.glob(place)
    shutil.rmtree(path)
    os.mkfifo(path)
    checkpointer = start()
    assert restored_step(checkpointer) == 10
    checkpointer.stop()


def test_files_of_others_in_the_folder_are_no_processes(start, memory, caplog):
    run_until(start(), 5)
    (folder,) = memory.glob("*/process_0_of_1")
    os.mkfifo(folder.with_name("notes"))
    shutil.rmtree(folder)
    assert restored_step(start()) is None
    assert "there is none in" in caplog.text


def test_step_too_large_to_exchange_is_ignored(start, memory):
    run_until(start(), 15)
    (path,) = memory.glob("*/*/step_00000014")
    path.with_name(f"step_{2**70}").mkdir()
    assert restored_step(start()) == 14


def test_damaged_durable_checkpoint_does_not_matter(start, tmp_path):
    run_until(start(), 15)
    for path in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        path.write_text("{", encoding="utf-8")
    assert restored_step(start()) == 14


def test_removed_durable_checkpoint_takes_the_local_one_along(start, caplog):
    run_until(start(keep_last_n=2, asynchronous=False), 25)
    shutil.rmtree(start().ckpt_dir(20))  # to go back to step 10
    assert restored_step(start()) == 10
    assert "later than the durable checkpoint of step 20, which was removed" in caplog.text


def test_full_memory_is_reported_once_and_training_continues(start, memory, caplog, monkeypatch):
    checkpointer = start()

    def fail(values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in range(1, 4):
        checkpointer.save(step=step, state=state_of(step))
    checkpointer._local._finish()
    with monkeypatch.context() as patch:
        patch.setattr(local, "_bytes_of", fail)
        for step in range(4, 10):
            checkpointer.save(step=step, state=state_of(step))
        checkpointer.save(step=10, state=state_of(10))
        checkpointer.wait_until_finished()
        checkpointer._local._finish()
    (message,) = [r.getMessage() for r in caplog.records if "could not be saved" in r.getMessage()]
    assert "local checkpoint of step 4" in message and "No space left" in message
    assert "room for two of them" in message
    assert local_steps(memory) == [2]
    run_until(checkpointer, 13, first=11)
    assert local_steps(memory) == [2, 12]
    assert restored_step(start()) == 12


def test_other_failure_ends_local_checkpoints(start, memory, caplog):
    memory.write_text("a file", encoding="utf-8")
    checkpointer = start()
    assert restored_step(checkpointer) is None
    run_until(checkpointer, 13)
    (message,) = [r.getMessage() for r in caplog.records if "could not be saved" in r.getMessage()]
    assert "local checkpoint of step 2" in message and "There are none from here on" in message
    assert restored_step(start()) == 10


def test_folder_of_another_user_is_not_read(start, caplog, monkeypatch):
    run_until(start(), 15)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert restored_step(start()) == 10
    assert "is of another user" in caplog.text


def test_rewind_goes_to_durable_checkpoint(start, memory):
    checkpointer = start()
    assert restored_step(checkpointer) is None
    for step in range(1, 17):
        checkpointer.save(step=step, state=state_of(step))
    assert restored_step(checkpointer) == 10
    assert local_steps(memory) == []  # those of the course that was left
    checkpointer.stop(has_exception=True)
    assert restored_step(start()) == 10


def test_without_a_run_there_are_none(tmp_path, memory):
    cfg = Checkpointer.default_config().set(
        name="checkpointer",
        dir=str(tmp_path / "checkpoints"),
        save_policy=config_for_function(every_n_steps_policy).set(n=10),
        local_dir=str(memory),
        local_every_n_steps=1,
    )
    with cfg.instantiate(parent=None) as checkpointer:
        checkpointer.save(step=1, state=state_of(1))
    assert not memory.exists()


def test_fields_are_checked(start):
    cfg = start().config
    with pytest.raises(StepIntervalError, match="local_every_n_steps"):
        cfg.clone(local_every_n_steps=0).instantiate(parent=None)
    with pytest.raises(PathNotLocalError, match="local_dir"):
        cfg.clone(local_dir="gs://bucket").instantiate(parent=None)
    for name in ("", "local"):
        with pytest.raises(RunDirError, match=r"local_dir=.* has the durable checkpoints"):
            cfg.clone(local_dir=os.path.join(cfg.dir, name)).instantiate(parent=None)
    cfg.clone(local_dir=f"{cfg.dir}.local").instantiate(parent=None)
