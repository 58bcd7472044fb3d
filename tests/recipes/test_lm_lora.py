"""Adapters on an imported checkpoint: of a small Llama trained first, or of a given one."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from tests.strange_runs import on_one_device
from weft.cli import main
from weft.cli.configs import load_config, run_config
from weft.cli.trained_models import _export_adapter, find_tokenizer, restore_model
from weft.config import maybe_instantiate, to_text
from weft.errors import (
    CommandLineError,
    FrozenBaseError,
    HuggingFaceConfigError,
    WeightsReadError,
)
from weft.hierarchy.lora import base_state, merge_adapters, without_lora
from weft.input.tokenizers import HuggingFaceTokenizer
from weft.interop.huggingface import from_huggingface, to_huggingface
from weft.interop.huggingface.checkpoint import huggingface_model_config
from weft.recipes import lm_lora
from weft.serialization import save_safetensors
from weft.trainer import FrozenBaseBuilder, ImportedWeightsBuilder
from weft.trainer.lookup_checks import check_tokens

SMALL = {**lm_lora._LLAMA, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": i,
            "content": content,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, content in ((0, "<s>"), (1, "</s>"))
    ],
    "model": {
        "type": "WordLevel",
        "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3},
        "unk_token": "a",
    },
}


def checkpoint(folder, **values):
    """Returns the folder of a checkpoint of a small Llama, whose weights are all the same."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, **values}), encoding="utf-8")
    cfg = huggingface_model_config(folder)
    model = cfg.clone(name="model").instantiate(parent=None)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.1, x.dtype), shapes)
    to_huggingface(folder, cfg, params)
    return folder, cfg, params


@pytest.mark.long
def test_base_and_result_round_trip_through_export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lm_lora, "_LLAMA", SMALL)
    one_device = jax.devices()[:1]

    def train(name, cfg):
        assert name == "lm-llama"
        trainer = cfg.set(mesh_shape=(1, 1)).instantiate(parent=None, devices=one_device)
        trainer.init(quick_key(0))
        return trainer

    words = ["input.source.sequence_length=16", "input.source.global_batch_size=8", "evalers={}"]
    words += ["input.source.corpus.pattern=json/*.py", "max_step=2", "mesh_shape=1,1"]
    cfg = load_config("lm-lora", words)
    assert lm_lora.prepare(cfg, train)
    _, base = from_huggingface("runs/lm-llama/huggingface")
    cfg.instantiate(parent=None, devices=one_device).run()
    assert re.search(r"[\d,]+ parameters, [\d,]+ of them trained", capsys.readouterr().err)
    model, params = restore_model(run_config("runs/lm-lora"))
    jax.tree.map(np.testing.assert_array_equal, base_state(params), base)
    ups = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if "lora_up" in jax.tree_util.keystr(path)
    ]
    assert ups and all(np.abs(x).max() > 0 for x in ups)
    assert main(["export", "runs/lm-lora", "--to", "merged", "--merge"]) == 0
    merged = merge_adapters(model, params)
    jax.tree.map(np.testing.assert_array_equal, from_huggingface("merged")[1], merged)
    # Checkpoints do not hold the base; no other one is trained for a run that has saved.
    assert lm_lora.prepare(cfg, train=None)
    assert isinstance(cfg.init_state_builder, FrozenBaseBuilder.Config)
    (tmp_path / "runs/lm-llama").rename(tmp_path / "runs/away")
    with pytest.raises(FrozenBaseError, match=r"there is no 'runs/lm-llama/huggingface'"):
        restore_model(run_config("runs/lm-lora"))
    # Those of an earlier version do, and such a run continues without it.
    (tmp_path / "runs/away").rename(tmp_path / "runs/lm-llama")
    earlier = load_config("lm-lora", [*words, "dir=runs/earlier"])
    builder = ImportedWeightsBuilder.default_config().set(path=earlier.init_state_builder.path)
    earlier.set(init_state_builder=builder)
    earlier.instantiate(parent=None, devices=one_device).run(progress=False)
    (tmp_path / "runs/lm-llama").rename(tmp_path / "runs/away")
    capsys.readouterr()
    with on_one_device():
        assert main(["train", "lm-lora", *words, "dir=runs/earlier", "max_step=3"]) == 0
    assert "step 2" in capsys.readouterr().out
    cfg = run_config("runs/earlier")
    assert isinstance(cfg.init_state_builder, ImportedWeightsBuilder.Config)
    assert not isinstance(cfg.init_state_builder, FrozenBaseBuilder.Config)
    restore_model(cfg, step=3)


def test_stopped_base_run_ends_prepare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def train(name, cfg):
        asked.append((name, cfg.dir))

    assert not lm_lora.prepare(lm_lora.lm_lora(), train)
    assert asked == [("lm-llama", "runs/lm-llama")]


def test_existing_base_is_not_trained(tmp_path):
    folder, _, _ = checkpoint(tmp_path / "base")
    assert lm_lora.prepare(lm_lora.lm_lora(base=str(folder)), train=None)


def test_model_from_base(tmp_path):
    folder, cfg, _ = checkpoint(tmp_path / "base")
    run = load_config("lm-lora", [f"base={folder}", "seed=3"])
    assert run.seed == 3 and run.init_state_builder.path == str(folder)
    assert without_lora(run.model) == cfg
    assert run.model != cfg
    # As an export of Weft, which names its model.
    file = tmp_path / "base.safetensors"
    save_safetensors(file, {"a": np.ones(1)}, metadata={"model": to_text(cfg)})
    run = load_config("lm-lora", [f"base={file}"])
    assert without_lora(run.model) == cfg
    with pytest.raises(CommandLineError, match=r"is a file, and PEFT loads .*: --merge"):
        _export_adapter("adapter", run.model, {}, str(file))
    save_safetensors(file, {"a": np.ones(1)}, metadata={"model": to_text(run.model)})
    with pytest.raises(
        HuggingFaceConfigError, match=r"has adapters in addition to .* with --merge"
    ):
        load_config("lm-lora", [f"base={file}"])


def test_tokenizer_from_base(tmp_path):
    folder, _, _ = checkpoint(tmp_path / "base", vocab_size=4, eos_token_id=1, pad_token_id=None)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    run = lm_lora.lm_lora(base=str(folder))
    for source in (run.input.source, run.evalers["held_out"].input.source):
        tokenizer = maybe_instantiate(source.tokenizer)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        # The end pads too, since no token is meant for it; the input knows padding by its place.
        assert (tokenizer.eos_id, tokenizer.pad_id) == (1, 1)
    assert (run.model.decoder.eos_token_id, run.model.decoder.pad_token_id) == (1, 1)
    folder, _, _ = checkpoint(tmp_path / "base", vocab_size=4, eos_token_id=1, pad_token_id=0)
    assert lm_lora.lm_lora(base=str(folder)).model.decoder.pad_token_id == 0


@pytest.mark.parametrize("before", [(), ("<s>",)], ids=["plain", "bos"])
def test_documents_begin_as_the_template_of_the_base_says(before, tmp_path):
    folder, _, _ = checkpoint(tmp_path / "base", vocab_size=4, eos_token_id=1, pad_token_id=None)
    template = [{"SpecialToken": {"id": token, "type_id": 0}} for token in before]
    template += [{"Sequence": {"id": "A", "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    tokenizer = {**TOKENIZER, "post_processor": processor}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    run = lm_lora.lm_lora(base=str(folder))
    sources = [run.input.source, run.evalers["held_out"].input.source]
    assert [source.add_bos for source in sources] == [bool(before)] * 2
    check_tokens(run)
    expected = [0, 3] if before else [3]
    assert find_tokenizer(run).encode("b").tolist() == expected


def test_base_with_more_rows_than_its_tokenizer_has_ids(tmp_path):
    folder, _, _ = checkpoint(tmp_path / "base", vocab_size=40, eos_token_id=1, pad_token_id=33)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    decoder = lm_lora.lm_lora(base=str(folder)).model.decoder
    # No token has the id of the padding.
    assert (decoder.vocab_size, decoder.pad_token_id, decoder.eos_token_id) == (40, 1, 1)
    folder, _, _ = checkpoint(tmp_path / "base", vocab_size=40, eos_token_id=33, pad_token_id=0)
    with pytest.raises(HuggingFaceConfigError, match=r"eos_token_id=33, for which .* has no token"):
        lm_lora.lm_lora(base=str(folder))


def test_byte_vocabulary_uses_byte_tokenizer(tmp_path):
    folder, _, _ = checkpoint(tmp_path / "base")
    assert lm_lora.lm_lora(base=str(folder)).input.source.tokenizer is not None
    assert lm_lora.lm_lora(base=str(folder)).model.decoder.pad_token_id == 257


def test_unreadable_bases(tmp_path):
    with pytest.raises(WeightsReadError, match=r"away/config.json' cannot be read"):
        lm_lora.lm_lora(base=str(tmp_path / "away"))
    folder, _, _ = checkpoint(tmp_path / "base", vocab_size=9)
    with pytest.raises(HuggingFaceConfigError, match=r"no '.*tokenizer.json', .* of 9 tokens"):
        lm_lora.lm_lora(base=str(folder))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    (folder / "generation_config.json").unlink()  # has ends as well
    checkpoint(tmp_path / "base", vocab_size=9, eos_token_id=None)
    with pytest.raises(HuggingFaceConfigError, match=r"has no eos_token_id"):
        lm_lora.lm_lora(base=str(folder))
    file = tmp_path / "other.safetensors"
    save_safetensors(file, {"a": np.ones(1)})
    with pytest.raises(HuggingFaceConfigError, match=r"does not name its model"):
        lm_lora.lm_lora(base=str(file))
