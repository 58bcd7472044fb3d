"""Qwen 2 with a mixture of experts, and one that all tokens pass (Qwen Team, 2024)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 16),
        windows=rotary_decoder.qwen_windows(s),
        qkv_bias=s.flag("qkv_bias", True),
        experts=rotary_decoder.qwen_experts(
            s, shared_hidden_dim=s.size("shared_expert_intermediate_size", 5632)
        ),
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layers = family.layers_of(cfg.decoder.transformer)
    experts, _ = rotary_decoder.experts_of(layers)
    projections = rotary_decoder.projections_of(
        layers[0].self_attention.attention
    )
    return {
        **rotary_decoder.write(cfg),
        **rotary_decoder.qwen_window_settings(cfg),
        **rotary_decoder.qwen_expert_settings(cfg),
        "model_type": "qwen2_moe",
        "qkv_bias": projections.layer.bias,
        "shared_expert_intermediate_size": experts.shared_expert.hidden_dim,
    }


QWEN2_MOE = rotary_decoder.rotary_family(
    "qwen2_moe", "Qwen2MoeForCausalLM", parts, write
)
