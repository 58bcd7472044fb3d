"""

Reading arrays from files as zarr lays them out, which tensorstore writes here: a file for each
chunk, as in checkpoints of Weft 0.2.
"""

import json
import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests import checkpoint_files
from weft.errors import CheckpointStateError, CheckpointStructureError, FileRefusedError
from weft.hierarchy.parameter_spec import TensorSpec
from weft.trainer.checkpointer import array_files
from weft.trainer.checkpointer import manifest as manifest_lib
from weft.trainer.checkpointer import storage as storage_lib
from weft.trainer.checkpointer.array_files import ArrayFileError, ArrayFiles, read_tree
from weft.trainer.checkpointer.index import CheckpointValidationType, write_index_file
from weft.trainer.checkpointer.manifest import read_manifest, write_manifest
from weft.trainer.checkpointer.storage import OrbaxStateStorage


class State(NamedTuple):
    key: jax.Array
    model: dict


class Iterator:
    def __init__(self, position):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


@pytest.fixture
def storage():
    storage = OrbaxStateStorage.default_config().instantiate()
    yield storage
    storage.stop()


def save(storage, path, state, wait=True):
    os.makedirs(path, exist_ok=True)
    storage.save_to_dir(
        step=1, state=state, ckpt_dir=str(path), on_commit_callback=write_index_file
    )
    if wait:
        storage.wait_until_finished()


def restore(storage, path, state, validation=CheckpointValidationType.EXACT):
    return storage.restore_from_dir(1, state, ckpt_dir=str(path), validation=validation)


def bits(x):
    """Returns all of an array's bits, NaNs and signs of zero among them."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x).tobytes()


def mesh_of(*shape):
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def laid_out(x, mesh, *axes):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def like(state, sharding=None):
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state,
    )


DTYPES = ["bool", "int4", "int8", "int32", "uint8", "uint32", "float8_e4m3fn", "float16"]
DTYPES += ["bfloat16", "float32", "complex64"]


def test_arrays_of_every_dtype_round_trip(storage, tmp_path):
    random = np.random.default_rng(0).integers(0, 256, 4 * 6 * 8, np.uint8).tobytes()
    state = {}
    for dtype in DTYPES:
        values = np.frombuffer(random, np.uint8)[: 4 * 6]
        if jnp.dtype(dtype).itemsize > 1:  # any bits at all, NaNs with payloads included
            values = np.frombuffer(random, jnp.dtype(dtype))[: 4 * 6]
        state[dtype] = jnp.asarray(values.astype(dtype).reshape(4, 6))
    save(storage, tmp_path, state)
    restored = restore(storage, tmp_path, like(state))
    for dtype in DTYPES:
        assert restored[dtype].dtype == jnp.dtype(dtype)
        assert bits(restored[dtype]) == bits(state[dtype]), dtype


@pytest.mark.parametrize("after", [(1, 1), (2, 1), (2, 2), (1, 8), (8, 1)])
def test_array_is_resharded(storage, tmp_path, after):
    x = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    before = mesh_of(4, 2)
    state = {
        "both": laid_out(x, before, "data", "model"),
        "one": laid_out(x, before, None, ("data", "model")),
        "none": laid_out(x, before),
    }
    save(storage, tmp_path, state)
    mesh = mesh_of(*after)
    layouts = {"both": ("model", "data"), "one": ("data",), "none": (None, "model")}
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )
        for name, axes in layouts.items()
    }
    restored = restore(storage, tmp_path, target)
    for name in layouts:
        assert restored[name].sharding == target[name].sharding
        assert bits(restored[name]) == x.tobytes()


def test_specs_without_a_mesh_lead_to_one_device(storage, tmp_path):
    save(storage, tmp_path, {"w": jnp.arange(2.0)})
    specs = {"w": TensorSpec((2,), jnp.float32, mesh_axes=("data",))}
    restored = restore(storage, tmp_path, specs)["w"]
    assert restored.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert restored.tolist() == [0.0, 1.0]


def test_states_of_any_containers_and_python_values(storage, tmp_path):
    state = {
        "state": State(key=jax.random.key(0), model={"w": [jnp.ones(3), (jnp.array(2.0), None)]}),
        "numpy": np.arange(4, dtype=np.int64),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "empty_numpy": np.zeros((2, 0)),
        "step": 7,
        "rate": 0.1,
        "big": 2**80,
        "inf": float("inf"),
        "name": "ä",
        "done": True,
        "it": Iterator(11),
    }
    save(storage, tmp_path, state)
    # The target only gives the structure: the values come from the checkpoint.
    target = jax.tree.map(lambda x: x * 0, {k: v for k, v in state.items() if k[0] in "neb"})
    target = {**like(state), **target, "step": 0, "rate": 0.0, "inf": 0.0, "done": False}
    target["name"], target["it"], target["numpy"] = "", Iterator(0), np.zeros(4, np.int64)
    restored = restore(storage, tmp_path, target)
    assert isinstance(restored["state"], State)
    assert jax.tree.structure(restored["state"]) == jax.tree.structure(state["state"])
    assert bits(restored["state"].model["w"][0]) == bits(jnp.ones(3))
    assert isinstance(restored["numpy"], np.ndarray)
    np.testing.assert_array_equal(restored["numpy"], np.arange(4))
    assert (restored["empty"].shape, restored["empty"].dtype) == ((0, 3), jnp.bfloat16)
    assert restored["empty_numpy"].shape == (2, 0)
    for name in ("step", "rate", "big", "inf", "name", "done"):
        assert restored[name] == state[name]
        assert type(restored[name]) is type(state[name])
    assert restored["it"] is target["it"]
    assert restored["it"].position == 11


def test_state_may_change_as_soon_as_the_save_has_begun(storage, tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    arrays = [jnp.full((256, 256), float(i)) for i in range(8)]
    numpy, it = np.arange(1000), Iterator(5)
    save(storage, tmp_path, {"w": arrays, "numpy": numpy, "it": it}, wait=False)
    numpy += 1
    it.position = 6
    for _ in range(3):
        arrays = step(arrays)
    jax.block_until_ready(arrays)
    storage.wait_until_finished()
    it = Iterator(0)
    restored = restore(
        storage, tmp_path, {"w": like(arrays), "numpy": np.zeros(1000, numpy.dtype), "it": it}
    )
    for i, array in enumerate(restored["w"]):
        np.testing.assert_array_equal(array, np.full((256, 256), i, np.float32))
    np.testing.assert_array_equal(restored["numpy"], np.arange(1000))
    assert it.position == 5


def test_large_array_is_split_into_chunks_of_the_configured_size(tmp_path):
    cfg = OrbaxStateStorage.default_config().set(max_chunk_bytes=1000)
    storage = cfg.instantiate()
    state = {"w": jnp.arange(1024.0)}
    save(storage, tmp_path, state)
    chunks = [x for name, x in checkpoint_files.values(tmp_path).items() if ".zarray" not in name]
    sizes = list(map(len, chunks))
    assert len(sizes) > 1 and max(sizes) <= 1000 and sum(sizes) == 4096
    assert (restore(storage, tmp_path, state)["w"] == state["w"]).all()
    storage.stop()


def test_only_large_arrays_are_cut_among_devices_with_the_same_values(storage, tmp_path):
    # JAX compiles a program for each slice that it cuts.
    mesh = mesh_of(2, 1)
    large = laid_out(jnp.zeros((2, 2**18)), mesh)
    save(storage, tmp_path, {"small": laid_out(jnp.zeros((4, 3)), mesh), "large": large})
    names = checkpoint_files.values(tmp_path).keys() - {"large/.zarray", "small/.zarray"}
    assert names == {"large/0.0", "large/1.0", "small/0.0"}


def test_long_and_unusual_names(storage, tmp_path):
    names = ["x" * 300, "x" * 299 + "y", "..", "a.b", "a-b", "a", "ä ö", "%2E", "A", "-"]
    state = {name: jnp.array(float(i)) for i, name in enumerate(names)}
    state["a/b"] = jnp.array(10.0)
    save(storage, tmp_path, state)
    restored = restore(storage, tmp_path, like(state))
    assert {name: float(x) for name, x in restored.items()} == {
        name: float(i) for i, name in enumerate([*names, "a/b"])
    }


def test_part_of_a_checkpoint(storage, tmp_path):
    save(storage, tmp_path, {"model": {"w": jnp.ones(3), "b": jnp.zeros(3)}, "step": 5})
    part = {"model": {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}}
    with pytest.raises(CheckpointStructureError, match=r"model/b: checkpoint float32\[3\]"):
        restore(storage, tmp_path, part)
    restored = restore(storage, tmp_path, part, CheckpointValidationType.CONTAINS_STATE)
    np.testing.assert_array_equal(restored["model"]["w"], np.ones(3))


def test_structure_mismatch_changes_nothing(storage, tmp_path):
    save(storage, tmp_path, {"w": jnp.ones(3), "it": Iterator(5)})
    it = Iterator(0)
    with pytest.raises(CheckpointStructureError):
        restore(storage, tmp_path, {"w": jnp.ones(4), "it": it})
    assert it.position == 0


def test_dtypes_that_cannot_be_saved_are_named(storage, tmp_path):
    with pytest.raises(CheckpointStateError, match=r"'model/w' is an array of uint4.*as uint8"):
        save(storage, tmp_path, {"model": {"w": jnp.ones(3, jnp.uint4)}})
    for strange in (
        np.array(["a text"]),
        np.array([b"bytes"]),
        np.array(["a", None]),
        np.array(["a text"], np.dtypes.StringDType()),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("x", np.int32)]),
        np.longdouble(1),
    ):
        expected = rf"'model/w' is an array of {re.escape(str(strange.dtype))}.*Python strings"
        with pytest.raises(CheckpointStateError, match=expected):
            save(storage, tmp_path, {"model": {"w": strange}})
    save(storage, tmp_path, {"model": {"w": "a text", "x": np.bool_(True)}})


def test_background_error_is_raised_once_by_wait(storage, tmp_path):
    def fail(*, ckpt_dir, index):
        raise OSError("the disk is full")

    os.makedirs(tmp_path / "ckpt")
    storage.save_to_dir(
        step=4, state={"w": jnp.ones(3)}, ckpt_dir=str(tmp_path / "ckpt"), on_commit_callback=fail
    )
    with pytest.raises(OSError, match="the disk is full"):
        storage.wait_until_finished()
    assert not (tmp_path / "ckpt").exists()
    storage.wait_until_finished()
    save(storage, tmp_path / "next", {"w": jnp.ones(3)})


def test_arrays_are_not_written_through_a_link(storage, tmp_path):
    for name in ("ckpt", "victim"):
        os.makedirs(tmp_path / name)
    os.symlink(tmp_path / "victim", tmp_path / "ckpt" / "arrays")
    storage.save_to_dir(
        step=4,
        state={"w": jnp.ones(3)},
        ckpt_dir=str(tmp_path / "ckpt"),
        on_commit_callback=write_index_file,
    )
    with pytest.raises(FileRefusedError, match=r"ckpt/arrays' is a symbolic link"):
        storage.wait_until_finished()
    assert os.listdir(tmp_path / "victim") == []


def test_stopped_storage_can_save_again(storage, tmp_path):
    save(storage, tmp_path / "a", {"w": jnp.ones(3)})
    storage.stop()
    save(storage, tmp_path / "b", {"w": jnp.ones(3)})
    assert json.loads((tmp_path / "b" / "index").read_text(encoding="utf-8"))["index"][0][0] == "w"


def write(ckpt_dir, name, array, chunks):
    """Writes with tensorstore, to test the reader against another writer."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{ckpt_dir}/arrays/{name}"},
        "metadata": {"chunks": chunks, "compressor": None},
    }
    opened = tensorstore.open(
        spec, create=True, dtype=array.dtype, shape=array.shape, fill_value=None
    ).result()
    opened.write(array).result()


def device_mesh(*shape):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def shape_like(array, *axes, mesh=(1, 1)):
    sharding = NamedSharding(device_mesh(*mesh), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def read(ckpt_dir, targets, *, manifest=None):
    return ArrayFiles(str(ckpt_dir), "arrays", manifest).read(targets)


@pytest.mark.parametrize("chunks", [[8, 12], [4, 12], [3, 5], [1, 1]], ids=str)
@pytest.mark.parametrize("axes", [(), ("data", "model"), (None, ("data", "model"))], ids=str)
def test_any_chunks_to_any_layout(tmp_path, chunks, axes):
    x = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    write(tmp_path, "x", x, chunks)
    target = shape_like(x, *axes, mesh=(2, 2))
    arrays, faults = read(tmp_path, {"x": target})
    assert faults == []
    assert arrays["x"].sharding == target.sharding
    np.testing.assert_array_equal(arrays["x"], x)


@pytest.fixture
def checkpoint(tmp_path):
    """Returns two arrays and a manifest."""
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name in ("x", "y"):
        write(tmp_path, name, x, [2, 3])
    write_manifest(str(tmp_path))
    return tmp_path, {"x": shape_like(x), "y": shape_like(x)}


def header_with(**changes):
    def harm(directory):
        content = json.loads((directory / ".zarray").read_text(encoding="utf-8"))
        (directory / ".zarray").write_text(json.dumps({**content, **changes}), encoding="utf-8")

    return harm


HARMS = {
    "flipped": (lambda d: (d / "1.0").write_bytes(b"\1" * 24), "1.0: its content has changed"),
    "cut": (lambda d: (d / "1.0").write_bytes(b""), "1.0: has 0 bytes instead of 24"),
    "gone": (lambda d: (d / "1.0").unlink(), "1.0: is missing"),
    "no header": (lambda d: (d / ".zarray").unlink(), ".zarray: is missing"),
    "header": (header_with(chunks=[4, 3]), ".zarray: has "),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_file_is_named_and_other_arrays_are_read(checkpoint, harm):
    directory, targets = checkpoint
    do, expected = HARMS[harm]
    do(directory / "arrays" / "x")
    manifest = read_manifest(str(directory))
    arrays, (fault,) = read(directory, targets, manifest=manifest)
    assert fault.startswith(f"arrays/x/{expected}")
    assert list(arrays) == ["y"]


UNCHECKED = {
    "short": (
        lambda d: (d / "1.0").write_bytes(b"123"),
        "1.0: has 3 bytes instead of 24",
    ),
    "gone": (lambda d: (d / "1.0").unlink(), "1.0: is missing"),
    "no header": (
        lambda d: (d / ".zarray").write_text("{}", encoding="utf-8"),
        ".zarray: does not describe an array (it has no 'chunks')",
    ),
    "no text": (
        lambda d: (d / ".zarray").write_bytes(b"\xff"),
        ".zarray: does not describe an array",
    ),
    "compressed": (header_with(compressor={"id": "zlib"}), "was not written by Weft"),
    "shape": (header_with(shape=[4, 4]), "has the shape (4, 4), the index (4, 3)"),
}


@pytest.mark.parametrize("harm", UNCHECKED)
def test_mismatch_is_named_without_manifest(checkpoint, harm):
    directory, targets = checkpoint
    do, expected = UNCHECKED[harm]
    do(directory / "arrays" / "x")
    _, (fault,) = read(directory, targets)
    assert fault.startswith("arrays/x/") and expected in fault


def test_files_do_not_grow_with_arrays_or_shards(storage, tmp_path):
    """Orbax began a file whenever the last one was written, up to 70 for 400 arrays."""
    counts = {}
    for num_arrays, axes in [(4, ()), (4, ("data",)), (300, ("data",))]:
        # Smaller chunks are in the tree.
        array = laid_out(jnp.zeros((8, 300)), mesh_of(8, 1), *axes)
        directory = tmp_path / f"{num_arrays}{axes}"
        save(storage, directory, {f"w{i}": array for i in range(num_arrays)})
        counts[num_arrays, axes] = sum(file.is_file() for file in directory.rglob("*"))
    assert len(set(counts.values())) == 1, counts


def test_files_of_a_process_are_written_in_parallel(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(storage_lib, "_FILE_BYTES", 100_000)
    array = laid_out(jnp.zeros((8, 8000)), mesh_of(8, 1), "data")
    save(storage, tmp_path, {f"w{i}": array for i in range(4)})
    files = (tmp_path / "arrays" / "ocdbt.process_0" / "d").iterdir()
    sizes = [file.stat().st_size for file in files]
    assert sum(sizes) > array.nbytes * 4
    assert 8 <= len(sizes) <= 16
    assert max(sizes) < 200_000


def test_tree_that_could_not_be_read_again_fails_the_save(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "MAX_JSON_BYTES", 100)
    with pytest.raises(ArrayFileError, match=r"arrays/\S+: has \d+ bytes; at most 100 are read"):
        save(storage, tmp_path, {f"w{i}": jnp.zeros(2) for i in range(20)})


def test_trees_may_be_as_large_as_the_arrays(storage, tmp_path, monkeypatch):
    """Those of 4,096 processes with 4,000 arrays take 500 MB, which was taken for damage."""
    state = {f"w{i}": jnp.zeros(3000) for i in range(2)}
    save(storage, tmp_path, state)
    write_manifest(str(tmp_path), facts={"step": 1})
    files = ArrayFiles(str(tmp_path), "arrays", read_manifest(str(tmp_path)))
    assert files.values
    monkeypatch.setattr(array_files, "MAX_JSON_BYTES", 10)
    assert files.damage_of_others(state.keys(), state.keys()) == []
    # Only the second array counts, as if the first one were a stranger's.
    (fault,) = files.damage_of_others({"w1"}, {"w1"})
    assert "of no array" in fault


def test_each_chunk_is_read_once_to_another_axis(storage, tmp_path, monkeypatch):
    mesh = mesh_of(8, 1)
    x = np.arange(8.0 * 800, dtype=np.float32).reshape(8, 800)
    save(storage, tmp_path, {"w": laid_out(x, mesh, "data")})
    write_manifest(str(tmp_path), facts={"step": 1})
    read_sizes = []
    find = manifest_lib.find_file_damage

    def find_and_note(ckpt_dir, path, blocks, *args, **kwargs):
        read_sizes.extend(block.size for block in blocks)
        return find(ckpt_dir, path, blocks, *args, **kwargs)

    monkeypatch.setattr(manifest_lib, "find_file_damage", find_and_note)
    target = {
        "w": jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=laid_out(x, mesh, None, "data").sharding
        )
    }
    restored = restore(storage, tmp_path, target)["w"]
    np.testing.assert_array_equal(restored, x)
    assert read_sizes.count(x.nbytes // 8) == 8
    arrays_bytes = sum(f.stat().st_size for f in (tmp_path / "arrays").rglob("*") if f.is_file())
    assert sum(read_sizes) <= arrays_bytes


def test_checkpoints_with_a_file_for_each_chunk_are_read(storage, tmp_path):
    state = {"w": laid_out(jnp.arange(32.0).reshape(8, 4), mesh_of(4, 1), "data"), "b": jnp.ones(3)}
    save(storage, tmp_path, state)
    write_manifest(str(tmp_path), facts={"step": 1})
    checkpoint_files.split(tmp_path)
    assert (tmp_path / "arrays" / "w" / "3.0").exists()
    restored = restore(storage, tmp_path, like(state))
    assert {name: bits(x) for name, x in restored.items()} == {n: bits(x) for n, x in state.items()}


def test_tree_of_several_levels(tmp_path):
    spec = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{tmp_path}/arrays/"},
        "config": {"max_decoded_node_bytes": 500, "max_inline_value_bytes": 10},
    }
    store = tensorstore.KvStore.open(spec).result()
    expected = {f"w{i // 10}/{i}.0": b"x" * (5 + i % 50) for i in range(100)}
    with tensorstore.Transaction() as transaction:
        for name, content in expected.items():
            store.with_transaction(transaction)[name] = content
    assert checkpoint_files.values(tmp_path) == expected


def test_tree_leads_to_no_other_files(tmp_path):
    spec = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{tmp_path}/arrays/"},
        "value_data_prefix": "secret/",
    }
    store = tensorstore.KvStore.open(spec).result()
    store["w/0"] = b"x" * 2000
    with pytest.raises(ArrayFileError, match=r"manifest\.ocdbt: does not lead to .*secret"):
        read_tree(str(tmp_path), "arrays")
