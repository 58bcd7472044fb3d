"""Checkpoints of tiny random models of `transformers`, read, run, written and broken."""

import functools
import json
import os
import shutil
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from tests.keys import quick_key
from weft.errors import HuggingFaceConfigError, WeightsMismatchError, WeightsReadError
from weft.functional import scale_by
from weft.hierarchy.attention.stack import StackedTransformerLayer
from weft.hierarchy.layers import Linear
from weft.hierarchy.module import functional
from weft.interop.huggingface import (
    FAMILIES,
    from_huggingface,
    huggingface_model_config,
    load_huggingface_params,
    to_huggingface,
)
from weft.interop.huggingface.settings import Settings
from weft.recipes.lm import lm_moe, lm_tiny

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
IDS = np.random.RandomState(0).randint(3, 40, (2, 12))
VOCAB = 40
GROUPED = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Name, class, settings. Every way in which a family may be set up is there once.
MODELS = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", {**GROUPED, "rope_theta": 20000.0, "head_dim": 8}),
    "llama-3.1": ("Llama", {**GROUPED, "rope_parameters": ROPE_LLAMA3}),
    "llama-biases-linear-tied": (
        "Llama",
        {
            **GROUPED,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE_LINEAR,
        },
    ),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 5, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {**GROUPED, "rope_parameters": ROPE_YARN}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
}


class Reference(NamedTuple):
    """A checkpoint and what its model computes.

    Attributes:
        folder: of the checkpoint.
        logits: of `IDS`.
        greedy: `IDS[:, :5]` and the 8 likeliest tokens after them, one after the other.
    """

    folder: Any
    logits: np.ndarray
    greedy: np.ndarray


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
        from transformers import (  # noqa: F401 - classes are imported when asked for
            GPT2LMHeadModel,
            LlamaForCausalLM,
            MistralForCausalLM,
            Qwen2ForCausalLM,
            Qwen3ForCausalLM,
        )
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def references(transformers, tmp_path_factory):
    """Makes the reference of one of `MODELS` by name."""
    import torch

    @functools.cache
    def make(name):
        kind, settings = MODELS[name]
        head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**settings)
        model = getattr(transformers, f"{kind}{head}")(config).eval()
        for parameter in model.parameters():  # no bias is 0, no norm's scale 1, no logit near 0
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, max_shard_size="10KB" if name == "qwen3" else "5GB")
        return Reference(folder, logits_of(model, IDS), greedy_of(model, IDS[:, :5]))

    return make


def logits_of(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def greedy_of(model, ids, steps=8):
    for _ in range(steps):
        ids = np.concatenate([ids, logits_of(model, ids)[:, -1:].argmax(-1)], axis=1)
    return ids


# Each program runs once, and is compiled in a third of the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def instantiate(cfg):
    return cfg.clone(name="model").instantiate(parent=None)


def run(cfg, params, method, *, jit=True, **inputs):
    model = instantiate(cfg)

    def call(params):
        return functional(
            model,
            prng_key=jax.random.key(0),
            state=params,
            inputs=inputs,
            method=method,
            is_training=False,
        )[0]

    return (jax.jit(call, compiler_options=QUICK) if jit else call)(params)


def logits(cfg, params):
    return run(cfg, params, "extract_logits", input_batch={"input_ids": jnp.asarray(IDS)})


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(references, name):
    reference = references(name)
    cfg, params = from_huggingface(reference.folder)
    np.testing.assert_allclose(logits(cfg, params), reference.logits, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3"])
def test_greedy_decoding_through_the_cache_gives_the_same_tokens(references, name):
    reference = references(name)
    cfg, params = from_huggingface(reference.folder)
    ended = (reference.greedy[:, 5:-1] == cfg.decoder.eos_token_id).any()
    assert not ended and len(np.unique(reference.greedy)) > 5
    length = reference.greedy.shape[1]
    outputs = run(
        cfg,
        params,
        "sample_decode",
        input_batch={"prefix": jnp.asarray(IDS[:, :5], jnp.int32)},
        max_sequence_length=length - 1,
        logits_modifier=scale_by(0.0),
    )
    np.testing.assert_array_equal(outputs.sequences[:, 0], reference.greedy[:, 1:])


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies_equal_those_of_transformers(transformers, truncate):
    rope = {**ROPE_YARN, "original_max_position_embeddings": 4096, "truncate": truncate}
    theirs = transformers.Qwen2Config(rope_parameters=rope, max_position_embeddings=16384)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    frequencies, magnitude = compute(theirs, "cpu")
    cfg = Settings({"rope_parameters": rope}).rotary()
    layer = cfg.set(name="rope", dim=2 * len(frequencies)).instantiate(parent=None)
    found, found_magnitude = layer.compute_rope_params()
    np.testing.assert_allclose(found, frequencies.numpy(), rtol=1e-6)
    assert found_magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2-yarn", "qwen3"])
def test_checkpoint_specific_settings(references, name):
    """The parity above would be worth little if the logits did not depend on it."""
    reference = references(name)
    cfg, params = from_huggingface(reference.folder)
    qkv = cfg.decoder.transformer.layer.self_attention.attention.input_linear
    if name == "qwen3":
        qkv.query_scale.norm.eps = qkv.key_scale.norm.eps = 10.0
    else:
        qkv.rope_pos_emb_layer.scaling_factor *= 2
    assert np.abs(logits(cfg, params) - reference.logits).max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_export_round_trips(references, transformers, name, tmp_path):
    reference = references(name)
    cfg, params = from_huggingface(reference.folder)
    files = to_huggingface(tmp_path, cfg, params, max_position_embeddings=64)
    assert sorted(f.name for f in files) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    kind = type(transformers.AutoConfig.from_pretrained(reference.folder))
    written = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(written) is kind
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_array_equal(logits_of(model.eval(), IDS), reference.logits)


def test_layers_with_own_parameters(references, tmp_path):
    reference = references("qwen3")
    stack = StackedTransformerLayer.default_config()
    cfg = huggingface_model_config(reference.folder, stack=stack)
    shapes = jax.eval_shape(instantiate(cfg).initialize_parameters_recursively, jax.random.key(0))
    params = load_huggingface_params(reference.folder, shapes)
    assert {"layer0", "layer1"} == params["decoder"]["transformer"].keys()
    np.testing.assert_allclose(logits(cfg, params), reference.logits, atol=1e-4)
    to_huggingface(tmp_path, cfg, params)
    _, repeated = from_huggingface(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, repeated, from_huggingface(reference.folder)[1])


def test_parameters_are_sharded_and_converted(references):
    folder = references("llama").folder
    cfg = huggingface_model_config(folder, dtype=jnp.bfloat16)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shapes = jax.eval_shape(instantiate(cfg).initialize_parameters_recursively, jax.random.key(0))

    def laid_out(x):
        axes = ["data" if n % 8 == 0 else None for n in x.shape]
        first = axes.index("data") if "data" in axes else len(axes)
        spec = PartitionSpec(*(a if i == first else None for i, a in enumerate(axes)))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    target = jax.tree.map(laid_out, shapes)
    params = load_huggingface_params(folder, target)
    plain = from_huggingface(folder)[1]
    for x, y, z in zip(*map(jax.tree.leaves, (params, target, plain)), strict=True):
        assert x.sharding == y.sharding and x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(x), np.asarray(z.astype(jnp.bfloat16)))


def changed(source, folder, **settings):
    """Returns a copy of a checkpoint with other settings."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **settings}), encoding="utf-8"
    )
    return folder


def renamed(source, folder, names):
    """Returns a copy of a checkpoint whose tensors are named, or left out, by a function."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors = {names(name): x for name, x in tensors.items() if names(name)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_checkpoint_of_the_model_without_a_head(references, tmp_path):
    """Published files of GPT-2 have this form, with masks next to the parameters."""
    reference = references("gpt2")
    folder = renamed(reference.folder, tmp_path, lambda name: name.removeprefix("transformer."))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "h.0.attn.bias": np.ones((1, 1, 32, 32), "u1"),
        "lm_head.weight": tensors["wte.weight"],
    }
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_allclose(logits(*from_huggingface(folder)), reference.logits, atol=1e-4)


def test_missing_or_misshaped_tensors(references, tmp_path):
    source = references("llama").folder
    lacking = renamed(source, tmp_path / "a", lambda n: "" if "1.self_attn.k_proj" in n else n)
    with pytest.raises(
        WeightsMismatchError, match=r"missing: model.layers.1.self_attn.k_proj.weight \[16, 16\]"
    ):
        from_huggingface(lacking)
    extra = renamed(source, tmp_path / "b", lambda n: n.replace("norm.weight", "norm.scale"))
    with pytest.raises(WeightsMismatchError, match=r"unexpected: model.norm.scale \[16\]"):
        from_huggingface(extra)
    other = changed(source, tmp_path / "c", intermediate_size=32)
    message = r"shape: model.layers.0.mlp.gate_proj.weight \[24, 16\] in the file, \[32, 16\]"
    with pytest.raises(WeightsMismatchError, match=message):
        from_huggingface(other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "mamba"},
            r"model_type='mamba', which has no counterpart.*'gpt2' or 'llama'",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, r"are quantized \(gptq\)"),
        ({"num_hidden_layers": None}, r"lacks 'num_hidden_layers', which model_type='llama' has"),
        ({"model_type": None}, r"config.json lacks 'model_type'. Add it, or copy"),
    ],
    ids=["model type", "quantized", "lacks", "no model type"],
)
def test_unsupported_architectures(references, tmp_path, settings, message):
    folder = changed(references("llama").folder, tmp_path, **settings)
    with pytest.raises(HuggingFaceConfigError, match=message):
        huggingface_model_config(folder)


def test_invalid_folder(tmp_path):
    with pytest.raises(WeightsReadError, match=r"config.json' cannot be read.*Name the folder of"):
        huggingface_model_config(tmp_path)


def test_unsupported_models(references, tmp_path):
    cfg, params = from_huggingface(references("llama").folder)
    other = cfg.clone()
    other.decoder.transformer.layer.self_attention.attention.atten_logit_cap = 30.0
    other.decoder.dropout_rate = 0.1  # which does not count
    with pytest.raises(HuggingFaceConfigError) as error:
        to_huggingface(tmp_path, other, params)
    assert str(error.value) == (
        f"no model of the types {', '.join(FAMILIES)} computes what this one does "
        "(its value → what would be needed):\n"
        "  decoder.transformer.layer.self_attention.attention.atten_logit_cap: 30.0 → None\n"
        "Export it as safetensors, which every model can."
    )
    other = cfg.clone()
    other.decoder.transformer.layer.feed_forward.activation = ("nn.tanh", "linear")
    with pytest.raises(HuggingFaceConfigError, match=r"'nn.tanh' has no name in Hugging Face"):
        to_huggingface(tmp_path, other, params)
    with pytest.raises(HuggingFaceConfigError, match=r"does: it is a Linear, and they are"):
        to_huggingface(tmp_path, Linear.default_config(), params)
    with pytest.raises(HuggingFaceConfigError) as error:
        to_huggingface(tmp_path, lm_moe().model, params)
    assert str(error.value).splitlines()[1:-1] == [
        "  decoder.transformer.layer.feed_forward: TransformerFeedForwardDropFreeMoE.Config → "
        "TransformerFeedForwardLayer.Config"
    ]
    assert list(tmp_path.iterdir()) == []


def test_default_recipe_computes_the_same_in_transformers(transformers, tmp_path):
    cfg = lm_tiny().model
    params = jax.jit(instantiate(cfg).initialize_parameters_recursively)(quick_key(0))
    to_huggingface(tmp_path, cfg, params)
    ids = np.random.RandomState(0).randint(0, 256, (2, 48))  # beyond the window of 32
    batch = {"input_ids": jnp.asarray(ids)}
    ours = run(cfg, params, "extract_logits", input_batch=batch)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    np.testing.assert_allclose(logits_of(theirs, ids), ours, atol=1e-4)
    ours_again = run(*from_huggingface(tmp_path), "extract_logits", input_batch=batch)
    np.testing.assert_allclose(ours_again, ours, atol=1e-4)


# What a folder has besides weights.

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TEXT = "the cat and the hat: 3 cats. " * 2


def save_tokenizer(folder):
    """Writes a byte-pair tokenizer of 40 tokens, with special tokens and a chat template."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<s>", "</s>", "<|end of turn|>"]
    )
    made.train_from_iterator([TEXT], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def edit_json(path, **values):
    path.write_text(json.dumps({**read_json(path), **values}), encoding="utf-8")


def loaded(transformers, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model, tokenizer


FACTS = {
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "initializer_range": 0.125,
    "a_fact_of_theirs": {"kept": [1, "é"]},
}


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1", "llama-biases-linear-tied", "mistral"])
def test_facts_of_a_base_are_written_back(references, transformers, name, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(references(name).folder, base)
    edit_json(base / "config.json", **FACTS, auto_map={"AutoModel": "code.Model"})
    generation = {"eos_token_id": [2, 3], "temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    save_tokenizer(base)
    cfg, params = from_huggingface(base)
    to_huggingface(out, cfg, params, base=base)
    settings = read_json(out / "config.json")
    assert {key: settings[key] for key in FACTS} == FACTS and "auto_map" not in settings
    assert settings["bos_token_id"] == 1 and settings["dtype"] == "float32"
    kept = read_json(out / "generation_config.json")
    assert {key: kept[key] for key in generation} == generation
    (theirs, their_tokenizer), (ours, our_tokenizer) = (
        loaded(transformers, folder) for folder in (base, out)
    )
    assert type(ours) is type(theirs)
    np.testing.assert_array_equal(logits_of(ours, IDS), logits_of(theirs, IDS))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
        assert getattr(our_tokenizer, key) == getattr(their_tokenizer, key), key
    assert our_tokenizer(TEXT).input_ids == their_tokenizer(TEXT).input_ids
    for tokenizer in (our_tokenizer, their_tokenizer):
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert chat == "<s><user>hi"
    if name != "gpt2":
        assert settings["max_position_embeddings"] == 64
        assert settings["rope_parameters"] == read_json(base / "config.json")["rope_parameters"]


@pytest.mark.parametrize(
    ("ends", "further", "expected"),
    [(2, [3, 2], (2, 3)), ([2], 2, 2), (None, [3], 3), (2, None, 2), (None, None, -1)],
    ids=str,
)
def test_ends_of_the_generation_config_are_ends_too(ends, further, expected, references, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(references("llama-3.1").folder, base)
    edit_json(base / "config.json", eos_token_id=ends)
    (base / "generation_config.json").write_text(
        json.dumps({"eos_token_id": further}), encoding="utf-8"
    )
    cfg, params = from_huggingface(base)
    assert cfg.decoder.eos_token_id == expected
    to_huggingface(out, cfg, params, base=base)
    for name, of_base in (("config.json", ends), ("generation_config.json", further)):
        assert read_json(out / name)["eos_token_id"] == of_base
    assert from_huggingface(out)[0] == cfg
    (base / "generation_config.json").write_text('{"eos_token_id": "no"}', encoding="utf-8")
    with pytest.raises(HuggingFaceConfigError, match=r"generation_config.json has eos_token_id"):
        from_huggingface(base)


def test_facts_that_training_changed_are_replaced(references, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(references("llama-3.1").folder, base)
    edit_json(base / "config.json", **FACTS)
    cfg, params = from_huggingface(base)
    decoder: Any = cfg.decoder
    decoder.eos_token_id = 7
    decoder.transformer.layer.self_attention.attention.input_linear.rope_pos_emb_layer.theta = 9e4
    to_huggingface(out, cfg, params, base=base, max_position_embeddings=99)
    settings = read_json(out / "config.json")
    assert (
        settings["eos_token_id"] == 7 == read_json(out / "generation_config.json")["eos_token_id"]
    )
    assert settings["max_position_embeddings"] == 99 and settings["initializer_range"] == 0.125
    assert settings["rope_parameters"] == {**ROPE_LLAMA3, "rope_theta": 9e4}


def test_model_of_sentencepiece(references, transformers, tmp_path, caplog):
    import sentencepiece

    (tmp_path / "text").write_text("the cat and the hat\n" * 50, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "words"),
        model_type="bpe",
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    cfg, params = from_huggingface(references("llama").folder)
    to_huggingface(tmp_path / "out", cfg, params, tokenizer=tmp_path / "words.model")
    (message,) = caplog.messages
    assert "words.model is written as tokenizer.model. Readers that do not use Sent" in message
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    words = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "words.model"))
    text = "the cat and a hat"
    assert tokenizer(text, add_special_tokens=False).input_ids == words.encode(text)
    assert tokenizer.eos_token_id == words.eos_id() == 2


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_links_out_of_a_base_are_not_followed(references, name, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(references("llama").folder, base)
    save_tokenizer(base)
    cfg, params = from_huggingface(base)
    (tmp_path / "private.json").write_text('{"token": "secret"}', encoding="utf-8")
    (base / name).unlink()
    (base / name).symlink_to(tmp_path / "private.json")
    with pytest.raises(WeightsReadError, match=rf"{name}.* cannot be read .*symbolic link"):
        to_huggingface(tmp_path / "out", cfg, params, base=base)


def test_links_of_the_cache_are_followed(references, tmp_path):
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    shutil.copytree(references("llama").folder, repository / "blobs")
    save_tokenizer(repository / "blobs")
    snapshot.mkdir(parents=True)
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    cfg, params = from_huggingface(snapshot)
    files = to_huggingface(tmp_path / "out", cfg, params, base=snapshot)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in files}


def test_base_without_a_model(references, tmp_path):
    cfg, params = from_huggingface(references("llama").folder)
    with pytest.raises(WeightsReadError, match=r"config.json' is missing. Give as base the folder"):
        to_huggingface(tmp_path / "out", cfg, params, base=tmp_path)
    (tmp_path / "t.json").write_text('{"token": "secret"}', encoding="utf-8")
    with pytest.raises(
        WeightsReadError, match=r"t.json' is not copied as the tokenizer: it has no"
    ):
        to_huggingface(tmp_path / "out", cfg, params, tokenizer=tmp_path / "t.json")
    with pytest.raises(WeightsReadError, match=r"there is no .*gone.json', the file of the tok"):
        to_huggingface(tmp_path / "out", cfg, params, tokenizer=tmp_path / "gone.json")
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    (tmp_path / "t.json").write_text('{"model": {}}', encoding="utf-8")
    with pytest.raises(WeightsReadError, match=r"it is not a JSON object\). Copy the file again"):
        to_huggingface(tmp_path / "out", cfg, params, tokenizer=tmp_path / "t.json")


def test_tokenizer_without_settings_gets_them(references, transformers, tmp_path):
    save_tokenizer(tmp_path / "all")
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "all" / "tokenizer.json", tmp_path / "bare" / "my own.JSON")
    cfg, params = from_huggingface(references("llama").folder)
    out = tmp_path / "out"
    to_huggingface(out, cfg, params, tokenizer=tmp_path / "bare" / "my own.JSON")
    assert read_json(out / "config.json")["bos_token_id"] is None  # Weft does not know it
    model, tokenizer = loaded(transformers, out)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "all")
    assert tokenizer(TEXT).input_ids == expected(TEXT).input_ids
    assert tokenizer.eos_token_id == 2 == model.config.eos_token_id
    assert read_json(out / "special_tokens_map.json")["eos_token"] == "</s>"
