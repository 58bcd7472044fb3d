"""The tree of a checkpoint, from the index that its directory holds."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from weft.cli import main
from weft.interop.huggingface import (
    folder_contents,
    huggingface_model_config,
    parameter_shapes,
    to_huggingface,
)
from weft.trainer.checkpointer import dirs
from weft.trainer.checkpointer.index import write_index_file
from weft.trainer.checkpointer.manifest import write_manifest

INDEX = [
    ("model/decoder/w", {"shape": [2, 3], "dtype": "bfloat16", "spec": ["data", ["a", "b"]]}),
    ("model/decoder/b", {"shape": [3], "dtype": "float32", "spec": [None]}),
    ("prng_key", {"shape": [], "dtype": "key<fry>", "spec": []}),
    ("input_iter", {"savable": "PrefetchingIterator"}),
    ("epoch", 3),
]


def save(run_dir, step, index=INDEX):
    directory = run_dir / "checkpoints" / f"step_{step:08d}"
    directory.mkdir(parents=True)
    write_index_file(ckpt_dir=str(directory), index=index)
    return directory


def test_prints_steps_and_tree_of_newest(tmp_path, capsys):
    write_manifest(str(save(tmp_path, 100, index=[])))
    save(tmp_path, 200)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    steps = [
        line for line in out.splitlines() if line.startswith("step ") and "checkpoints" in line
    ]
    assert "incomplete" not in steps[0] and "incomplete: its manifest is missing" in steps[1]
    assert lines["model"] == ["model", "24"]
    assert lines["w"] == ["w", "(2,", "3)", "bfloat16", "(data,", "a×b)", "12"]
    assert lines["b"] == ["b", "(3)", "float32", "12"]
    assert lines["prng_key"] == ["prng_key", "()", "key<fry>", "8"]
    assert lines["input_iter"] == ["input_iter", "PrefetchingIterator", "0"]
    assert lines["epoch"] == ["epoch", "3", "int", "0"]


def test_checkpoints_that_the_run_deletes_meanwhile_are_left_out(tmp_path, capsys, monkeypatch):
    first, _ = [save(tmp_path, step) for step in (100, 200)]
    list_files = dirs.list_files

    def list_and_delete(directory):
        files = list_files(directory)
        shutil.rmtree(first, ignore_errors=True)
        return files

    monkeypatch.setattr(dirs, "list_files", list_and_delete)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step_00000100" not in out and "step_00000200" in out


def test_directory_without_checkpoints_is_reported(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "there is no checkpoint in" in capsys.readouterr().err


def test_missing_directory_is_named(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", json.dumps({"version": 99, "index": []})])
def test_unreadable_index_is_reported(tmp_path, capsys, content):
    (save(tmp_path, 5) / "index").write_text(content, encoding="utf-8")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "cannot be read as the index" in capsys.readouterr().err


def test_arrays_are_not_loaded(tmp_path, capsys, monkeypatch):
    save(tmp_path, 5)
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert main(["inspect", str(tmp_path)]) == 0


def test_verify_checks_digest_of_every_file(tmp_path, capsys):
    for step in (100, 200, 300):
        write_manifest(str(save(tmp_path, step)), facts={"step": step})
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("reading up to ") and "; Ctrl-C stops\n" in out
    assert out.count("intact: 2 files") == 3 and "damaged" not in out.lower()

    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_00000300" / "index").write_text("[", encoding="utf-8")
    (checkpoints / "step_00000100" / "manifest.json").unlink()
    assert main(["inspect", str(tmp_path), "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0].endswith("DAMAGED") and lines[1] == "  manifest.json: is missing"
    assert "step 200" in lines[2] and "intact" in lines[2]
    assert lines[3].endswith("DAMAGED") and lines[4].startswith("  index: has 1 bytes instead of")
    assert lines[5].startswith("2 of 3 checkpoints are damaged. A resumed run skips them")


SETTINGS = {
    "model_type": "phi3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
UP = "model.layers.0…2.mlp.gate_up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder."""
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    cfg = huggingface_model_config(tmp_path, dtype="bfloat16")
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), parameter_shapes(cfg))
    to_huggingface(tmp_path, cfg, params, base=tmp_path)
    return tmp_path


def test_tensors_of_a_folder_and_their_parameters(folder, capsys):
    assert main(["inspect", str(folder), "--mesh", "fsdp=4,model=2"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"phi3  {folder}  21 tensors in 1 file, ")
    rows = [" ".join(line.split()) for line in lines]
    linear1 = "decoder.transformer.repeat.layer.feed_forward.linear1"
    shape = "(3, 16, 24) float32 (-, fsdp, model)"
    assert f"{UP} 0:24 BF16 {linear1}_0.weight {shape}" in rows
    assert f"{UP} 24:48 BF16 {linear1}_1.weight {shape}" in rows
    head = "lm_head.weight BF16 decoder.lm_head.weight (32, 16) float32 (model, fsdp)"
    assert head in rows and len(rows) == 13


def test_tensors_that_do_not_fit(folder, capsys):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    tensors["model.more.weight"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = np.zeros((33, 16), np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert main(["inspect", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[-4:]) == [
        "missing  model.norm.weight (16)",
        "shape  lm_head.weight (33, 16) in the file, (32, 16) wanted",
        "unexpected  model.more.weight (16)",
        "unused  model.layers.1.self_attn.rotary_emb.inv_freq (2)",
    ]
    contents = folder_contents(folder)
    assert contents.refused == ["model.more.weight"] and list(contents.missing) == [
        "model.norm.weight"
    ]


def test_options_of_folders_and_of_runs(folder, tmp_path, capsys):
    for options, message in (
        (["--verify"], "--verify checks the checkpoints of a run, and "),
        (["--mesh", "fsdp=-1"], "leaves a size to the devices of a run; write each size"),
        (["--mesh", "model=4"], "2 does not divide over model = 4 devices"),
    ):
        assert main(["inspect", str(folder), *options]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
    run = tmp_path / "run"
    save(run, 100)
    assert main(["inspect", str(run), "--mesh", "fsdp=2"]) == 2
    assert "--mesh shows the layouts of a Hugging Face folder, and" in capsys.readouterr().err
