"""A checkpoint from a stranger, with a manifest that fits: reading it runs nothing."""

import json
import os
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import WeftError
from weft.trainer.checkpoint_manifest import write_manifest
from weft.trainer.checkpointer import (
    BestMetricPolicy,
    Checkpointer,
    EvalMetric,
    read_state_spec,
)


class Iterator:
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
    """Whole but for what a test puts in; the state that it is restored to."""
    metric = EvalMetric("valid", "accuracy")
    cfg = Checkpointer.default_config().set(
        name="checkpointer",
        dir=str(tmp_path / "c"),
        save_policy=BestMetricPolicy.default_config().set(metric=metric),
    )
    state = {"w": jnp.arange(6.0).reshape(2, 3), "it": Iterator(), "count": 1}
    with cfg.instantiate(parent=None) as checkpointer:
        checkpointer.save(step=1, state=state, evaler_summaries={"valid": {"accuracy": 1.0}})
    return cfg, Path(cfg.dir, "step_00000001"), state


def restore(cfg, state):
    with cfg.instantiate(parent=None) as checkpointer:
        return checkpointer.restore(state=state)


FILES = ["index", "save_policy.json", "arrays/w/.zarray", "arrays/w/0.0", "arrays/_METADATA"]
FILES += ["python/process_0_of_1/it.json"]


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("protocol", [0, 5])
def test_a_pickle_in_the_place_of_any_file_is_never_loaded(stranger, tmp_path, path, protocol):
    cfg, step_dir, state = stranger
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
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


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
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_ask_for_more_than_numbers_are_refused(stranger, header):
    cfg, step_dir, state = stranger
    with_header(step_dir, **HEADERS[header])
    write_manifest(str(step_dir), facts={"step": 1})
    with pytest.raises(WeftError, match=r"arrays/w/"):
        restore(cfg, state)


def test_json_without_end(stranger):
    cfg, step_dir, state = stranger
    for name in ("index", "manifest.json", "python/process_0_of_1/it.json"):
        whole = (step_dir / name).read_text()
        (step_dir / name).write_text("[" * 100_000)
        if name != "manifest.json":
            write_manifest(str(step_dir), facts={"step": 1})
        with pytest.raises(WeftError, match=name.split("/")[-1]):
            restore(cfg, state)
        (step_dir / name).write_text(whole)


def test_names_that_lead_out_of_the_directory_are_only_names(stranger, tmp_path):
    cfg, step_dir, _ = stranger
    np.save(tmp_path / "secret.npy", np.ones(3))
    index = json.loads((step_dir / "index").read_text())
    entry = {"shape": [3], "dtype": "float32", "spec": None}
    index["index"] = [["../../../secret.npy", entry]]
    (step_dir / "index").write_text(json.dumps(index))
    write_manifest(str(step_dir), facts={"step": 1})
    assert list(read_state_spec(str(step_dir))) == [".."]
    target = {"..": {"..": {"..": {"secret.npy": jax.ShapeDtypeStruct((3,), jnp.float32)}}}}
    with pytest.raises(WeftError, match=r"arrays/%2E%2E-.*: is missing"):
        restore(cfg, target)
