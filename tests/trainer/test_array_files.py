"""Reading arrays from files as zarr lays them out, written here by hand or by tensorstore."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft.trainer.array_files import ArrayFiles
from weft.trainer.checkpoint_manifest import read_manifest, write_manifest


def write(ckpt_dir, name, array, chunks):
    """By tensorstore, so that the reader is held against another writer."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{ckpt_dir}/arrays/{name}"},
        "metadata": {"chunks": chunks, "compressor": None},
    }
    opened = tensorstore.open(
        spec, create=True, dtype=array.dtype, shape=array.shape, fill_value=None
    ).result()
    opened.write(array).result()


def mesh_of(*shape):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def like(array, *axes, mesh=(1, 1)):
    sharding = NamedSharding(mesh_of(*mesh), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def read(ckpt_dir, targets, *, manifest=None):
    return ArrayFiles(str(ckpt_dir), "arrays", manifest).read(targets)


@pytest.mark.parametrize("chunks", [[8, 12], [4, 12], [3, 5], [1, 1]], ids=str)
@pytest.mark.parametrize("axes", [(), ("data", "model"), (None, ("data", "model"))], ids=str)
def test_any_chunks_to_any_layout(tmp_path, chunks, axes):
    x = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    write(tmp_path, "x", x, chunks)
    target = like(x, *axes, mesh=(2, 2))
    arrays, seen, faults = read(tmp_path, {"x": target})
    assert faults == []
    assert arrays["x"].sharding == target.sharding
    np.testing.assert_array_equal(arrays["x"], x)
    assert "arrays/x/.zarray" in seen and "arrays/x/0.0" in seen


def test_numbers_numpy_arrays_other_dtypes_and_keys(tmp_path):
    half = np.arange(6).reshape(2, 3).astype(jnp.bfloat16)
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 4)
    write(tmp_path, "scalar", np.float32(2.5).reshape(()), [])
    write(tmp_path, "half", half, [2, 2])
    write(tmp_path, "keys", np.asarray(jax.random.key_data(keys)), [3, 4])
    targets = {
        "scalar": like(np.float32(0)),
        "half": jax.ShapeDtypeStruct((2, 3), np.float32, sharding=like(half).sharding),
        "keys": like(keys, "data", mesh=(2, 1)),
    }
    arrays, _, faults = read(tmp_path, targets)
    assert faults == []
    assert (float(arrays["scalar"]), arrays["half"].dtype) == (2.5, np.float32)
    np.testing.assert_array_equal(arrays["half"], half.astype(np.float32))
    assert (arrays["keys"] == keys).all()
    assert len(arrays["keys"].sharding.device_set) == 2
    arrays, _, _ = read(tmp_path, {"half": np.zeros((2, 3), jnp.bfloat16)})
    assert isinstance(arrays["half"], np.ndarray)
    np.testing.assert_array_equal(arrays["half"], half)


@pytest.fixture
def checkpoint(tmp_path):
    """Two arrays and a manifest."""
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name in ("x", "y"):
        write(tmp_path, name, x, [2, 3])
    write_manifest(str(tmp_path))
    return tmp_path, {"x": like(x), "y": like(x)}


def header_with(**changes):
    def harm(directory):
        content = json.loads((directory / ".zarray").read_text())
        (directory / ".zarray").write_text(json.dumps({**content, **changes}))

    return harm


HARMS = {
    "flipped": (lambda d: (d / "1.0").write_bytes(b"\1" * 24), "1.0: its content has changed"),
    "cut": (lambda d: (d / "1.0").write_bytes(b""), "1.0: has 0 bytes instead of 24"),
    "gone": (lambda d: (d / "1.0").unlink(), "1.0: is missing"),
    "no header": (lambda d: (d / ".zarray").unlink(), ".zarray: is missing"),
    "header": (header_with(chunks=[4, 3]), ".zarray: has "),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_is_named_and_other_arrays_are_read(checkpoint, harm):
    directory, targets = checkpoint
    do, expected = HARMS[harm]
    do(directory / "arrays" / "x")
    manifest = read_manifest(str(directory))
    arrays, seen, (fault,) = read(directory, targets, manifest=manifest)
    assert fault.startswith(f"arrays/x/{expected}")
    assert list(arrays) == ["y"]
    assert f"arrays/x/{expected.split(':')[0]}" in seen


UNCHECKED = {
    "short": (lambda d: (d / "1.0").write_bytes(b"123"), "1.0: has 3 bytes instead of 24"),
    "gone": (lambda d: (d / "1.0").unlink(), "1.0: cannot be read"),
    "no header": (
        lambda d: (d / ".zarray").write_text("{}"),
        ".zarray: does not describe an array",
    ),
    "no text": (
        lambda d: (d / ".zarray").write_bytes(b"\xff"),
        ".zarray: does not describe an array",
    ),
    "compressed": (header_with(compressor={"id": "zlib"}), "was not written by Weft"),
    "shape": (header_with(shape=[4, 4]), "has the shape (4, 4), the index (4, 3)"),
}


@pytest.mark.parametrize("harm", UNCHECKED)
def test_without_a_manifest_what_does_not_fit_is_named(checkpoint, harm):
    directory, targets = checkpoint
    do, expected = UNCHECKED[harm]
    do(directory / "arrays" / "x")
    _, _, (fault,) = read(directory, targets)
    assert fault.startswith("arrays/x/") and expected in fault


def test_a_file_that_the_manifest_does_not_know(checkpoint):
    directory, targets = checkpoint
    write(directory, "z", np.zeros(3, np.float32), [3])
    target = {**targets, "z": like(np.zeros(3, np.float32))}
    _, _, faults = read(directory, target, manifest=read_manifest(str(directory)))
    assert faults == ["arrays/z/.zarray: is not in the manifest"]
