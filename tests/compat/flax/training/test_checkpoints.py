"""Files that `restore_checkpoint` reads besides those of `save_checkpoint`."""

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.flags import xla_flags
from tests.sockets import free_port
from weft.errors import (
    AlreadyExistsError,
    ArgumentValueError,
    CheckpointStepError,
    DamagedCheckpointError,
    InvalidCheckpointError,
    MatchingCheckpointNotFoundError,
    MissingExtraError,
    MPARestoreDataCorruptedError,
    MPARestoreTargetRequiredError,
    StateDictMismatchError,
    UnserializableValueError,
)
from weft.training.checkpoints import (
    AsyncManager,
    available_steps,
    is_orbax,
    latest_checkpoint,
    natural_sort,
    read_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    save_checkpoint_multiprocess,
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


def test_train_state_is_saved_and_restored(tmp_path):
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


def test_target_is_returned_if_no_checkpoint(tmp_path):
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


def test_step_is_saved_once_and_in_order_unless_overwritten(tmp_path):
    save(tmp_path, 1, 2, 5, 10, keep=9)
    for step in (10, 3, 10.0):
        with pytest.raises(InvalidCheckpointError, match=rf"step {step} cannot.*`overwrite=True`"):
            save(tmp_path, step)
    save_checkpoint(tmp_path, "again", np.int32(5), overwrite=True, keep=2)
    assert available_steps(tmp_path) == [2, 5]
    assert restore_checkpoint(tmp_path, "") == "again"


def test_arrays_and_directories_are_removed_with_it(tmp_path):
    save(tmp_path, 1)
    orbax_directory(tmp_path / "checkpoint_1_gda", ["w"])
    orbax_directory(tmp_path / "checkpoint_2")
    assert available_steps(tmp_path) == [1, 2]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_2")
    assert save(tmp_path, 2, overwrite=True) == ["checkpoint_2"]
    orbax_directory(tmp_path / "checkpoint_2_gda", ["w"])
    assert save(tmp_path, 2, overwrite=True) == ["checkpoint_2"]
    assert restore_checkpoint(tmp_path, None) == {"step": 2}


def test_foreign_directories_are_kept(tmp_path):
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


def test_names_must_match_prefix_and_step(tmp_path):
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


def test_failed_save_keeps_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    with pytest.raises(UnserializableValueError, match="object"):
        save_checkpoint(tmp_path, {"x": object()}, 2)

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["checkpoint_1"]


def test_numbers_in_names_sort_numerically():
    names = ["a10", "a2", "a-3", "a1.5", "a1e3", "b1", "a-12"]
    assert natural_sort(names) == ["a-12", "a-3", "a1.5", "a2", "a10", "a1e3", "b1"]
    assert natural_sort(["a10", "a2", "a-3", "a-12"], signed=False) == ["a2", "a-3", "a10", "a-12"]


PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[3]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from weft.errors import MPACheckpointingRequiredError
from jax.experimental.multihost_utils import sync_global_devices
from weft.training.checkpoints import (
    restore_checkpoint, save_checkpoint, save_checkpoint_multiprocess)

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
sync_global_devices("saved by one")
for step in (2, 3):
    save_checkpoint_multiprocess(sys.argv[1], {"w": spread, "n": step}, step, keep=2)
back = restore_checkpoint(sys.argv[1], {"w": spread, "n": 0})
assert back["n"] == 3 and back["w"].sharding == spread.sharding
for shard in back["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index])
print("done")
"""


@pytest.mark.long
def test_arrays_of_several_processes(python_server, tmp_path):
    """They cannot be saved to one file, but to a directory, by all processes."""
    program = ["-c", textwrap.dedent(PROGRAM), tmp_path, free_port()]
    env = {"XLA_FLAGS": xla_flags(1)}
    processes = [python_server.start(*program, i, env=env) for i in (0, 1)]
    outputs = [process.communicate()[0] for process in processes]
    assert all("done" in output for output in outputs), outputs
    assert "step 2 cannot be saved to " in outputs[0]
    assert "checkpoint_2': one of its arrays is spread over several processes" in outputs[0]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_2", "checkpoint_3"]


# Several ways to write one directory, which a symbolic link may lead to.
SPELLINGS = ["run", "run/", "run//", "./run", "run/.", "other/../run", "other//..//run//", "link/"]
SPELLINGS += [Path("run"), "{absolute}", "{absolute}//", "", ".", "./", ".//", "~", "~//"]


@pytest.mark.parametrize("prefix", ["checkpoint_", "part/step-", ""])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=repr)
def test_checkpoints_found_for_any_path_spelling(tmp_path, monkeypatch, spelling, prefix):
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


orbax = pytest.importorskip("orbax.checkpoint")
tensorstore = pytest.importorskip("tensorstore")


class Pair(NamedTuple):
    first: jax.Array
    second: list


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def over_devices(*shape):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.ShapeDtypeStruct(
        shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )


@pytest.fixture
def orbax_checkpoint(tmp_path):
    """Returns the directory, and the tree in it."""
    tree = {
        "pair": Pair(jnp.arange(3, dtype=jnp.bfloat16), [1, np.arange(2.0)]),
        "opt": optax.adam(0.1).init({"w": jnp.arange(4.0)}),
        "empty": {"dict": {}, "none": None},
        "note": "hello",
        "flag": True,
    }
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as writer:
        writer.save(tmp_path / "checkpoint_10", tree)
    return tmp_path, tree


def test_arrays_of_strings_are_named(tmp_path):
    for strange in (np.array(["a text"]), np.array([b"bytes"]), np.array([None])):
        with pytest.raises(UnserializableValueError, match=r"'m/names' is an array of .*strings"):
            save_checkpoint(
                tmp_path,
                {"m": {"names": strange}},
                1,
                orbax_checkpointer=orbax.Checkpointer(orbax.PyTreeCheckpointHandler()),
            )


def test_orbax_checkpoints_are_restored(orbax_checkpoint):
    directory, tree = orbax_checkpoint
    blank = jax.tree.map(lambda x: x * 0, tree)
    for ckpt_dir in (directory, directory / "checkpoint_10"):
        back = restore_checkpoint(ckpt_dir, blank)
        same(back, tree)
        # Laid out as in the target, but nothing is narrowed to what JAX has.
        assert isinstance(back["pair"].first, jax.Array)
        assert isinstance(back["pair"].second[1], np.ndarray)
    state = restore_checkpoint(directory, None, step=10)
    assert state["pair"]["first"].dtype == jnp.bfloat16 and state["pair"]["second"]["0"] == 1
    assert state["opt"]["1"] is None and state["empty"] == {"dict": {}, "none": None}
    with pytest.raises(StateDictMismatchError, match="weights"):
        restore_checkpoint(directory, {"weights": 1})


def test_arrays_of_orbax_get_the_layouts_of_the_target(orbax_checkpoint, monkeypatch):
    directory, tree = orbax_checkpoint
    monkeypatch.chdir(directory)
    wanted = over_devices(4)
    target = {**tree, "opt": jax.tree.map(lambda x: wanted if x.ndim else x, tree["opt"])}
    target["pair"] = Pair(np.zeros(3), [0, jnp.zeros(2)])
    back = restore_checkpoint(".", target)
    assert back["opt"][0].mu["w"].sharding == wanted.sharding
    assert back["pair"].second[1].dtype == np.float64
    same(back, tree)


def test_keys_of_orbax_are_keys(tmp_path):
    key = jax.random.key(3)
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as writer:
        writer.save(tmp_path / "checkpoint_1", {"key": key})
    for target in (None, {"key": jax.random.key(0)}):
        assert restore_checkpoint(tmp_path, target)["key"] == key


@pytest.fixture
def arrays_checkpoint(tmp_path):
    """Returns a checkpoint whose arrays of several processes are next to it."""
    marks = {"w": "//GDAPlaceholder:w", "l": ["//GDAPlaceholder:l/0", 3]}
    save_checkpoint(tmp_path, marks, 7)
    values = {"w": np.arange(8, dtype=np.float32).reshape(4, 2), "l/0": np.ones(2, "bfloat16")}
    for name, value in values.items():
        path = tmp_path / "checkpoint_7_gda" / name
        dtype = "bfloat16" if value.dtype.kind == "V" else value.dtype.str
        metadata = {"shape": value.shape, "chunks": value[:2].shape, "dtype": dtype}
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
        tensorstore.open({**spec, "metadata": metadata, "create": True}).result()[:] = value
    return tmp_path, {"w": values["w"], "l": [values["l/0"], 3]}


def test_multiprocess_arrays_get_target_sharding(arrays_checkpoint):
    directory, tree = arrays_checkpoint
    back = restore_checkpoint(directory, {"w": over_devices(4, 2), "l": [jnp.zeros(2), 0]})
    same(back, tree)
    assert back["w"].sharding == over_devices(4).sharding


def test_multiprocess_arrays_need_a_target(arrays_checkpoint):
    directory, _ = arrays_checkpoint
    with pytest.raises(
        MPARestoreTargetRequiredError, match=r"checkpoint_7' of step 7 .*there is no `target`"
    ):
        restore_checkpoint(directory, None)
    with pytest.raises(MPARestoreTargetRequiredError, match=r"none at 'l/0'\. Pass a target with"):
        restore_checkpoint(directory, {"w": over_devices(4, 2), "l": [np.zeros(2), 0]})


def test_missing_or_damaged_multiprocess_arrays(arrays_checkpoint):
    directory, _ = arrays_checkpoint
    target = {"w": over_devices(4, 2), "l": [jnp.zeros(2), 0]}
    arrays = directory / "checkpoint_7_gda"
    (arrays / "w" / "1.0").write_bytes(b"?")
    with pytest.raises(MPARestoreDataCorruptedError, match=r"step 7 .*_gda/w' does not hold all"):
        restore_checkpoint(directory, target)
    arrays.rename(directory / "elsewhere")
    with pytest.raises(MPARestoreDataCorruptedError, match=r"_gda/l/0'.* was not copied along"):
        restore_checkpoint(directory, target)


@pytest.mark.parametrize("name", ["../secret", "/secret", "w/../../secret", "w//x", "."])
def test_placeholders_do_not_lead_elsewhere(arrays_checkpoint, name):
    directory, _ = arrays_checkpoint
    (directory / "checkpoint_7_gda" / "w").rename(directory / "secret")
    save_checkpoint(directory, {"w": f"//GDAPlaceholder:{name}"}, 8, keep=9)
    (directory / "checkpoint_7_gda").rename(directory / "checkpoint_8_gda")
    with pytest.raises(DamagedCheckpointError, match="w names files elsewhere: '//GDAPlaceholder:"):
        restore_checkpoint(directory, {"w": over_devices(4, 2)}, 8)


@pytest.mark.parametrize("part", ["checkpoint_7", "checkpoint_7_gda", "checkpoint_7_gda/w/0.0"])
def test_linked_parts_are_not_read(arrays_checkpoint, tmp_path_factory, part):
    directory, tree = arrays_checkpoint
    target = {"w": over_devices(4, 2), "l": [jnp.zeros(2), 0]}
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "part"
    (directory / part).rename(elsewhere)
    (directory / part).symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpointError, match=rf"{part}' is a symbolic link, where a"):
        restore_checkpoint(directory, target, 7)
    if part != "checkpoint_7":
        # The checkpoint that the user names may be a link.
        mine = tmp_path_factory.mktemp("of the user") / "mine"
        mine.symlink_to(directory / "checkpoint_7")
        (directory / part).unlink()
        elsewhere.rename(directory / part)
        same(restore_checkpoint(mine, target), tree)


def test_removal_does_not_follow_links(tmp_path):
    orbax_directory(tmp_path / "other", ["_METADATA", "kept"])
    for name in ("checkpoint_1", "checkpoint_2_gda"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    assert save(tmp_path / "run", 2, 3, keep=1) == ["checkpoint_3"]
    assert (tmp_path / "other" / "kept").exists()
    (tmp_path / "run" / "checkpoint_4").symlink_to(tmp_path / "other")
    with pytest.raises(AlreadyExistsError):
        save_checkpoint(tmp_path / "run", 0, 4, overwrite=True)


def test_pipes_and_large_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "checkpoint_1")
    with pytest.raises(DamagedCheckpointError, match="checkpoint_1' is a FIFO, where a file"):
        restore_checkpoint(tmp_path, None)
    with open(tmp_path / "checkpoint_2", "wb") as file:
        file.truncate(10**13)
    with pytest.raises(DamagedCheckpointError, match="has 10,000,000,000,000 bytes; at most"):
        restore_checkpoint(tmp_path, None)


def test_array_larger_than_the_memory_is_damage(arrays_checkpoint):
    directory, _ = arrays_checkpoint
    header = directory / "checkpoint_7_gda" / "w" / ".zarray"
    content = json.loads(header.read_text(encoding="utf-8"))
    header.write_text(json.dumps({**content, "shape": [10**9, 10**6]}), encoding="utf-8")
    with pytest.raises(MPARestoreDataCorruptedError, match=r"_gda/w' does not hold all"):
        restore_checkpoint(directory, {"w": over_devices(4, 2), "l": [jnp.zeros(2), 0]})


def test_names_of_orbax_do_not_lead_elsewhere(tmp_path):
    path = save_checkpoint_multiprocess(tmp_path, {"w": np.arange(3.0)}, 1)
    metadata = Path(path, "_METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(text.replace("('w',)", "('../../secret',)"), encoding="utf-8")
    assert metadata.read_text(encoding="utf-8") != text
    with pytest.raises(DamagedCheckpointError, match=r"secret'.*, which leads elsewhere"):
        restore_checkpoint(tmp_path, None)


def test_damaged_files_and_directories(tmp_path):
    path = save_checkpoint(tmp_path / "files", {"w": np.ones(3)}, 1)
    os.truncate(path, 9)
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint_1' cannot be read \(.* another"):
        restore_checkpoint(path, None)
    directory = tmp_path / "checkpoint_10"
    # A single array: where Orbax fails to read one, it drops the tasks that read the others.
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as writer:
        writer.save(directory, {"large": np.random.default_rng(0).normal(size=1000)})
    for file in directory.glob("ocdbt.process_0/d/*"):
        os.truncate(file, min(file.stat().st_size, 1000))
    with pytest.raises(DamagedCheckpointError, match=r"10' cannot be read \(ValueError: .*large"):
        restore_checkpoint(tmp_path, None)
    (directory / "manifest.ocdbt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"10' cannot .*does not find the tree"):
        restore_checkpoint(tmp_path, None)
    (directory / "_METADATA").unlink()
    assert not is_orbax(str(directory))
    with pytest.raises(DamagedCheckpointError, match=r"10' cannot .*directory without Orbax's fil"):
        restore_checkpoint(tmp_path, None)


def test_invalid_sharding_is_not_damage(orbax_checkpoint):
    directory, tree = orbax_checkpoint
    with pytest.raises(ValueError, match="evenly divide") as raised:
        restore_checkpoint(directory, {**tree, "pair": Pair(over_devices(3), [0, 0])})
    assert not isinstance(raised.value, DamagedCheckpointError)


@pytest.mark.parametrize("package", ["orbax.checkpoint", "tensorstore"])
def test_missing_package_names_the_extra(arrays_checkpoint, monkeypatch, package):
    directory, _ = arrays_checkpoint
    (directory / "checkpoint_8").mkdir()
    (directory / "checkpoint_8" / "_METADATA").touch()
    monkeypatch.setitem(sys.modules, package, None)
    path = str(directory / ("checkpoint_7" if package == "tensorstore" else "checkpoint_8"))
    name = package.replace(".", "-")
    with pytest.raises(
        MissingExtraError, match=rf"needs the package {name}.*pip install 'weft-jax\[train\]'"
    ):
        read_checkpoint(path, {"w": jnp.zeros((4, 2)), "l": {"0": jnp.zeros(2), "1": 0}})


def test_async_manager(tmp_path):
    manager = AsyncManager()
    for step in (1, 2):
        path = save_checkpoint(tmp_path, {"w": step}, step, async_manager=manager)
    manager.wait_previous_save()
    assert latest_checkpoint(tmp_path) == path
    assert restore_checkpoint(tmp_path, {"w": 0}) == {"w": 2}
    manager.save_async(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path, {"w": 3}, 3, async_manager=manager)


def test_paths_that_are_not_in_utf8(tmp_path):
    directory = os.path.join(tmp_path, os.fsdecode("kraków".encode("iso8859-2")))
    os.makedirs(directory)
    save_checkpoint(directory, {"w": np.ones(2)}, 1)
    assert restore_checkpoint(directory, {"w": np.zeros(2)})["w"].tolist() == [1, 1]
    # Array storage takes paths as UTF-8.
    with pytest.raises(ArgumentValueError, match=r"krak\\udcf3w/x_2' is not in UTF-8 .* ASCII"):
        save_checkpoint_multiprocess(directory, {"w": np.ones(2)}, 2, "x_")
    assert os.listdir(directory) == ["checkpoint_1"]
    save_checkpoint_multiprocess(tmp_path, {"w": np.ones(2)}, 2, "x_")
    os.rename(tmp_path / "x_2", os.path.join(directory, "x_2"))
    with pytest.raises(ArgumentValueError, match=r"krak\\udcf3w/x_2' is not in UTF-8"):
        restore_checkpoint(directory, {"w": np.ones(2)}, prefix="x_")


def test_directories_of_orbax_take_the_place_of_files(tmp_path):
    tree = {"w": jnp.arange(3.0), "empty": {}, "n": 4}
    manager = AsyncManager()
    save_checkpoint(tmp_path, tree, 1, async_manager=manager)
    save_checkpoint_multiprocess(tmp_path, tree, 1, overwrite=True, async_manager=manager)
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        path = save_checkpoint(tmp_path, tree, 2, keep=2, orbax_checkpointer=checkpointer)
        assert is_orbax(path) and available_steps(tmp_path) == [1, 2]
        options = {"orbax_checkpointer": checkpointer}
        back = [restore_checkpoint(tmp_path, tree, step, **options) for step in (1, 2)]
    for found in back:
        assert found["w"].tolist() == [0, 1, 2] and (found["empty"], found["n"]) == ({}, 4)
    with pytest.raises(InvalidCheckpointError):
        save_checkpoint_multiprocess(tmp_path, tree, 2)
