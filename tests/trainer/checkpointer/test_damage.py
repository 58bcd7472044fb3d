"""Every file of a checkpoint, damaged in five ways: it is named, and the step is never loaded.

A checkpoint from a stranger, with a manifest that fits: reading it runs nothing.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.checkpoint_files import flip_a_bit_of, split
from weft.errors import DamagedCheckpointError, WeftError
from weft.trainer.checkpointer import (
    BestMetricPolicy,
    Checkpointer,
    CheckpointValidationType,
    EvalMetric,
    read_state_spec,
)
from weft.trainer.checkpointer.dirs import list_files
from weft.trainer.checkpointer.manifest import write_manifest


class Iterator:
    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def config(directory):
    metric = EvalMetric("valid", "accuracy")
    return Checkpointer.default_config().set(
        name="checkpointer",
        dir=str(directory),
        keep_last_n=5,
        save_policy=BestMetricPolicy.default_config().set(metric=metric),
    )


def state_of(step):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = np.random.default_rng(step).random((4, 200), np.float32)
    return {
        "w": jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data"))),
        "half": jnp.full((5,), step, jnp.bfloat16),
        "numpy": np.arange(step, step + 3),
        "unused": np.full(1000, step, np.float32),
        "key": jax.random.key(step),
        "it": Iterator(step),
        "next_step": step + 1,
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Saves checkpoints of the steps 1 and 2, and a copy of the second's files."""
    directory = tmp_path_factory.mktemp("whole")
    with config(directory).instantiate(parent=None) as checkpointer:
        for step in (1, 2):
            summaries = {"valid": {"accuracy": float(step)}}
            assert checkpointer.save(step=step, state=state_of(step), evaler_summaries=summaries)
    return directory


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << 4
    path.write_bytes(content)


def zero_a_block(path):
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half : half + 64] = bytes(len(content[half : half + 64]))
    path.write_bytes(content)


def replace_by_other_step(path):
    folder = Path(str(path.parent).replace("step_00000002", "step_00000001"))
    files = [file for file in folder.iterdir() if file.is_file()]
    # Files of array storage have names of their own in each step.
    same_size = [file for file in files if file.stat().st_size == path.stat().st_size]
    shutil.copyfile((same_size or files)[0], path)


WAYS = [truncate, flip_a_bit, zero_a_block, Path.unlink, replace_by_other_step]


@pytest.mark.parametrize("harm", WAYS, ids=lambda harm: harm.__name__)
def test_damaged_file_is_named_and_not_loaded(steps, harm, caplog):
    step_dir = steps / "step_00000002"
    paths = list_files(str(step_dir))
    assert {"index", "manifest.json", "save_policy.json"} <= set(paths)
    assert {"arrays/manifest.ocdbt", "arrays/ocdbt.process_0/manifest.ocdbt"} <= set(paths)
    harmless = []
    for path in paths:
        file = step_dir / path
        whole = file.read_bytes()
        harm(file)
        if file.exists() and file.read_bytes() == whole:
            harmless.append(path)
            continue
        caplog.clear()
        with config(steps).instantiate(parent=None) as checkpointer:
            target = state_of(0)
            step, restored = checkpointer.restore(state=target)
            (found,) = checkpointer.damaged_checkpoints
            assert step == 1, path
            check_is_of(restored, 1)
            assert any(line.startswith(f"{path}: ") for line in found.damage), found
            assert f"{path}: " in caplog.text
            with pytest.raises(DamagedCheckpointError, match=r"Restore another step: 1\."):
                checkpointer.restore(step=2, state=target)
            assert target["it"].position == 1  # nothing of the damaged one was taken
        file.write_bytes(whole)
    # Files that are equal in both steps, or end in zeros: nothing was damaged.
    assert len(harmless) < len(paths) / 2
    with config(steps).instantiate(parent=None) as checkpointer:
        step, restored = checkpointer.restore(state=state_of(0))
        assert (step, checkpointer.damaged_checkpoints) == (2, ())
        check_is_of(restored, 2)


def check_is_of(restored, step):
    expected = state_of(step)
    for name in ("w", "half", "numpy"):
        np.testing.assert_array_equal(restored[name], expected[name])
    assert restored["key"] == expected["key"]
    assert (restored["it"].position, restored["next_step"]) == (step, step + 1)


def test_directory_of_another_step_is_damage(steps, tmp_path):
    shutil.copytree(steps, tmp_path / "c")
    shutil.copytree(steps / "step_00000001", tmp_path / "c" / "step_00000003")
    with config(tmp_path / "c").instantiate(parent=None) as checkpointer:
        assert checkpointer.restore(state=state_of(0))[0] == 2
        (found,) = checkpointer.damaged_checkpoints
    assert found.damage == ("manifest.json: was written for step 1, not 3",)


def test_checkpoint_that_is_a_file_is_damage(steps, tmp_path):
    shutil.copytree(steps, tmp_path / "c")
    (tmp_path / "c" / "step_00000003").write_bytes(b"in the way")
    with config(tmp_path / "c").instantiate(parent=None) as checkpointer:
        assert checkpointer.restore(state=state_of(0))[0] == 2
        (found,) = checkpointer.damaged_checkpoints
    assert "is a file, where a folder was expected" in found.damage[0]


def test_damage_in_unused_arrays_is_detected(steps, tmp_path):
    shutil.copytree(steps, tmp_path / "c")
    flip_a_bit_of(tmp_path / "c" / "step_00000002", "unused/0")
    part = config(tmp_path / "c").set(validation=CheckpointValidationType.CONTAINS_STATE)
    with part.instantiate(parent=None) as checkpointer:
        step, _ = checkpointer.restore(state={"w": state_of(0)["w"]})
    assert step == 1


class SavedIterator:
    position = 1

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def stranger(tmp_path):
    """Saves a valid checkpoint for tests to modify; returns its config, directory and state."""
    metric = EvalMetric("valid", "accuracy")
    cfg = Checkpointer.default_config().set(
        name="checkpointer",
        dir=str(tmp_path / "c"),
        save_policy=BestMetricPolicy.default_config().set(metric=metric),
    )
    state = {"w": jnp.arange(6.0).reshape(2, 3), "it": SavedIterator(), "count": 1}
    with cfg.instantiate(parent=None) as checkpointer:
        checkpointer.save(step=1, state=state, evaler_summaries={"valid": {"accuracy": 1.0}})
    return cfg, Path(cfg.dir, "step_00000001"), state


def restore(cfg, state):
    with cfg.instantiate(parent=None) as checkpointer:
        return checkpointer.restore(state=state)


FILES = ["index", "save_policy.json", "arrays/w/.zarray", "arrays/w/0.0", "arrays/_METADATA"]
FILES += ["arrays/manifest.ocdbt"]
FILES += ["python/process_0_of_1/it.json"]


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("protocol", [0, 5])
def test_pickle_files_are_never_loaded(stranger, tmp_path, path, protocol):
    cfg, step_dir, state = stranger
    if path.startswith("arrays/w"):
        split(step_dir)
    proof = tmp_path / "proof"
    content = pickle.dumps(Payload(proof), protocol=protocol)
    (step_dir / path).write_bytes(content)
    write_manifest(str(step_dir), facts={"step": 1})
    if path == "arrays/_METADATA":  # nothing reads it
        restore(cfg, state)
    else:
        with pytest.raises(WeftError):
            restore(cfg, state)
    assert not proof.exists()
    pickle.loads(content)  # it would have
    assert proof.exists()


def with_header(step_dir, **changes):
    path = step_dir / "arrays" / "w" / ".zarray"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8"
    )


HEADERS = {
    "objects": {"dtype": "|O"},
    "a class": {"dtype": "os.system"},
    "a structure": {"dtype": [["f", "|O"]]},
    "no size": {"chunks": [0, 3]},
    "negative": {"chunks": [-1, 3]},
    "huge chunk": {"chunks": [2**40, 2**20]},
    "huge shape": {"shape": [2**40, 3]},
    "a filter": {"filters": [{"id": "pickle"}]},
    "text": {"shape": "x"},
    "no end": {"chunks": [float("inf"), 3]},
    "no separator": {"dimension_separator": None},
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_of_non_numeric_dtypes_are_rejected(stranger, header):
    cfg, step_dir, state = stranger
    split(step_dir)
    with_header(step_dir, **HEADERS[header])
    write_manifest(str(step_dir), facts={"step": 1})
    with pytest.raises(WeftError, match=r"arrays/w/"):
        restore(cfg, state)


@pytest.mark.parametrize("path", ["python/process_0_of_1/other.json", "arrays/other/0"])
def test_files_of_40_gigabytes_that_a_manifest_names_are_not_read(stranger, path):
    cfg, step_dir, state = stranger
    size = 40 * 10**9
    (step_dir / path).parent.mkdir(exist_ok=True)
    (step_dir / path).touch()
    write_manifest(str(step_dir), facts={"step": 1})
    os.truncate(step_dir / path, size)
    manifest = json.loads((step_dir / "manifest.json").read_text(encoding="utf-8"))
    del manifest["xxh3_128"]
    manifest["files"][path]["size"] = size
    digest = xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    text = json.dumps({**manifest, "xxh3_128": digest})
    (step_dir / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(DamagedCheckpointError, match=rf"{path}: .*ha(s|ve) 40,000,00\d,\d+ bytes"):
        restore(cfg, state)


def test_json_without_end(stranger):
    cfg, step_dir, state = stranger
    for name in ("index", "manifest.json", "python/process_0_of_1/it.json"):
        whole = (step_dir / name).read_text(encoding="utf-8")
        (step_dir / name).write_text("[" * 100_000, encoding="utf-8")
        if name != "manifest.json":
            write_manifest(str(step_dir), facts={"step": 1})
        with pytest.raises(WeftError, match=name.split("/")[-1]):
            restore(cfg, state)
        (step_dir / name).write_text(whole, encoding="utf-8")


def test_path_traversal_names_stay_inside(stranger, tmp_path):
    cfg, step_dir, _ = stranger
    np.save(tmp_path / "secret.npy", np.ones(3))
    index = json.loads((step_dir / "index").read_text(encoding="utf-8"))
    entry = {"shape": [3], "dtype": "float32", "spec": None}
    index["index"] = [["../../../secret.npy", entry]]
    (step_dir / "index").write_text(json.dumps(index), encoding="utf-8")
    write_manifest(str(step_dir), facts={"step": 1})
    assert list(read_state_spec(str(step_dir))) == [".."]
    target = {"..": {"..": {"..": {"secret.npy": jax.ShapeDtypeStruct((3,), jnp.float32)}}}}
    with pytest.raises(WeftError, match=r"arrays/%2E%2E-.*: is missing"):
        restore(cfg, target)
