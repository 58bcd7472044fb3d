"""Qwen 3 with a mixture of experts (Qwen Team, 2025)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    s.require("use_sliding_window", False)
    has_bias = s.flag("attention_bias", False)
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 4),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm="head",
        experts=rotary_decoder.qwen_experts(s),
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layer = family.layers_of(cfg.decoder.transformer)[0]
    return {
        **rotary_decoder.write(cfg),
        **rotary_decoder.qwen_expert_settings(cfg),
        "model_type": "qwen3_moe",
        "attention_bias": layer.self_attention.attention.output_linear.bias,
    }


QWEN3_MOE = rotary_decoder.rotary_family(
    "qwen3_moe", "Qwen3MoeForCausalLM", parts, write
)
