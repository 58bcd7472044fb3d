"""Adapters in the format of PEFT: written by one library, read by the other."""

import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from weft.errors import (
    ArgumentValueError,
    HuggingFaceConfigError,
    WeightsMismatchError,
    WeightsReadError,
)
from weft.hierarchy import (
    merge_adapters,
    set_lora_recursively,
    unmerge_adapters,
    with_base_state,
    without_lora,
)
from weft.hierarchy.lora import adapter_state, base_state, with_adapter_state
from weft.hierarchy.module import functional
from weft.interop.huggingface import from_huggingface, from_peft, to_huggingface, to_peft

# PEFT and transformers warn of each other's older names.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VOCAB = 40
IDS = np.random.RandomState(0).randint(3, VOCAB, (2, 12))
MODELS = {
    "Llama": {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "eos_token_id": 2,
    },
    "GPT2": {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
}
SMALL_LLAMA = MODELS["Llama"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
# Fused weights, experts, and both in blocks of layers that differ.
FUSED_MODELS = {
    "Phi3": {**SMALL_LLAMA, "pad_token_id": None},
    "GPTNeoX": {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "Mixtral": {**SMALL_LLAMA, "num_local_experts": 4, "num_hidden_layers": 1},
    "Qwen2Moe": {
        **SMALL_LLAMA,
        **EXPERTS,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 20,
    },
}
FUSED_TARGETS = {
    "Phi3": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    "GPTNeoX": {"target_modules": ["query_key_value", "attention.dense"]},
    "Mixtral": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "Qwen2Moe": {
        "target_modules": ["q_proj", "down_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}
LLAMA_TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def peft():
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        pytest.importorskip("peft", reason="needs the extra parity, which is for Python 3.11")
        import peft
        import torch
        import transformers
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return peft


@pytest.fixture(scope="module", params=MODELS)
def base(request, peft, tmp_path_factory):
    """Returns the folder of a model of transformers."""
    return folder_of(request.param, MODELS[request.param], tmp_path_factory)


@pytest.fixture(scope="module", params=FUSED_MODELS)
def fused_base(request, peft, tmp_path_factory):
    """Returns the folder of a model with fused weights or experts, and its name."""
    name = request.param
    return folder_of(name, FUSED_MODELS[name], tmp_path_factory), name


def folder_of(name, settings, tmp_path_factory):
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    folder = tmp_path_factory.mktemp(name)
    model.save_pretrained(folder)
    return folder


def torch_model(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def torch_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.numpy()


def weft_logits(cfg, params):
    model = cfg.clone(name="model").instantiate(parent=None)

    @jax.jit
    def call(params):
        inputs = {"input_batch": {"input_ids": jnp.asarray(IDS)}}
        return functional(model, None, params, inputs, method="extract_logits", is_training=False)[
            0
        ]

    return call(params)


def peft_adapter(peft, base, folder, *, seed=0, **settings):
    """Writes an adapter of PEFT with random matrices; returns the logits of the model with it."""
    import torch

    torch.manual_seed(seed)
    model = peft.get_peft_model(torch_model(base), peft.LoraConfig(**settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return torch_logits(model)


def settings_of(base, **settings):
    is_gpt2 = "n_embd" in json.loads((base / "config.json").read_text(encoding="utf-8"))
    targets = ["c_attn", "c_proj"] if is_gpt2 else LLAMA_TARGETS
    return {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": targets,
        "fan_in_fan_out": is_gpt2,
    } | settings


def weft_adapter(base, **settings):
    """Returns the config and parameters of a model with random adapters."""
    cfg, params = from_huggingface(base)
    adapted = cfg.clone()
    set_lora_recursively(adapted, rank=3, alpha=5.0, **settings)
    model = adapted.clone(name="model").instantiate(parent=None)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    rng = np.random.RandomState(1)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)
    return adapted, with_base_state(state, params)


def test_adapter_of_peft_has_the_same_logits(peft, base, tmp_path):
    settings = settings_of(base)
    name = "mlp.c_proj" if settings["fan_in_fan_out"] else "v_proj"
    settings |= {"rank_pattern": {name: 2}, "alpha_pattern": {name: 7}}
    expected = peft_adapter(peft, base, tmp_path, **settings)
    cfg, params = from_huggingface(base)
    assert np.abs(weft_logits(cfg, params) - expected).max() > 0.1
    adapted, adapted_params = from_peft(tmp_path, cfg, params, base=base)
    np.testing.assert_allclose(weft_logits(adapted, adapted_params), expected, atol=2e-4)


def test_adapter_of_weft_has_the_same_logits_in_peft(peft, base, tmp_path):
    cfg, params = weft_adapter(base, targets=["q_proj", "k_proj", "v_proj", "linear2"])
    files = to_peft(tmp_path, cfg, params, base=base)
    assert [file.name for file in files] == ["adapter_config.json", "adapter_model.safetensors"]
    model = peft.PeftModel.from_pretrained(torch_model(base), tmp_path).eval()
    expected = weft_logits(cfg, params)
    np.testing.assert_allclose(torch_logits(model), expected, atol=2e-4)
    # And back.
    again = from_peft(tmp_path, *from_huggingface(base), base=base)
    np.testing.assert_allclose(weft_logits(*again), expected, atol=2e-4)
    # Merged, in transformers.
    layer = cfg.clone(name="model").instantiate(parent=None)
    merged = merge_adapters(layer, params)
    to_huggingface(tmp_path / "merged", without_lora(cfg), merged)
    merged_logits = torch_logits(torch_model(tmp_path / "merged"))
    np.testing.assert_allclose(merged_logits, expected, atol=2e-4)
    unmerged = unmerge_adapters(layer, merged, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), unmerged, params)


def test_adapter_of_fused_weights_and_experts(peft, fused_base, tmp_path):
    base, name = fused_base
    settings = {"r": 3, "lora_alpha": 5, **FUSED_TARGETS[name]}
    expected = peft_adapter(peft, base, tmp_path, **settings)
    cfg, params = from_huggingface(base)
    assert np.abs(weft_logits(cfg, params) - expected).max() > 0.1
    adapted = from_peft(tmp_path, cfg, params, base=base)
    np.testing.assert_allclose(weft_logits(*adapted), expected, atol=2e-4)
    # Written by Weft, with other layers, and a part of a fused weight.
    targets = ["q_proj", "v_proj"]
    targets += ["experts"] if "target_parameters" in FUSED_TARGETS[name] else ["linear1"]
    adapted = weft_adapter(base, targets=targets)
    expected = weft_logits(*adapted)
    to_peft(tmp_path / "weft", *adapted, base=base)
    model = peft.PeftModel.from_pretrained(torch_model(base), tmp_path / "weft").eval()
    np.testing.assert_allclose(torch_logits(model), expected, atol=2e-4)
    again = from_peft(tmp_path / "weft", cfg, params, base=base)
    np.testing.assert_allclose(weft_logits(*again), expected, atol=2e-4)
    # Merged, and with adapters kept apart from their base.
    layer = adapted[0].clone(name="model").instantiate(parent=None)
    merged = merge_adapters(layer, adapted[1])
    np.testing.assert_allclose(weft_logits(without_lora(adapted[0]), merged), expected, atol=2e-4)
    unmerged = unmerge_adapters(layer, merged, adapted[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), unmerged, adapted[1])
    state = with_adapter_state(params, adapter_state(adapted[1]))
    jax.tree.map(np.testing.assert_array_equal, state, adapted[1])
    jax.tree.map(np.testing.assert_array_equal, base_state(adapted[1]), params)


@pytest.mark.parametrize("base", ["Llama"], indirect=True)
def test_several_adapters_add_up(peft, base, tmp_path):
    import torch

    folders = [tmp_path / "a", tmp_path / "b"]
    peft_adapter(peft, base, folders[0], seed=1, **settings_of(base, use_rslora=True))
    peft_adapter(
        peft, base, folders[1], seed=2, **settings_of(base, r=2, target_modules=["k_proj"])
    )
    model = torch_model(base)
    for folder in folders:  # one after the other into the weights
        model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    with torch.no_grad():
        expected = torch_logits(model)
    cfg, params = from_huggingface(base)
    both = from_peft(folders, cfg, params, base=base)
    np.testing.assert_allclose(weft_logits(*both), expected, atol=2e-4)
    none = from_peft(folders, cfg, params, base=base, weights=[0.0, 0.0])
    np.testing.assert_allclose(weft_logits(*none), weft_logits(cfg, params), atol=1e-5)
    with pytest.raises(ArgumentValueError, match=r"2 adapters and weights=\[1.0\]"):
        from_peft(folders, cfg, params, base=base, weights=[1.0])


@pytest.mark.parametrize("fused_base", ["Mixtral"], indirect=True)
def test_adapters_of_experts_that_do_not_fit(peft, fused_base, tmp_path):
    base, _ = fused_base
    cfg, params = from_huggingface(base)
    to_peft(tmp_path, *weft_adapter(base, targets=["experts"]), base=base)
    path = tmp_path / "adapter_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    targets = ["experts.down_proj", "experts.gate_up_proj"]
    assert (values["target_modules"], values["target_parameters"]) == ([], targets)
    for wrong in ("experts.down_proj", ["mlp.gate.weight"]):
        path.write_text(json.dumps({**values, "target_parameters": wrong}), encoding="utf-8")
        with pytest.raises(HuggingFaceConfigError, match=r"gate_up_proj and down_proj of experts"):
            from_peft(tmp_path, cfg, params, base=base)
    path.write_text(json.dumps(values), encoding="utf-8")
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    save_file({**tensors, name: tensors[name][:7]}, weights)
    with pytest.raises(WeightsMismatchError, match=r"rank × experts\), with 4 experts"):
        from_peft(tmp_path, cfg, params, base=base)


@pytest.mark.parametrize("base", ["Llama"], indirect=True)
def test_adapters_that_do_not_fit(peft, base, tmp_path):
    cfg, params = from_huggingface(base)
    with pytest.raises(WeightsMismatchError, match=r"the model has no adapters"):
        to_peft(tmp_path, cfg, params, base=base)
    with pytest.raises(WeightsReadError, match=r"adapter_config.json' cannot be read"):
        from_peft(tmp_path, cfg, params, base=base)
    to_peft(tmp_path, *weft_adapter(base), base=base)
    path = tmp_path / "adapter_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    for name, value in (
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("lora_alpha", "1"),
    ):
        path.write_text(json.dumps({**values, name: value}), encoding="utf-8")
        with pytest.raises((HuggingFaceConfigError, WeightsReadError), match=name):
            from_peft(tmp_path, cfg, params, base=base)
    path.write_text(json.dumps(values), encoding="utf-8")
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    name_b = name.replace("lora_A", "lora_B")
    other_layer = {x.replace("layers.0", "layers.9"): tensors[x] for x in (name, name_b)}
    for changed, message in (
        ({name: tensors[name][:, 1:]}, r"for 15 inputs and 32 outputs; the model has 16 and 32"),
        ({name: tensors[name][1:]}, r"expected lora_A of \(rank, inputs\)"),
        ({"base_model.model.lm_head.lora_A.weight": tensors[name]}, r"expected lora_A"),
        (
            {"base_model.model.score.weight": tensors[name]},
            r"is not a matrix of a low-rank adapter",
        ),
        (other_layer, r"the model has no model.layers.9.self_attn.q_proj"),
    ):
        save_file({**tensors, **changed}, weights)
        with pytest.raises(WeightsMismatchError, match=message):
            from_peft(tmp_path, cfg, params, base=base)
