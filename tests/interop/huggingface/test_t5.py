"""T5: logits and greedy tokens equal to those of transformers, there and back; its settings."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft
from tests.interop.huggingface import test_checkpoint as checkpoints
from weft.errors import GenerationError, HuggingFaceConfigError, WeightsMismatchError
from weft.functional import relative_position_buckets, top_k_logits
from weft.generation.decoding_models import decoding_model
from weft.hierarchy import StackedTransformerLayer, set_lora_recursively, with_base_state
from weft.interop.huggingface import (
    from_huggingface,
    from_peft,
    huggingface_model_config,
    load_huggingface_params,
    to_huggingface,
    to_peft,
)
from weft.interop.huggingface.families.t5 import T5
from weft.interop.huggingface.settings import Settings

transformers = checkpoints.transformers
VOCAB, STEPS = 40, 8
TINY = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
MODELS = {
    "t5": TINY,
    "t5-v1_1": {**TINY, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
RNG = np.random.RandomState(0)
SOURCE, INPUTS = RNG.randint(2, VOCAB, (2, 20)), RNG.randint(2, VOCAB, (2, 16))
SOURCE[1, 15:] = 0  # padding
INPUTS[:, 0] = 0


def torch_outputs(model):
    """Returns the logits, and the likeliest tokens one after the other."""
    import torch

    inputs = {"input_ids": torch.tensor(SOURCE), "attention_mask": torch.tensor(SOURCE != 0)}
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=torch.tensor(INPUTS)).logits.numpy()
        greedy = model.generate(
            **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False
        )
    return logits, greedy.numpy()[:, 1:]


@pytest.fixture(scope="module")
def references(transformers, tmp_path_factory):
    """Makes the folder of one of `MODELS`, and what its model computes."""
    import torch

    @functools.cache
    def make(name):
        torch.manual_seed(0)
        cls = transformers.T5ForConditionalGeneration
        model = cls(transformers.T5Config(**MODELS[name])).eval()
        if name != "t5":
            # Since transformers 5, only a checkpoint has an output layer of its own.
            model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, 16))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.1, std=0.5)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return folder, *torch_outputs(model)

    return make


def run(cfg, params, method, **inputs):
    return checkpoints.run(cfg, params, method, **inputs)


def logits(cfg, params):
    batch = {"source_ids": jnp.asarray(SOURCE), "input_ids": jnp.asarray(INPUTS)}
    return run(cfg, params, "extract_logits", input_batch=batch)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_match_there_and_back(references, transformers, name, tmp_path):
    folder, expected, greedy = references(name)
    cfg, params = from_huggingface(folder)
    np.testing.assert_allclose(logits(cfg, params), expected, atol=1e-4)
    # No end, as theirs has none within so many steps.
    endless = cfg.clone()
    endless.decoder.eos_token_id = VOCAB
    outputs = run(
        endless,
        params,
        "sample_decode",
        input_batch={"source_ids": jnp.asarray(SOURCE)},
        max_sequence_length=STEPS,
        logits_modifier=top_k_logits(1, break_ties="smallest_index"),
    )
    assert len(np.unique(greedy)) > 3 and not (greedy == 1).any()
    np.testing.assert_array_equal(outputs.sequences[:, 0], greedy)

    to_huggingface(tmp_path, cfg, params, base=folder)
    assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    to_huggingface(tmp_path / "again", cfg, params)
    settings = json.loads((tmp_path / "again/config.json").read_text(encoding="utf-8"))
    assert settings["tie_word_embeddings"] == (name == "t5")
    for path in (tmp_path, tmp_path / "again"):
        model = transformers.T5ForConditionalGeneration.from_pretrained(path).eval()
        np.testing.assert_array_equal(torch_outputs(model)[0], expected)


def test_buckets_are_those_of_transformers(transformers):
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-600, 601)
    for num_buckets, max_distance in ((32, 128), (8, 12), (64, 500)):
        for is_causal in (False, True):
            expected = T5Attention._relative_position_bucket(
                torch.tensor(distances),
                bidirectional=not is_causal,
                num_buckets=num_buckets,
                max_distance=max_distance,
            )
            buckets = relative_position_buckets(
                jnp.asarray(distances),
                num_buckets=num_buckets,
                max_distance=max_distance,
                is_causal=is_causal,
            )
            np.testing.assert_array_equal(buckets, expected.numpy())


# As published for version 1.1.
VALUES = {
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "vocab_size": 32128,
    "dropout_rate": 0.1,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def test_config_of_a_published_model():
    cfg: Any = T5.read(Settings(VALUES))
    attention = cfg.decoder.transformer.layer.cross_attention.attention
    assert (attention.num_heads, attention.hidden_dim) == (6, 384)
    assert cfg.encoder.transformer.layer.feed_forward.activation == ("nn.gelu", "linear")
    assert cfg.decoder.transformer.num_layers == 8 and cfg.decoder.lm_head is not None
    assert cfg.encoder.dropout_rate == cfg.decoder.dropout_rate == 0.1
    written = T5.write(cfg)
    assert T5.read(Settings(written)) == cfg
    assert {name: written[name] for name in VALUES} == VALUES


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": True, "scale_decoder_outputs": False},
        {"tie_word_embeddings": False, "scale_decoder_outputs": True},
    ],
)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gated-silu"])
def test_settings_are_written_as_they_were_read(settings, activation):
    values = {**VALUES, "feed_forward_proj": activation, **settings}
    cfg = T5.read(Settings(values))
    assert T5.read(Settings(T5.write(cfg))) == cfg


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"feed_forward_proj": "gated-tanh"},
            "feed_forward_proj='gated-tanh'.* can be one of",
        ),
        ({"feed_forward_proj": 3}, "feed_forward_proj=3.* can be one of"),
        ({"relative_attention_num_buckets": 31}, "num_buckets=31.* an even number from 4 on"),
        ({"relative_attention_max_distance": 16}, "max_distance=16.* can be above 16, half of"),
        ({"scale_decoder_outputs": "no"}, "scale_decoder_outputs='no'.* can be true or false"),
        ({"decoder_start_token_id": "a"}, "decoder_start_token_id='a'.* can be the id of a token"),
        ({"dropout_rate": 2}, "dropout_rate=2.* can be a number from 0 to 1"),
    ],
)
def test_unsupported_settings(setting, message):
    with pytest.raises(HuggingFaceConfigError, match=message):
        T5.read(Settings({**VALUES, **setting}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a tiny model with an output layer of its own."""
    cfg = T5.read(Settings({**VALUES, **TINY}))
    model = checkpoints.instantiate(cfg)
    folder = tmp_path_factory.mktemp("tiny")
    to_huggingface(folder, cfg, model.initialize_parameters_recursively(jax.random.key(0)))
    return folder


def test_layers_with_own_parameters(folder):
    cfg = huggingface_model_config(folder, stack=StackedTransformerLayer.default_config())
    shapes = jax.eval_shape(
        checkpoints.instantiate(cfg).initialize_parameters_recursively, jax.random.key(0)
    )
    params = load_huggingface_params(folder, shapes)
    _, repeated = from_huggingface(folder)
    for name, count in (("encoder", 3), ("decoder", 2)):
        stack = params[name]["transformer"]
        assert len(stack) == count
        kernels = [layer["feed_forward"]["linear2"]["weight"] for layer in stack.values()]
        expected = repeated[name]["transformer"]["repeat"]["layer"]["feed_forward"]["linear2"]
        np.testing.assert_array_equal(kernels, expected["weight"])


def without_output_layer(folder, target, **settings):
    checkpoints.changed(folder, target, **settings)
    tensors = load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors")
    return target


def test_output_layer_as_transformers_5_writes_it(folder, tmp_path):
    """`tie_word_embeddings` is true, and the files tell whether there is an output layer."""
    settings = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    _, params = from_huggingface(checkpoints.changed(folder, tmp_path / "a", **settings))
    assert "lm_head" in params["decoder"]
    tied = without_output_layer(folder, tmp_path / "b", **settings)
    tied_cfg, tied_params = from_huggingface(tied)
    assert tied_cfg.decoder.lm_head is None and tied_cfg.decoder.output_logits_modifier is None
    to_huggingface(tmp_path / "c", tied_cfg, tied_params)
    assert huggingface_model_config(tmp_path / "c") == tied_cfg
    written = json.loads((tmp_path / "c/config.json").read_text(encoding="utf-8"))
    assert {name: written[name] for name in settings} == settings
    assert "has_output_layer" not in written


def test_missing_output_layer(folder, tmp_path):
    message = "no 'lm_head.weight', but .*says tie_word_embeddings=False"
    with pytest.raises(WeightsMismatchError, match=message):
        from_huggingface(without_output_layer(folder, tmp_path))


def test_another_table_of_the_encoder(folder, tmp_path):
    checkpoints.changed(folder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    message = "'encoder.embed_tokens.weight' and 'shared.weight' in .* are not equal"
    with pytest.raises(WeightsMismatchError, match=message):
        from_huggingface(tmp_path)


def deltas(folder):
    """Returns what the adapters of a folder add to each weight, in the order of names."""
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    products = []
    for name in sorted(tensors):
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            products.append(b @ tensors[name] * settings["lora_alpha"] / settings["r"])
    return products


def test_adapters_of_both_stacks_are_written_and_read(folder, tmp_path):
    cfg, params = from_huggingface(folder)
    adapted = cfg.clone()
    # Keys and values of cross attention have another input than queries.
    set_lora_recursively(adapted, rank=2, alpha=4.0, targets=["q_proj", "o_proj"])
    model = checkpoints.instantiate(adapted)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    rng = np.random.RandomState(1)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    state = with_base_state(state, params)
    to_peft(tmp_path, adapted, state, base=folder)
    settings = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["task_type"], settings["target_modules"]) == ("SEQ_2_SEQ_LM", ["o", "q"])
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    # Both matrices of both maps: three layers, and two with two kinds of attention.
    assert len(names) == 4 * (3 + 2 * 2)
    start = "base_model.model.encoder.block.2.layer.0.SelfAttention"
    assert f"{start}.q.lora_A.weight" in names
    # Read, they are the same.
    to_peft(tmp_path / "again", *from_peft(tmp_path, cfg, params, base=folder), base=folder)
    for written, again in zip(deltas(tmp_path), deltas(tmp_path / "again"), strict=True):
        np.testing.assert_allclose(again, written, rtol=1e-5)


def test_generation_is_refused(folder):
    message = r"model_type='t5', a model that writes a target for a source.* sample_decode"
    with pytest.raises(HuggingFaceConfigError, match=message):
        weft.generate(folder, [[3, 4]])
    model = checkpoints.instantiate(huggingface_model_config(folder))
    with pytest.raises(GenerationError, match=r"writes a target for a source.* sample_decode"):
        decoding_model(model)
