"""Folders written by `transformers`, read and written again: unchanged, and after a step."""

import json
import os
import shutil
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft
from tests.interop.huggingface.test_checkpoint import (
    GPT2,
    GROUPED,
    IDS,
    TEXT,
    edit_json,
    greedy_of,
    instantiate,
    read_json,
    save_tokenizer,
)
from weft.cli import main
from weft.errors import WeightsReadError, WeightsWriteError
from weft.generation.generator import language_model
from weft.hierarchy.module import functional
from weft.interop.huggingface import from_huggingface, to_huggingface

FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
}
OTHER_FILES = {
    "added_tokens.json": '{"auto_map": 3}',  # a token
    "special_tokens_map.json": '{"eos_token": "</s>"}\n\n',
    "vocab.json": '{ "a": 0, "é": 1 }',
    "merges.txt": "#version: 0.2\na b\n",
    "tokenizer.model": "a model of SentencePiece",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}
# As transformers 4 wrote them.
OLD_NAMES = {
    "rope_theta": 10000,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-05,
}


@pytest.fixture(scope="module")
def transformers():
    if sys.version_info >= (3, 12):
        pytest.importorskip("transformers", reason="torch's CPU build is there for Python 3.11")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        # torch and transformers warn of each other's and their own older names.
        for kind in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        import torch
        import transformers

        for architecture, config, _ in FAMILIES.values():  # imported when asked for
            _ = getattr(transformers, architecture), getattr(transformers, config)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def bases(transformers, tmp_path_factory):
    """Returns a folder per family, in bfloat16, with every kind of file."""
    import torch

    folders = {}
    for name, (architecture, config, settings) in FAMILIES.items():
        torch.manual_seed(0)
        model = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        folder = tmp_path_factory.mktemp(name)
        model.to(torch.bfloat16).save_pretrained(folder)
        save_tokenizer(folder)
        for file_name, text in OTHER_FILES.items():
            path = folder / file_name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        edit_json(
            folder / "config.json", eos_token_id=[2, 3], bos_token_id=1, of_theirs={"a": [1, "é"]}
        )
        edit_json(folder / "generation_config.json", eos_token_id=[3, 2], top_p=0.9)
        folders[name] = folder
    values = read_json(folders["llama"] / "config.json")
    del values["rope_parameters"], values["dtype"]
    text = json.dumps({**values, **OLD_NAMES})
    (folders["llama"] / "config.json").write_text(text, encoding="utf-8")
    return folders


def file_names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", FAMILIES)
def test_unchanged_base_is_written_in_the_same_bytes(bases, name, tmp_path):
    base = bases[name]
    cfg, params = from_huggingface(base)
    files = to_huggingface(tmp_path, cfg, params, base=base)
    assert len(files) == len(file_names(tmp_path))
    assert file_names(tmp_path) == file_names(base)
    for file_name in file_names(base):
        assert (tmp_path / file_name).read_bytes() == (base / file_name).read_bytes(), file_name


def changed(params):
    """Returns parameters with another value everywhere, as after a step of training."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + rng.uniform(0.01, 0.05, size=x.shape).astype(np.float32), params
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_changed_base_is_the_same_model_in_transformers(bases, transformers, name, tmp_path):
    base = bases[name]
    cfg, params = from_huggingface(base)
    trained = changed(params)
    to_huggingface(tmp_path, cfg, trained, base=base)
    assert file_names(tmp_path) == file_names(base)
    for file_name in file_names(base):
        is_same = (tmp_path / file_name).read_bytes() == (base / file_name).read_bytes()
        assert is_same == (file_name != "model.safetensors"), file_name
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), trained)
    read_cfg, read = from_huggingface(tmp_path)
    assert read_cfg == cfg
    jax.tree.map(np.testing.assert_array_equal, read, rounded)

    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path)
    assert str(theirs.dtype) == "torch.bfloat16" and theirs.generation_config.top_p == 0.9
    theirs = theirs.float().eval()
    expected = greedy_of(theirs, IDS[:, :5])
    # Greedy text is text whose every token is the likeliest one.
    outputs, _ = jax.jit(
        lambda params: functional(
            instantiate(cfg),
            prng_key=None,
            state=params,
            inputs={"input_batch": {"input_ids": jnp.asarray(expected)}},
            method="extract_logits",
            is_training=False,
        )
    )(read)
    np.testing.assert_array_equal(outputs[:, 4:-1].argmax(-1), expected[:, 5:])


def copied(base, folder, **settings):
    shutil.copytree(base, folder)
    edit_json(folder / "config.json", **settings)
    return folder


def test_dtypes_are_those_of_the_base_or_asked_for(bases, tmp_path):
    base = copied(bases["qwen2"], tmp_path / "base", dtype="float16")
    tensors = load_file(base / "model.safetensors")
    # Norms in float32, and a name without the prefix of the family.
    tensors = {
        name.removeprefix("model."): x.astype("f4") if "norm" in name else x
        for name, x in tensors.items()
    }
    save_file(tensors, base / "model.safetensors")
    cfg, params = from_huggingface(base)
    out = tmp_path / "out"
    to_huggingface(out, cfg, params, base=base)
    written = load_file(out / "model.safetensors")
    assert {name.removeprefix("model."): x.dtype for name, x in written.items()} == {
        name: x.dtype for name, x in tensors.items()
    }
    settings = read_json(out / "config.json")
    assert settings["dtype"] == "bfloat16" and "torch_dtype" not in settings
    to_huggingface(out, cfg, params, base=base, dtype=jnp.float32)
    assert {str(x.dtype) for x in load_file(out / "model.safetensors").values()} == {"float32"}
    assert read_json(out / "config.json")["dtype"] == "float32"
    # Without a base, under the names of new and old readers.
    to_huggingface(tmp_path / "alone", cfg, jax.tree.map(lambda x: x.astype("bfloat16"), params))
    settings = read_json(tmp_path / "alone" / "config.json")
    assert settings["dtype"] == settings["torch_dtype"] == "bfloat16"


def test_value_too_large_for_its_dtype(bases, tmp_path):
    cfg, loaded = from_huggingface(bases["qwen2"], dtype=jnp.bfloat16)
    params: Any = loaded
    params["decoder"]["output_norm"]["scale"] = jnp.full(16, 1e5, jnp.bfloat16)
    message = r"'model.norm.weight' has values of up to 99840, which float16 cannot hold. Write it"
    with pytest.raises(WeightsWriteError, match=message):
        to_huggingface(tmp_path, cfg, params, dtype=jnp.float16)


def test_large_weights_are_split(bases, transformers, tmp_path):
    base = bases["qwen3"]
    cfg, params = from_huggingface(base)
    to_huggingface(tmp_path, cfg, params, base=base, max_shard_bytes=4000)
    index = read_json(tmp_path / "model.safetensors.index.json")
    tensors = load_file(base / "model.safetensors")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and all(path.stat().st_size < 4000 + 2000 for path in shards)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(base)
    for name, value in expected.state_dict().items():
        assert (model.state_dict()[name] == value).all()


def attention_of(cfg: Any) -> Any:
    return cfg.decoder.transformer.layer.self_attention.attention


def rope_of(cfg):
    return attention_of(cfg).input_linear.rope_pos_emb_layer


def test_changed_rope_settings_keep_their_names(bases, tmp_path):
    cfg, params = from_huggingface(bases["llama"])
    other = cfg.clone()
    rope_of(other).theta = 5e4
    to_huggingface(tmp_path, other, params, base=bases["llama"])
    before, after = (read_json(x / "config.json") for x in (bases["llama"], tmp_path))
    assert after == {**before, "rope_theta": 5e4}
    assert from_huggingface(tmp_path)[0] == other
    # From no scaling, in new names.
    plain = copied(bases["qwen2"], tmp_path / "plain")
    to_huggingface(tmp_path / "out", *with_rope(plain, rope_of(other)), base=plain)
    rope = {"rope_theta": 5e4, "rope_type": "linear", "factor": 2.0}
    before, after = (read_json(x / "config.json") for x in (plain, tmp_path / "out"))
    assert after == {**before, "rope_parameters": rope}
    # And where the base has none.
    values = read_json(plain / "config.json")
    del values["rope_parameters"]
    (plain / "config.json").write_text(json.dumps(values), encoding="utf-8")
    to_huggingface(tmp_path / "out", *with_rope(plain, rope_of(other)), base=plain)
    after = read_json(tmp_path / "out" / "config.json")
    assert after["rope_parameters"] == rope and after["rope_theta"] == 5e4
    assert after["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def with_rope(folder, rope):
    cfg, params = from_huggingface(folder)
    attention_of(cfg).input_linear.rope_pos_emb_layer = rope
    return cfg, params


def test_base_without_padding_gets_none(bases, tmp_path):
    cfg, params = from_huggingface(bases["mistral"])
    assert cfg.decoder.pad_token_id == -1
    cfg.decoder.pad_token_id = 2  # as inputs need one
    to_huggingface(tmp_path, cfg, params, base=bases["mistral"])
    assert read_json(tmp_path / "config.json")["pad_token_id"] is None
    assert "pad_token_id" not in read_json(tmp_path / "generation_config.json")
    base = copied(bases["mistral"], tmp_path / "base", pad_token_id=0)
    to_huggingface(tmp_path / "out", cfg, params, base=base)
    assert read_json(tmp_path / "out" / "config.json")["pad_token_id"] == 2
    assert read_json(tmp_path / "out" / "generation_config.json")["pad_token_id"] == 2


def test_model_of_another_family_than_the_base(bases, transformers, tmp_path):
    cfg, params = from_huggingface(bases["mistral"])
    llama_cfg, _ = from_huggingface(bases["llama"])
    attention_of(cfg).mask = attention_of(llama_cfg).mask
    to_huggingface(tmp_path, cfg, params, base=bases["mistral"])
    settings = read_json(tmp_path / "config.json")
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["dtype"] == "bfloat16"
    assert settings["max_position_embeddings"] == 64 and settings["eos_token_id"] == [2, 3]
    assert "of_theirs" not in settings and settings["bos_token_id"] == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_architecture_without_logits_is_replaced(bases, tmp_path):
    base = copied(bases["gpt2"], tmp_path / "base", architectures=["GPT2Model"], n_inner=64)
    cfg, params = from_huggingface(base)
    to_huggingface(tmp_path / "out", cfg, params, base=base)
    values = read_json(base / "config.json")
    assert read_json(tmp_path / "out" / "config.json") == {
        **values,
        "architectures": ["GPT2LMHeadModel"],
    }


def test_folder_of_templates_is_data(bases, tmp_path):
    base = copied(bases["qwen2"], tmp_path / "base")
    cfg, params = from_huggingface(base)
    templates = base / "additional_chat_templates"
    (templates / "notes.txt").write_text("no template", encoding="utf-8")
    files = to_huggingface(tmp_path / "out", cfg, params, base=base)
    assert not any(file.name == "notes.txt" for file in files)
    for i in range(100):
        (templates / f"{i}.jinja").touch()
    with pytest.raises(WeightsReadError, match=r"it has 102 files; at most 100 are copied"):
        to_huggingface(tmp_path / "out", cfg, params, base=base)
    shutil.rmtree(templates)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.jinja").write_text("secret", encoding="utf-8")
    templates.symlink_to(tmp_path / "private")
    with pytest.raises(WeightsReadError, match=r"additional_chat_templates'.* is a symbolic link"):
        to_huggingface(tmp_path / "out", cfg, params, base=base)
    templates.unlink()
    (base / "vocab.json").write_text("[]", encoding="utf-8")
    with pytest.raises(WeightsReadError, match=r"vocab.json' cannot be read .*not a JSON object"):
        to_huggingface(tmp_path / "out", cfg, params, base=base)


@pytest.mark.usefixtures("one_device")
def test_run_from_a_base_is_exported_with_all_files(bases, transformers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = copied(bases["llama"], tmp_path / "base")
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_text(TEXT * 4, encoding="utf-8")
    arguments = ["base=base", "data_dir=texts", "dir=run", "steps=1", "batch_size=2"]
    assert main(["train", "lm-lora", *arguments]) == 0
    assert main(["export", "run", "--to", "out", "--merge"]) == 0
    out = tmp_path / "out"
    assert file_names(out) == file_names(base)
    for file_name in file_names(base):
        is_same = (out / file_name).read_bytes() == (base / file_name).read_bytes()
        assert is_same == (file_name != "model.safetensors"), file_name
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == "torch.bfloat16" and model.config.pad_token_id is None
    assert main(["export", "run", "--to", "wide", "--merge", "--dtype", "float32"]) == 0
    assert read_json(tmp_path / "wide" / "config.json")["torch_dtype"] == "float32"


def test_files_of_an_earlier_export_do_not_stay(bases, tmp_path):
    cfg, params = from_huggingface(bases["qwen2"])
    to_huggingface(tmp_path, cfg, params, base=bases["qwen2"])
    plain = copied(bases["qwen2"], tmp_path / "plain")
    for name in (*OTHER_FILES, "generation_config.json"):
        (plain / name).unlink()
    (tmp_path / "README.md").touch()
    to_huggingface(tmp_path, cfg, params, base=plain)
    names = {name for name in file_names(tmp_path) if not name.startswith("plain/")}
    assert names == {*file_names(plain), "README.md"}
    # Without a tokenizer, one that was put there stays; a folder can be its own base.
    to_huggingface(tmp_path, cfg, params)
    assert (tmp_path / "tokenizer.json").exists() and (tmp_path / "generation_config.json").exists()
    before = {name: (plain / name).read_bytes() for name in file_names(plain)}
    to_huggingface(plain, cfg, params, base=plain)
    assert {name: (plain / name).read_bytes() for name in file_names(plain)} == before


def test_large_template_is_refused(bases, tmp_path):
    base = copied(bases["qwen2"], tmp_path / "base")
    cfg, params = from_huggingface(base)
    (base / "chat_template.jinja").write_text(" " * 2**21, encoding="utf-8")
    with pytest.raises(WeightsReadError, match=r"has 2,097,152 bytes; at most 1,048,576 are read"):
        to_huggingface(tmp_path / "out", cfg, params, base=base)


@pytest.mark.usefixtures("one_device")
def test_generation_stops_at_each_end_of_both_configs(bases, tmp_path):
    folder = copied(bases["mistral"], tmp_path / "base", eos_token_id=[2, 38])
    edit_json(folder / "generation_config.json", eos_token_id=[39])
    model = language_model(folder)
    assert {2, 38, 39} <= set(model.end_ids)
    (completion,) = weft.generate(model, IDS[0, :5].tolist(), tokens=4, temperature=0)
    end = completion.token_ids[1]
    assert completion.finish_reason == "length" and end != completion.token_ids[0]
    edit_json(folder / "generation_config.json", eos_token_id=[39, end])
    (stopped,) = weft.generate(folder, IDS[0, :5].tolist(), tokens=4, temperature=0)
    assert stopped.token_ids == completion.token_ids[:2] and stopped.finish_reason == "stop"
