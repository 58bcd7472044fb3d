"""The `config.json` of Hugging Face: a model that can be made, or an error that says why not."""

import json
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import jax

from tests.fuzz.readers import DEEP, ODD, damaged_json, read, source_of, untouched
from weft.errors import HuggingFaceConfigError, WeightsReadError
from weft.interop.huggingface import huggingface_model_config
from weft.interop.huggingface.encoder_family import body_of

_LLAMA = {
    **{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "rope_theta": 1e4},
    **{"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": False},
    **{"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None, "rope_scaling": None},
    **{"max_position_embeddings": 64, "layer_types": ["full_attention"] * 2, "pretraining_tp": 1},
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
_LONG = {
    **{"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 3.0]},
    **{"original_max_position_embeddings": 8, "rope_theta": 1e4},
}
_GROUPED = {
    **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "head_dim": 4},
    **{"tie_word_embeddings": True, "attention_bias": False},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_ENCODER = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
_ENCODER |= {"num_attention_heads": 2, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1}
VALID = [
    _LLAMA,
    _LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    _GROUPED | {"model_type": "phi3", "rope_parameters": _LONG, "sliding_window": 6},
    _GROUPED | {"model_type": "granite", "residual_multiplier": 0.4, "logits_scaling": 2.0},
    _GROUPED | {"model_type": "olmo2"},
    _GROUPED | {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    _GROUPED | _WINDOWS | {"model_type": "gemma2", "query_pre_attn_scalar": 4},
    _GROUPED | _WINDOWS | {"model_type": "gemma3_text"},
    _GROUPED | _WINDOWS | {"model_type": "qwen3", "use_sliding_window": True},
    _GROUPED | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    _GROUPED
    | _EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]},
    _GROUPED | _EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    _GROUPED | {"model_type": "gpt_neox", "hidden_act": "gelu", "rotary_pct": 0.5},
    _LLAMA | {"model_type": "qwen3", "rope_scaling": _YARN},
    _LLAMA | {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}},
    _LLAMA | {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 32}},
    {
        **{"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2},
        **{"num_layers": 2, "num_decoder_layers": 1, "vocab_size": 16, "dropout_rate": 0.1},
        **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
        **{"feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-6},
        **{"tie_word_embeddings": False, "scale_decoder_outputs": False},
        **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    },
    {
        **{"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": None},
        **{"n_positions": 16, "vocab_size": 16, "activation_function": "gelu_new"},
        **{"layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
        **{"bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": True},
    },
    _ENCODER
    | {"model_type": "bert", "architectures": ["BertForMaskedLM"], "tie_word_embeddings": True}
    | {"vocab_size": 16, "max_position_embeddings": 8, "type_vocab_size": 2},
    _ENCODER
    | {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 3}
    | {"image_size": [4, 8], "patch_size": 2, "num_channels": 1, "qkv_bias": False},
]


@st.composite
def _one_invalid_field(draw: st.DrawFn) -> bytes:
    """Yields models with one invalid field each."""
    values = draw(st.sampled_from(VALID))
    key = draw(st.sampled_from(sorted(values)))
    return json.dumps(values | {key: draw(st.sampled_from(ODD))}).encode()


_CRAFTED = [b"", b"7", b"null", b"[]", b'"llama"', DEEP.encode(), b"{}", b"\xff", b"9" * 5_000]
CASES = st.one_of(st.sampled_from(_CRAFTED), _one_invalid_field(), damaged_json(VALID))
SHORT = 40


def check(case: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(case)
        with untouched(folder):
            returned, cfg = read(
                lambda: huggingface_model_config(folder), (HuggingFaceConfigError, WeightsReadError)
            )
    if returned:
        model = cfg.clone(name="model").instantiate(parent=None)
        if body_of(cfg).transformer.num_layers < 1_000:
            jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))


def source(case: bytes) -> str:
    return source_of("fuzz_hf_config", case)
