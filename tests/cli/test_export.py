"""`weft export`: from a run's checkpoint to files that other programs read."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import weft
from weft import linen
from weft.cli import main
from weft.cli.configs import load_config
from weft.config import config_for_class, from_text, to_text
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.lora import merge_adapters, set_lora_recursively
from weft.input.tokenizers import HuggingFaceTokenizer
from weft.interop.huggingface import from_huggingface, huggingface_model_config
from weft.trainer.run_dir import claim_run_dir
from weft.trainer.state_builder import ImportedWeightsBuilder

pytestmark = pytest.mark.usefixtures("one_device")

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 264,
    "tie_word_embeddings": True,
    "max_position_embeddings": 77,
    "eos_token_id": [0, 1],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the directory of a run of a small Qwen with adapters, with two saved steps."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}', encoding="utf-8")
    cfg = load_config("lm-tiny", [f"dir={folder / 'lora'}"])
    cfg.model = huggingface_model_config(folder)
    cfg.init_state_builder = ImportedWeightsBuilder.default_config().set(path=str(folder))
    set_lora_recursively(cfg.model, rank=2, alpha=4.0)
    cfg.input.source.set(
        tokenizer=config_for_class(HuggingFaceTokenizer).set(path=str(folder / "tokenizer.json"))
    )
    claim_run_dir(cfg)
    model = cfg.model.set(name="model").instantiate(parent=None)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    saver = cfg.checkpointer.set(name="saver", dir=f"{cfg.dir}/checkpoints")
    with saver.instantiate(parent=None) as checkpointer:
        for step in (1, 2):
            params = jax.tree.map(lambda x, v=step / 8: jnp.full(x.shape, v, x.dtype), shapes)
            checkpointer.save(step=step, state={"model": params}, force=True)
    return cfg.dir, model, params


def export(*arguments):
    return main(["export", *map(str, arguments)])


def test_safetensors_hold_the_parameters_and_the_config(run, tmp_path, capsys):
    directory, _, params = run
    path = tmp_path / "m.safetensors"
    assert export(directory, "--to", path) == 0
    assert capsys.readouterr().out.startswith(f"{path}  ")
    there = load_file(path)
    assert len(there) == len(jax.tree.leaves(params))
    assert there["decoder.emb.token_emb.weight"].mean() == 2 / 8
    with safe_open(path, "np") as file:
        model = from_text(file.metadata()["model"])
    assert isinstance(model, Model.Config)
    assert export(directory, "--to", path, "--step", 1, "--dtype", "bfloat16") == 0
    there = load_file(path)["decoder.emb.token_emb.weight"]
    assert there.dtype == ml_dtypes.bfloat16 and there.astype("f4").mean() == 1 / 8


def test_adapters_are_merged_on_request(run, tmp_path):
    directory, model, params = run
    path = tmp_path / "m.safetensors"
    assert export(directory, "--to", path, "--merge") == 0
    there = load_file(path)
    merged = merge_adapters(model, params)
    assert len(there) == len(jax.tree.leaves(merged)) and not any("adapter" in k for k in there)
    name = "decoder.transformer.repeat.layer.feed_forward.linear2.weight"
    layer = merged["decoder"]["transformer"]["repeat"]["layer"]
    np.testing.assert_allclose(there[name], layer["feed_forward"]["linear2"]["weight"])
    with safe_open(path, "np") as file:
        assert "Lora" not in file.metadata()["model"]


def test_hugging_face_checkpoint_is_merged_and_has_the_tokenizer(run, tmp_path):
    directory, model, params = run
    assert export(directory, "--to", tmp_path / "hf", "--max-file-gb", "0.00001") == 0
    names = sorted(file.name for file in (tmp_path / "hf").iterdir())
    assert names[0] == "config.json" and names[-2:] == ["tokenizer.json", "tokenizer_config.json"]
    assert "model.safetensors.index.json" in names
    cfg, read = from_huggingface(tmp_path / "hf")
    merged = merge_adapters(model, params)
    jax.tree.map(np.testing.assert_array_equal, read, merged)
    values = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert values == QWEN
    assert to_text(cfg) == to_text(huggingface_model_config(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "m.safetensors", "--dtype", "int8"], "--dtype='int8' is not one of float32, bf"),
        (["--to", "m.safetensors", "--max-file-gb", "0"], "--max-file-gb=0 is too small"),
        (["--to", "file"], "--to='file' is a file. Name a folder"),
        (
            ["--to", "out/x.pt"],
            "--to='out/x.pt': files in the form .pt are not written. Name a file that ends in "
            ".safetensors, such as out/x.safetensors, or a folder for a Hugging Face checkpoint, "
            "such as out/x.",
        ),
        (["--to", "m.safetensors", "--step", "3"], "no checkpoint of step 3"),
    ],
    ids=["dtype", "size", "file", "form", "step"],
)
def test_invalid_export(run, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert export(run[0], *arguments) == 2
    assert message in capsys.readouterr().err


def test_unsupported_hugging_face_model(tmp_path, capsys, run):
    cfg = load_config(run[0]).set(dir=str(tmp_path / "run"))
    cfg.model.decoder.emb.soft_cap_logits = 3.0
    claim_run_dir(cfg)
    shutil.copytree(f"{run[0]}/checkpoints", tmp_path / "run" / "checkpoints")
    assert export(tmp_path / "run", "--to", tmp_path / "hf") == 2
    assert "decoder.emb.soft_cap_logits: 3.0 → None" in capsys.readouterr().err


def test_export_without_the_base(run, tmp_path, caplog):
    cfg = load_config(run[0]).set(dir=str(tmp_path / "run"))
    cfg.init_state_builder.path = str(tmp_path / "gone")
    claim_run_dir(cfg)
    shutil.copytree(f"{run[0]}/checkpoints", tmp_path / "run" / "checkpoints")
    assert export(tmp_path / "run", "--to", tmp_path / "hf") == 0
    (message,) = caplog.messages
    assert "gone, with which the run began, is not there" in message and "Put it there" in message
    values = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert values["max_position_embeddings"] == 32  # the length of the run's sequences
    assert values["eos_token_id"] == [0, 1]


def test_same_weights_export_to_the_same_bytes(run, tmp_path):
    directory, _, _ = run
    for name in ("a", "b"):
        assert export(directory, "--to", tmp_path / name / "m.safetensors") == 0
        assert export(directory, "--to", tmp_path / name / "hf") == 0
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*")]
    assert len(files) == 5
    for file in files:
        first, second = (tmp_path / name / file for name in ("a", "b"))
        assert first.read_bytes() == second.read_bytes(), file
        # As of any other new file.
        (tmp_path / "new").touch()
        assert first.stat().st_mode == (tmp_path / "new").stat().st_mode, file


def test_private_file_in_place_of_the_tokenizer_is_not_copied(run, tmp_path, capsys):
    directory, _, _ = run
    copy = shutil.copytree(pathlib.Path(directory).parent, tmp_path / "copy")
    # It looks like a tokenizer, as the weights of a private model come with.
    (tmp_path / "private.json").write_text((copy / "tokenizer.json").read_text("utf-8"), "utf-8")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").symlink_to(tmp_path / "private.json")
    config = copy / "lora" / "config.txt"
    config.write_text(
        config.read_text(encoding="utf-8").replace(str(pathlib.Path(directory).parent), str(copy)),
        encoding="utf-8",
    )
    assert export(copy / "lora", "--to", tmp_path / "hf") == 2
    assert (
        "tokenizer.json' is a symbolic link, where a file was expected" in capsys.readouterr().err
    )
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


def test_best_step_of_a_run_of_fit(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    labels = np.arange(24) % 3
    # With these labels, the model gets worse at each step.
    result = weft.fit(
        linen.Dense(3), (x, labels), "cross_entropy", steps=6, batch_size=8, learning_rate=0.1,
        validation=(x, (labels + 1) % 3), evaluate_every=2, progress=False,
        dir=str(tmp_path / "run"),
    )  # fmt: skip
    assert result.best.step < result.last.step
    path = str(tmp_path / "best.safetensors")
    assert main(["export", str(tmp_path / "run"), "--to", path, "--step", "best"]) == 0
    best, last = result.best.variables["params"], result.last.variables["params"]
    (exported,) = (value for name, value in load_file(path).items() if name.endswith("kernel"))
    np.testing.assert_array_equal(exported, best["kernel"])
    assert not np.array_equal(exported, last["kernel"])
    assert main(["export", str(tmp_path / "run"), "--to", path, "--step", "worst"]) == 2
    assert "'worst' is neither the number of a step nor 'best'" in capsys.readouterr().err
