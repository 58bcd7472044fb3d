"""Advice in errors, followed to the letter: what a message names exists, and ends in success."""

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.cli import main
from weft.cli.configs import load_config, parse_mesh
from weft.config import maybe_instantiate
from weft.errors import (
    CheckpointStateError,
    CommandLineError,
    CorpusReadError,
    InputReadError,
    UnserializableValueError,
    WeightsMismatchError,
    WeightsWriteError,
)
from weft.input import datasets, folder_corpus
from weft.serialization import (
    TensorFiles,
    load_safetensors,
    msgpack_serialize,
    save_safetensors,
    to_bytes,
)
from weft.trainer.checkpointer import Checkpointer
from weft.trainer.run_dir import check_run_dir

pytestmark = pytest.mark.usefixtures("one_device")


def message(kind, call, *args, **kwargs):
    """Returns the message of the error that a call raises."""
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    return str(error.value)


TEXT = "na\u00efve caf\u00e9\n" * 20
FILES = {
    "gzip": gzip.compress(TEXT.encode()),
    "bzip2": bz2.compress(TEXT.encode()),
    "xz": lzma.compress(TEXT.encode()),
    "utf-16": TEXT.encode("utf-16"),
    "latin": TEXT.encode("latin-1"),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_command_that_converts_a_file_to_text(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    error = message(CorpusReadError, folder_corpus, str(tmp_path))
    command = re.search(r"for example with `(.*?) <old >new`", error)[1].split()
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on this machine")
    with open(tmp_path / "a.txt", "rb") as old, open(tmp_path / "new", "wb") as new:
        subprocess.run(command, stdin=old, stdout=new, check=True)
    os.replace(tmp_path / "new", tmp_path / "a.txt")
    files = folder_corpus(str(tmp_path)).files
    assert b"".join(file.text for file in files) == TEXT.encode()


def test_name_of_the_text_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    records = [json.dumps({"content": f"A text, number {i}. " * 9}) for i in range(40)]
    (tmp_path / "notes.jsonl").write_text("\n".join(records), encoding="utf-8")
    assert main(["train", "lm-tiny", "data_dir=notes.jsonl", "max_step=1"]) == 1
    found = re.search(r"it has \['(\w+)'\]; name one of these as (\w+)", capsys.readouterr().err)
    field, name = found.groups()
    cfg = load_config("lm-tiny", ["data_dir=notes.jsonl", f"{name}={field}"])
    for source in (cfg.input.source, cfg.evalers["held_out"].input.source):
        assert len(maybe_instantiate(source.corpus).files) == 40


def test_name_of_a_table_that_is_text(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n", encoding="utf-8")
    error = message(InputReadError, folder_corpus, str(tmp_path))
    assert "convert it to JSON lines or Parquet, leave it out, or call it .txt" in error
    os.rename(tmp_path / "a.csv", tmp_path / "a.txt")
    assert folder_corpus(str(tmp_path)).files[0].text == b"a,b\n"


def test_reader_of_a_file(tmp_path):
    (tmp_path / "a.ndjson").write_text('{"text": "a"}\n', encoding="utf-8")
    path = str(tmp_path / "a.ndjson")
    for wrong in (datasets.text_dataset, datasets.parquet_dataset):
        error = message(InputReadError, wrong, path)
        reader = getattr(datasets, re.search(r"is read with (\w+)", error)[1])
        assert reader(path)[0] == {"text": "a"}


def test_pattern_of_the_files_in_a_folder(tmp_path):
    folder = tmp_path / "data [2024]*"
    folder.mkdir()
    (folder / "a[1].txt").write_text("a", encoding="utf-8")
    error = message(InputReadError, datasets.text_dataset, str(folder))
    pattern = re.search(r"such as '(.*)'", error)[1]
    assert datasets.text_dataset(pattern)[0] == {"text": b"a"}


def test_dtypes_of_safetensors(tmp_path):
    path, value = tmp_path / "m.safetensors", jnp.ones(3, jnp.float8_e3m4)
    error = message(WeightsWriteError, save_safetensors, path, {"w": value})
    names = re.search(r"Convert it to one of (.*)\.$", error)[1].split(", ")
    assert "float8_e4m3fn" in names and "bfloat16" in names
    for name in names:
        converted = np.ones(4).astype(jnp.dtype(name))
        save_safetensors(path, {"w": converted})
        assert load_safetensors(path)["w"].dtype == converted.dtype
    odd = {"w": np.ones(3, jnp.float4_e2m1fn)}
    error = message(WeightsWriteError, save_safetensors, path, odd)
    other = re.search(r"or convert it to (\w+)\.", error)[1]
    save_safetensors(path, {"w": odd["w"].astype(other)})


def test_names_and_casts_of_safetensors(tmp_path):
    tree = {"w": np.ones(2, np.float32)}
    error = message(WeightsWriteError, save_safetensors, tmp_path / "m", tree)
    suffix = re.search(r"does not end in '(.*)'. Add it", error)[1]
    path = f"{tmp_path / 'm'}{suffix}"
    save_safetensors(path, tree)
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    error = message(WeightsMismatchError, load_safetensors, path, target)
    assert error.endswith("Give cast=True to convert them.")
    assert load_safetensors(path, target, cast=True)["w"].dtype == jnp.bfloat16
    key = {"key": jax.random.key(0)}
    assert "`jax.random.key_data`" in message(WeightsWriteError, save_safetensors, path, key)
    save_safetensors(path, {"key": jax.random.key_data(key["key"])})


def test_names_that_no_nested_dict_has(tmp_path):
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": np.ones(1), "a.b": np.ones(2)})
    error = message(WeightsMismatchError, load_safetensors, path)
    assert "Give a target, or read it with TensorFiles" in error
    target = {"a": jax.ShapeDtypeStruct((1,), "f8"), "a.b": jax.ShapeDtypeStruct((2,), "f8")}
    assert load_safetensors(path, target, cast=True)["a.b"].shape == (2,)
    with TensorFiles(path) as files:
        assert files.read("a").shape == (1,)


def test_strings_in_a_checkpoint(tmp_path):
    cfg = Checkpointer.default_config().set(name="checkpointer", dir=str(tmp_path))
    names = np.array(["a", "b"])
    with cfg.instantiate(parent=None) as checkpointer:
        error = message(
            CheckpointStateError, checkpointer.save, step=1, state={"names": names}, force=True
        )
        assert "Put texts into the state as Python strings" in error
        state = {"names": names.tolist()}
        checkpointer.save(step=2, state=state, force=True)
        checkpointer.wait_until_finished()
        assert checkpointer.restore(step=2, state=state) == (2, state)


VALUES = {
    "large": (2**70, "store it as a string", msgpack_serialize, str),
    "tuple": ((1, 2), "use to_bytes for trees of other types", to_bytes, tuple),
    "name": ({(1, 2): 3}, "use to_bytes or to_state_dict, which make", to_bytes, dict),
}


@pytest.mark.parametrize(("value", "advice", "call", "change"), VALUES.values(), ids=VALUES)
def test_values_as_bytes(value, advice, call, change):
    assert advice in message(UnserializableValueError, msgpack_serialize, value)
    assert call(change(value))


def test_options_of_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    error = message(CommandLineError, parse_mesh, "4,2")
    assert parse_mesh(re.search(r"write it as --mesh (\S+)\.", error)[1])
    assert main(["train", "lm-tiny", "--max-step=3"]) == 2
    override = re.search(r"is set by (\S+?)\.?$", capsys.readouterr().err.strip())[1]
    assert load_config("lm-tiny", [override]).max_step == 3


def test_name_of_a_run_directory(tmp_path):
    cfg = load_config("lm-tiny", [f"dir={tmp_path / os.fsdecode(b'caf' + bytes([0xE9]))}"])
    assert "Choose a path of ASCII characters" in message(ValueError, check_run_dir, cfg)
    check_run_dir(cfg.set(dir=str(tmp_path / "cafe")))
