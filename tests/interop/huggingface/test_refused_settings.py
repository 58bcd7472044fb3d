"""Settings of a model that no family has: each message names the setting and what it can be."""

import pytest

from weft.errors import HuggingFaceConfigError
from weft.interop.huggingface import FAMILIES
from weft.interop.huggingface.settings import Settings

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "sliding_window": 4,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.0, 3.0],
    "original_max_position_embeddings": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 4.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LAYERS = "can be a list with one entry for each of 2 layers"
KINDS = "can be 'full_attention' or 'sliding_attention'"

CASES = [
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types=['full_attention']", LAYERS),
    ("qwen3", {"layer_types": "full_attention"}, "layer_types='full_attention'", LAYERS),
    ("gemma2", {"layer_types": ["full_attention", "linear"]}, "layer_types='linear'", KINDS),
    (
        "llama",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types='sliding_attention'",
        "can be 'full_attention'",
    ),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=[1]", LAYERS),
    ("smollm3", {"no_rope_layers": 1}, "no_rope_layers=1", LAYERS),
    ("smollm3", {"no_rope_layers": [1, "no"]}, "no_rope_layers='no'", "can be a list of 0 and 1"),
    (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok=5",
        "can be at most 4",
    ),
    (
        "qwen3_moe",
        {"num_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok=3",
        "can be at most 2",
    ),
    (
        "qwen2_moe",
        {"num_experts": 4, "mlp_only_layers": 1},
        "mlp_only_layers=1",
        "can be a list of numbers of layers",
    ),
    (
        "qwen3_moe",
        {"num_experts": 4, "mlp_only_layers": ["0"]},
        "mlp_only_layers=['0']",
        "can be a list of numbers of layers",
    ),
    (
        "qwen3_moe",
        {"decoder_sparse_step": 0},
        "decoder_sparse_step=0",
        "can be a whole number from 1 to ",
    ),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob='yes'", "can be true or false"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts=0", "can be a whole number from 1 to "),
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers=-1",
        "can be a whole number",
    ),
    (
        "phi3",
        {"rope_parameters": {**LONG, "short_factor": [1.0]}},
        "short_factor=[1.0]",
        "can be a list of 2 numbers",
    ),
    (
        "phi3",
        {"rope_parameters": {**LONG, "long_factor": [1.0] * 3}},
        "long_factor=[1.0, 1.0, 1.0]",
        "can be a list of 2 numbers",
    ),
    ("llama", {"rope_parameters": LLAMA3}, "high_freq_factor=4.0", "above low_freq_factor=4"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5", "can be 1"),
    ("llama", {"rope_parameters": 7}, "rope_parameters=7", "can be an object"),
    ("llama", {"head_dim": 5}, "head_dim=5", "can be even, as halves of 5 dimensions are rotated"),
    (
        "llama",
        {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "head_dim=2",
        "can be 4 or more with this rope_type",
    ),
    (
        "llama",
        {"num_key_value_heads": 3},
        "num_key_value_heads=3",
        "divides num_attention_heads=4",
    ),
    (
        "gemma2",
        {"tie_word_embeddings": False, "final_logit_softcapping": 30.0},
        "tie_word_embeddings=False",
        "can be true",
    ),
]


@pytest.mark.parametrize(
    ("model_type", "values", "setting", "choices"),
    CASES,
    ids=[f"{model_type}-{setting}" for model_type, _, setting, _ in CASES],
)
def test_setting_is_refused_by_name(model_type, values, setting, choices):
    settings = Settings({**SIZES, "model_type": model_type, **values}, "x/config.json")
    with pytest.raises(HuggingFaceConfigError) as error:
        FAMILIES[model_type].read(settings)
    message = str(error.value)
    assert f" {setting}, which has no counterpart in Weft: " in message
    assert choices in message
