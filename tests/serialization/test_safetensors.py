import contextlib
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file, save_file

from weft import linen as nn
from weft import nnx
from weft.errors import WeightsMismatchError, WeightsReadError, WeightsWriteError
from weft.serialization import TensorFiles, load_safetensors, save_safetensors

TREE = {
    "decoder": {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, "f4")},
    "layers": [{"w": np.full((4,), 0.1, ml_dtypes.bfloat16)}, {"w": np.float32(2.0)}],
}


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.asarray(x).dtype == jnp.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_files_are_readable_by_other_programs(tmp_path):
    files = save_safetensors(tmp_path / "a" / "m.safetensors", TREE, metadata={"step": "7"})
    assert files == [tmp_path / "a" / "m.safetensors"]
    there = load_file(files[0])
    assert sorted(there) == ["decoder.bias", "decoder.weight", "layers.0.w", "layers.1.w"]
    assert there["layers.0.w"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(there["decoder.weight"], TREE["decoder"]["weight"])
    with TensorFiles(files[0]) as opened:
        assert opened.metadata() == {"step": "7"}


@pytest.mark.parametrize("boxed", [False, True])
def test_variables_of_linen(tmp_path, boxed):
    init = nn.initializers.normal()
    init = nn.with_partitioning(init, (None, "model")) if boxed else init
    variables = nn.Dense(3, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 2)))
    save_safetensors(tmp_path / "m.safetensors", variables)
    assert sorted(load_file(tmp_path / "m.safetensors")) == ["params.bias", "params.kernel"]
    shapes = jax.eval_shape(lambda: variables)
    assert_same(load_safetensors(tmp_path, shapes), variables)


def test_nnx_state_without_keys(tmp_path):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    with pytest.raises(WeightsWriteError, match=r"'layers.1.rngs.key' holds PRNG keys .*nnx.Param"):
        save_safetensors(tmp_path / "m.safetensors", nnx.state(model))
    params = nnx.state(model, nnx.Param)
    save_safetensors(tmp_path / "m.safetensors", params)
    assert sorted(load_file(tmp_path / "m.safetensors")) == ["layers.0.bias", "layers.0.kernel"]
    assert_same(load_safetensors(tmp_path, params), params)


def test_large_trees_become_several_files_with_an_index(tmp_path):
    path = tmp_path / "model.safetensors"
    files = save_safetensors(path, TREE, max_shard_bytes=24)
    assert [f.name for f in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": 48}
    assert index["weight_map"]["decoder.weight"] == "model-00002-of-00003.safetensors"
    assert_same(load_safetensors(tmp_path, TREE), TREE)
    assert_same(load_safetensors(files[-1], TREE), TREE)
    # No earlier file is left over.
    other = tmp_path / "model-notes.safetensors"
    save_file({"a": np.ones(1)}, other)
    save_safetensors(path, TREE)
    assert sorted(f.name for f in tmp_path.iterdir()) == [other.name, path.name]


def test_values_get_target_sharding(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    value = np.arange(32, dtype=np.float32).reshape(2, 16)
    save_safetensors(tmp_path / "m.safetensors", {"w": jax.device_put(value, sharding)})
    target = {"w": jax.ShapeDtypeStruct((2, 16), jnp.bfloat16, sharding=sharding)}
    read = load_safetensors(tmp_path, target, cast=True)["w"]
    assert read.sharding == sharding and read.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(read, np.float32), value)


def test_large_files_load_one_tensor_at_a_time(tmp_path):
    n, each = 24, 8 << 20
    tree = {f"w{i}": np.full(each // 4, i, np.float32) for i in range(n)}
    save_safetensors(tmp_path / "m.safetensors", tree)
    code = f"""
import resource
import numpy as np
from weft.serialization import TensorFiles
with TensorFiles({str(tmp_path)!r}) as files:
    files.read("w0")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(float(files.read(name)[:1024].mean()) for name in files.tensors)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
assert total == {sum(range(n))}
"""
    grown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    # In kilobytes: pages of the file that the system keeps count as well, copies do not add up.
    assert int(grown.stdout) < (n + 3) * each // 1024


def test_mismatches_are_listed(tmp_path):
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": {"weight": np.ones((2, 3), "f4")}, "b": np.ones(2, "f4")})
    target = {
        "a": {"weights": jax.ShapeDtypeStruct((2, 3), jnp.float32)},
        "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    }
    with pytest.raises(WeightsMismatchError) as error:
        load_safetensors(path, target)
    assert str(error.value) == (
        f"the tensors of {str(path)!r} are not those of the target:\n"
        "  missing: a.weights [2, 3]; did you mean 'a.weight'?\n"
        "  unexpected: a.weight [2, 3]\n"
        "  shape: b [2] in the file, [3] wanted\n"
        "  dtype: b F32 in the file, bfloat16 wanted\n"
        "Give the target of the model that the file was written from."
    )
    many = {f"w{i}": jax.ShapeDtypeStruct((), jnp.float32) for i in range(20)}
    with pytest.raises(WeightsMismatchError, match=r"missing: … 12 more"):
        load_safetensors(path, many)


def test_cast_converts_dtypes(tmp_path):
    save_safetensors(tmp_path / "m.safetensors", {"b": np.ones(2, "f4")})
    target = {"b": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    with pytest.raises(WeightsMismatchError, match="Give cast=True to convert them"):
        load_safetensors(tmp_path, target)
    assert load_safetensors(tmp_path, target, cast=True)["b"].dtype == jnp.bfloat16


def test_prefix_names_need_a_target(tmp_path):
    save_file({"a": np.ones(1), "a.b": np.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightsMismatchError, match=r"'a.b' and another one .* Give a target"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, "two arrays have the name 'a.b'"),
        ({"a": "text"}, "'a' is of type str; a safetensors file holds arrays"),
        ({"a": jnp.ones(1, jnp.float8_e3m4)}, r"'a' has the dtype float8_e3m4.*Convert it"),
        ({"a": jnp.ones(3, jnp.float4_e2m1fn)}, r"'a' has 3 values .*two fill a byte. Pad it"),
        ({"a": np.array(["x"])}, r"'a' is an array of strings.*Leave it out"),
        ({"a": np.array([None])}, r"'a' is an array of objects.*Leave it out"),
    ],
    ids=["same name", "text", "dtype", "half a byte", "strings", "objects"],
)
def test_write_errors(tmp_path, tree, message):
    with pytest.raises(WeightsWriteError, match=message):
        save_safetensors(tmp_path / "m.safetensors", tree)
    assert list(tmp_path.iterdir()) == []


def test_invalid_destinations(tmp_path):
    with pytest.raises(WeightsWriteError, match=r"the name '__metadata__', .*Rename it"):
        save_safetensors(tmp_path / "x.safetensors", {"__metadata__": np.ones(2)})
    with pytest.raises(WeightsWriteError, match=r"does not end in '.safetensors'. Add it"):
        save_safetensors(tmp_path / "m.bin", {"a": np.ones(1)})
    with pytest.raises(WeightsWriteError, match="max_shard_bytes=0 leaves no room"):
        save_safetensors(tmp_path / "m.safetensors", {"a": np.ones(1)}, max_shard_bytes=0)


def test_multiprocess_array_is_rejected(tmp_path, monkeypatch):
    value = jnp.ones(1)
    monkeypatch.setattr(type(value), "is_fully_addressable", False)
    with pytest.raises(
        WeightsWriteError, match=r"'a' is spread over several processes.*checkpoint"
    ):
        save_safetensors(tmp_path / "m.safetensors", {"a": value})


def test_tensors_of_several_files_are_those_of_the_files(tmp_path):
    files = save_safetensors(tmp_path / "model.safetensors", TREE, max_shard_bytes=24)
    first, second = (load_file(file) for file in files[:2])
    save_file({**first, "unlisted": np.ones(1)}, files[0])
    with TensorFiles(tmp_path) as tensor_files:
        assert tensor_files.read("unlisted") == 1
    name = min(second)
    save_file({**first, name: second[name]}, files[0])
    message = rf"{name}' is in 'model-00001-of.* and in 'model-00002-of.*, and readers take one or"
    with pytest.raises(WeightsReadError, match=message):
        TensorFiles(tmp_path)


def test_unreadable_files(tmp_path):
    with pytest.raises(WeightsReadError, match="there is no file"):
        TensorFiles(tmp_path / "m.safetensors")
    with pytest.raises(WeightsReadError, match=r"has no safetensors file in it.*Give the path"):
        TensorFiles(tmp_path)
    files = save_safetensors(tmp_path / "model.safetensors", TREE, max_shard_bytes=24)
    whole = files[0].read_bytes()
    for broken in (whole[:-3], b"", b"\xff" * 40):
        files[0].write_bytes(broken)
        with pytest.raises(WeightsReadError, match=r"00001-of.* cannot be read .*Copy it again"):
            TensorFiles(tmp_path)
    save_file({"other": np.ones(1)}, files[0])
    with pytest.raises(WeightsReadError, match=r"lacks the tensor 'decoder.bias', which the index"):
        TensorFiles(tmp_path)
    files[0].unlink()
    with pytest.raises(WeightsReadError, match=re.escape(f"from its folder: {files[0].name}")):
        TensorFiles(tmp_path)
    files[-1].write_text("{}", encoding="utf-8")
    with pytest.raises(WeightsReadError, match="cannot be read as the index"):
        TensorFiles(tmp_path)


EIGHT_BITS = (
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_numbers_of_eight_bits_are_those_of_the_package(name, tmp_path):
    dtype = np.dtype(getattr(ml_dtypes, name))
    tree = {"b": np.ones(3, "f4"), "a": np.array([[0.5, 1, 2], [4, 8, 16]]).astype(dtype)}
    tree["none"] = np.ones((2, 0), dtype)
    save_file(tree, tmp_path / "theirs.safetensors")
    (ours,) = save_safetensors(tmp_path / "ours.safetensors", jax.tree.map(jnp.asarray, tree))
    found = load_safetensors(tmp_path / "theirs.safetensors")
    theirs = dict(deserialize(ours.read_bytes()))
    for key, value in tree.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape
        assert found[key].tobytes() == theirs[key]["data"] == value.tobytes()
        assert theirs[key]["shape"] == list(value.shape)
    mesh = jax.make_mesh((3,), ("x",), devices=jax.devices()[:3])
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    target = {"a": jax.ShapeDtypeStruct((2, 3), dtype, sharding=sharding)}
    target |= {"b": tree["b"], "none": tree["none"]}
    placed = load_safetensors(ours, target)["a"]
    assert placed.sharding == sharding and np.asarray(placed).tobytes() == tree["a"].tobytes()


def test_numbers_of_four_bits_are_two_in_a_byte(tmp_path):
    # 0x21 is what PyTorch holds for [0.5, 1.0], of the codes 1 and 2.
    value = np.array([[0.5, 1.0], [1.5, -6.0]], ml_dtypes.float4_e2m1fn)
    (path,) = save_safetensors(tmp_path / "m.safetensors", {"a": value})
    assert path.read_bytes().endswith(b"\x21\xf3")
    with safe_open(path, framework="np") as file:
        part = file.get_slice("a")
        assert (part.get_dtype(), part.get_shape()) == ("F4", [2, 2])
    read = load_safetensors(path)["a"]
    assert read.dtype == value.dtype and read.astype("f4").tolist() == [[0.5, 1.0], [1.5, -6.0]]


@contextlib.contextmanager
def fifo(path):
    """Yields a FIFO whose reader gets nothing, so that one that waits for it does not wait for
    ever.
    """
    os.mkfifo(path)
    # A process and not a thread: a reader in Rust waits with the lock of the interpreter.
    writer = subprocess.Popen(["sh", "-c", ': > "$0"', str(path)])
    try:
        yield
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize("name", ["m.safetensors", "m.safetensors.index.json"])
def test_fifo_does_not_block(tmp_path, name):
    with (
        fifo(tmp_path / name),
        pytest.raises(WeightsReadError, match=r"is not a regular file"),
    ):
        load_safetensors(tmp_path / name)


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0], [2**63, 0]], ids=str)
def test_invalid_shape(tmp_path, shape):
    path = tmp_path / "m.safetensors"
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsReadError, match=r"'a' .* has the shape \[.*no array can have"):
        load_safetensors(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": ' * 100_000], ids=["list", "dict"])
def test_overly_nested_index(tmp_path, text):
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WeightsReadError, match="nested too deeply"):
        load_safetensors(path)


def test_bytes_are_the_same_each_time(tmp_path):
    tree = {"b": np.arange(3, dtype=">f4"), "a": np.ones((2, 0), np.int8), "c": jnp.bfloat16(2)}
    metadata = {name: f'"{name}" é\n' for name in "zyxwvutsrq"}
    files = set()
    for _ in range(5):
        (path,) = save_safetensors(tmp_path / "m.safetensors", tree, metadata=metadata)
        files.add(path.read_bytes())
    assert len(files) == 1
    with safe_open(path, framework="np") as file:
        assert file.metadata() == metadata
        assert file.get_tensor("b").tolist() == [0, 1, 2]
        assert file.get_tensor("a").shape == (2, 0)


def test_dtype_missing_in_numpy(tmp_path):
    path = tmp_path / "m.safetensors"
    header = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0")
    with TensorFiles(path) as files, pytest.raises(WeightsReadError, match=r"'a' .*dtype F6_E2M3"):
        files.read("a")
