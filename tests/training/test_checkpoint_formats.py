"""What `restore_checkpoint` reads besides the files that `save_checkpoint` writes."""

import os
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft.errors import (
    DamagedCheckpointError,
    MissingExtraError,
    MPARestoreDataCorruptedError,
    MPARestoreTargetRequiredError,
    StateDictMismatchError,
)
from weft.training.checkpoint_formats import is_orbax, read_checkpoint
from weft.training.checkpoints import restore_checkpoint, save_checkpoint

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
    """The directory, and the tree in it."""
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


def test_what_orbax_wrote_is_restored(orbax_checkpoint):
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


def test_the_arrays_of_orbax_get_the_layouts_of_the_target(orbax_checkpoint, monkeypatch):
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
    """A checkpoint whose arrays of several processes are next to it."""
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


def test_arrays_of_several_processes_get_the_layouts_of_the_target(arrays_checkpoint):
    directory, tree = arrays_checkpoint
    back = restore_checkpoint(directory, {"w": over_devices(4, 2), "l": [jnp.zeros(2), 0]})
    same(back, tree)
    assert back["w"].sharding == over_devices(4).sharding


def test_arrays_of_several_processes_need_a_target(arrays_checkpoint):
    directory, _ = arrays_checkpoint
    with pytest.raises(
        MPARestoreTargetRequiredError, match=r"checkpoint_7' of step 7 .*there is no `target`"
    ):
        restore_checkpoint(directory, None)
    with pytest.raises(MPARestoreTargetRequiredError, match=r"none at 'l/0'\. Pass a target with"):
        restore_checkpoint(directory, {"w": over_devices(4, 2), "l": [np.zeros(2), 0]})


def test_arrays_of_several_processes_that_are_gone_or_damaged(arrays_checkpoint):
    directory, _ = arrays_checkpoint
    target = {"w": over_devices(4, 2), "l": [jnp.zeros(2), 0]}
    arrays = directory / "checkpoint_7_gda"
    (arrays / "w" / "1.0").write_bytes(b"?")
    with pytest.raises(MPARestoreDataCorruptedError, match=r"step 7 .*_gda/w' does not hold all"):
        restore_checkpoint(directory, target)
    arrays.rename(directory / "elsewhere")
    with pytest.raises(MPARestoreDataCorruptedError, match=r"_gda/l/0'.* was not copied along"):
        restore_checkpoint(directory, target)


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


def test_a_layout_that_does_not_fit_is_no_damage(orbax_checkpoint):
    directory, tree = orbax_checkpoint
    with pytest.raises(ValueError, match="evenly divide") as raised:
        restore_checkpoint(directory, {**tree, "pair": Pair(over_devices(3), [0, 0])})
    assert not isinstance(raised.value, DamagedCheckpointError)


@pytest.mark.parametrize("package", ["orbax.checkpoint", "tensorstore"])
def test_without_its_package_the_error_names_the_extra(arrays_checkpoint, monkeypatch, package):
    directory, _ = arrays_checkpoint
    (directory / "checkpoint_8").mkdir()
    (directory / "checkpoint_8" / "_METADATA").touch()
    monkeypatch.setitem(sys.modules, package, None)
    path = str(directory / ("checkpoint_7" if package == "tensorstore" else "checkpoint_8"))
    name = package.replace(".", "-")
    with pytest.raises(
        MissingExtraError, match=rf"needs the package {name}.*pip install 'weft\[train\]'"
    ):
        read_checkpoint(path, {"w": jnp.zeros((4, 2)), "l": {"0": jnp.zeros(2), "1": 0}})
