import pytest

from weft.errors import HuggingFaceConfigError
from weft.interop.huggingface.families.llama import LLAMA
from weft.interop.huggingface.families.qwen2 import QWEN2
from weft.interop.huggingface.families.qwen3 import QWEN3
from weft.interop.huggingface.settings import Settings

# As published by their makers, but for the sizes.
VALUES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA_VALUES = {**VALUES, "model_type": "llama", "rope_theta": 5e5, "attention_bias": False}
QWEN2_VALUES = {**VALUES, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9}
QWEN3_VALUES = {**VALUES, "model_type": "qwen3", "head_dim": 16}


def attention_of(cfg):
    return cfg.decoder.transformer.layer.self_attention.attention


@pytest.mark.parametrize(
    ("family", "values"),
    [(LLAMA, LLAMA_VALUES), (QWEN2, QWEN2_VALUES), (QWEN3, QWEN3_VALUES)],
    ids=["llama", "qwen2", "qwen3"],
)
def test_configs_round_trip(family, values):
    cfg = family.read(Settings(values))
    written = family.write(cfg)
    assert written["model_type"] == family.model_type
    assert family.read(Settings(written)) == cfg
    attention = attention_of(cfg)
    assert attention.input_linear.input_linear.num_kv_heads == 2
    assert attention.input_linear.input_linear.layer.bias == (family is QWEN2)
    assert not attention.output_linear.bias
    assert (attention.input_linear.key_scale is not None) == (family is QWEN3)
    assert attention.hidden_dim == (64 if family is QWEN3 else 32)
    assert cfg.decoder.lm_head is None


@pytest.mark.parametrize(
    "setting",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"pretraining_tp": 2},
        {"partial_rotary_factor": 0.5},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_unsupported_settings(setting):
    with pytest.raises(HuggingFaceConfigError, match=f"{next(iter(setting))}=.* no counterpart"):
        LLAMA.read(Settings({**LLAMA_VALUES, **setting}))
