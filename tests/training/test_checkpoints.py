import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.flags import xla_flags
from weft.errors import (
    AlreadyExistsError,
    CheckpointStepError,
    InvalidCheckpointError,
    MatchingCheckpointNotFoundError,
    StateDictMismatchError,
    UnserializableValueError,
)
from weft.training.checkpoints import (
    available_steps,
    latest_checkpoint,
    natural_sort,
    restore_checkpoint,
    save_checkpoint,
)
from weft.training.train_state import TrainState


def save(path, *steps, **kwargs):
    for step in steps:
        save_checkpoint(path, {"step": step}, step, **kwargs)
    return sorted(os.listdir(path))


def orbax_directory(path, files=("_METADATA",)):
    path.mkdir(parents=True)
    for name in files:
        (path / name).touch()


def test_a_train_state_is_saved_and_restored(tmp_path):
    params = {"w": jnp.arange(3, dtype=jnp.bfloat16), "key": jax.random.key(1)}
    state = TrainState.create(apply_fn=None, params={"w": params["w"]}, tx=optax.adam(0.1))
    moved = state.apply_gradients(grads={"w": jnp.ones(3, jnp.bfloat16)})
    path = save_checkpoint(tmp_path / "new" / "run", moved, moved.step)
    assert path == str(tmp_path / "new" / "run" / "checkpoint_1")
    for back in (restore_checkpoint(path, state), restore_checkpoint(tmp_path / "new/run", state)):
        assert back.step == 1 and back.tx is state.tx
        jax.tree.map(np.testing.assert_array_equal, back, moved)
        assert back.params["w"].dtype == jnp.bfloat16
    assert restore_checkpoint(path, None)["opt_state"]["0"]["count"] == 1
    with pytest.raises(StateDictMismatchError, match="w"):
        restore_checkpoint(path, state.replace(params={"v": params["w"]}))
    path = save_checkpoint(tmp_path, params, 1)
    assert jnp.all(restore_checkpoint(path, params)["key"] == params["key"])


def test_where_there_is_none_the_target_is_returned(tmp_path):
    target = {"w": 1}
    for ckpt_dir in (tmp_path, tmp_path / "missing"):
        assert restore_checkpoint(ckpt_dir, target) is target
        assert latest_checkpoint(ckpt_dir) is None
        assert available_steps(ckpt_dir) == []
        with pytest.raises(
            MatchingCheckpointNotFoundError, match=r"checkpoint_3 in .*; there are none"
        ):
            restore_checkpoint(ckpt_dir, target, step=3)
    save(tmp_path, 1, 20, keep=2)
    assert restore_checkpoint(tmp_path, target={"step": 0}, step=1) == {"step": 1}
    assert restore_checkpoint(tmp_path, target, prefix="other_") is target
    with pytest.raises(ValueError, match=r"checkpoint_3 in .*existing steps: 1, 20\. Use the"):
        restore_checkpoint(tmp_path, target, step=3)


@pytest.mark.parametrize(
    ("kwargs", "left"),
    [
        ({}, [7]),
        ({"keep": 2}, [6, 7]),
        ({"keep": 9}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep": 0}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep": 2, "keep_every_n_steps": 3}, [1, 4, 6, 7]),
    ],
)
def test_old_ones_are_removed(tmp_path, kwargs, left):
    assert save(tmp_path, *range(1, 8), **kwargs) == [f"checkpoint_{step}" for step in left]
    assert available_steps(tmp_path) == left


def test_a_step_is_saved_once_and_in_order_unless_overwritten(tmp_path):
    save(tmp_path, 1, 2, 5, 10, keep=9)
    for step in (10, 3, 10.0):
        with pytest.raises(InvalidCheckpointError, match=rf"step {step} cannot.*`overwrite=True`"):
            save(tmp_path, step)
    save_checkpoint(tmp_path, "again", np.int32(5), overwrite=True, keep=2)
    assert available_steps(tmp_path) == [2, 5]
    assert restore_checkpoint(tmp_path, "") == "again"


def test_arrays_and_directories_go_with_their_checkpoint(tmp_path):
    save(tmp_path, 1)
    orbax_directory(tmp_path / "checkpoint_1_gda", ["w"])
    orbax_directory(tmp_path / "checkpoint_2")
    assert available_steps(tmp_path) == [1, 2]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_2")
    assert save(tmp_path, 2, overwrite=True) == ["checkpoint_2"]
    orbax_directory(tmp_path / "checkpoint_2_gda", ["w"])
    assert save(tmp_path, 2, overwrite=True) == ["checkpoint_2"]
    assert restore_checkpoint(tmp_path, None) == {"step": 2}


def test_directories_of_others_are_not_removed(tmp_path):
    orbax_directory(tmp_path / "checkpoint_2", ["thesis.tex"])
    assert save(tmp_path, 3) == ["checkpoint_2", "checkpoint_3"]
    with pytest.raises(
        AlreadyExistsError, match=r"checkpoint_2' already exists and is not a check"
    ):
        save(tmp_path, 2, overwrite=True)
    assert os.listdir(tmp_path / "checkpoint_2") == ["thesis.tex"]
    assert available_steps(tmp_path) == [2, 3]


def test_steps_are_numbers(tmp_path):
    assert save(tmp_path, -3.0, 1, 2.5, jnp.int32(11), 1e22, keep=9) == [
        "checkpoint_-3.0", "checkpoint_1", "checkpoint_11", "checkpoint_1e+22", "checkpoint_2.5"
    ]  # fmt: skip
    assert available_steps(tmp_path, step_type=float) == [-3.0, 1.0, 2.5, 11.0, 1e22]
    assert restore_checkpoint(tmp_path, None, step=2.5) == {"step": 2.5}
    with pytest.raises(CheckpointStepError, match=r"checkpoint_2.5' is 2.5.*`step_type=float`"):
        available_steps(tmp_path)
    for step in ("3", None, True, float("nan")):
        with pytest.raises(CheckpointStepError, match=rf"the step is {step!r}; expected a finite"):
            save(tmp_path, step)


def test_names_are_the_prefix_and_the_step_and_nothing_else(tmp_path):
    save(tmp_path, 9, 10, prefix="net_", keep=2)
    save(tmp_path, 20, prefix="net_ema_")
    for name in (
        "net_11tmp",
        "net_tmp",
        "net_12.orbax-checkpoint-tmp-3",
        "net_10_gda",
        "my_net_30",
    ):
        (tmp_path / name).touch()
    assert available_steps(tmp_path, "net_") == [9, 10]
    assert latest_checkpoint(tmp_path, "net_") == str(tmp_path / "net_10")
    save(tmp_path / "a", 1, 2, prefix="b/c_")
    assert available_steps(tmp_path / "a", "b/c_") == [2]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    save(tmp_path, 1)
    with pytest.raises(UnserializableValueError, match="object"):
        save_checkpoint(tmp_path, {"x": object()}, 2)

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["checkpoint_1"]


def test_numbers_within_names_are_sorted_as_such():
    names = ["a10", "a2", "a-3", "a1.5", "a1e3", "b1", "a-12"]
    assert natural_sort(names) == ["a-12", "a-3", "a1.5", "a2", "a10", "a1e3", "b1"]
    assert natural_sort(["a10", "a2", "a-3", "a-12"], signed=False) == ["a2", "a-3", "a10", "a-12"]


PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[3]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from weft.errors import MPACheckpointingRequiredError
from weft.training.checkpoints import restore_checkpoint, save_checkpoint

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
whole = np.arange(4.0, dtype=np.float32)
spread, copied = (
    jax.make_array_from_callback((4,), NamedSharding(mesh, spec), lambda i: whole[i])
    for spec in (P("data"), P())
)
if jax.process_index() == 0:
    save_checkpoint(sys.argv[1], {"w": copied}, 1)
    np.testing.assert_array_equal(restore_checkpoint(sys.argv[1], None)["w"], whole)
    try:
        save_checkpoint(sys.argv[1], {"w": spread}, 2)
    except MPACheckpointingRequiredError as error:
        print(error)
print("done")
"""


@pytest.mark.long
def test_an_array_of_two_processes_does_not_go_into_one_file(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "XLA_FLAGS": xla_flags(1)}
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*program, str(i)], env=env, **pipes) for i in (0, 1)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all("done" in output for output in outputs), outputs
    assert "step 2 cannot be saved to " in outputs[0]
    assert "checkpoint_2': one of its arrays is spread over several processes" in outputs[0]
    assert os.listdir(tmp_path) == ["checkpoint_1"]


# Several ways to write one directory, which a symbolic link may lead to.
SPELLINGS = ["run", "run/", "run//", "./run", "run/.", "other/../run", "other//..//run//", "link/"]
SPELLINGS += [Path("run"), "{absolute}", "{absolute}//", "", ".", "./", ".//", "~", "~//"]


@pytest.mark.parametrize("prefix", ["checkpoint_", "part/step-", ""])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=repr)
def test_what_is_saved_is_found_however_the_directory_is_written(
    tmp_path, monkeypatch, spelling, prefix
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("run")
    if isinstance(spelling, str):
        spelling = spelling.format(absolute=tmp_path / "run")
    for step in (1, 2, 3):
        path = save_checkpoint(spelling, {"w": np.full(2, step)}, step, prefix, keep=2)
    assert os.path.samefile(path, latest_checkpoint(spelling, prefix))
    for way in (spelling, os.path.realpath(spelling)):
        assert available_steps(way, prefix) == [2, 3]
        assert restore_checkpoint(way, {"w": np.zeros(2)}, prefix=prefix)["w"].tolist() == [3, 3]
        assert restore_checkpoint(way, None, 2, prefix)["w"].tolist() == [2, 2]
    save_checkpoint(spelling, {"w": np.full(2, 7)}, 2, prefix, overwrite=True)
    assert available_steps(spelling, prefix) == [2]
    assert restore_checkpoint(spelling, None, prefix=prefix)["w"].tolist() == [7, 7]
