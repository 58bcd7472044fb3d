"""Qwen 3: as Llama, with norms of queries and keys before they are rotated (Qwen Team, 2025)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns what this family's layers have."""
    has_bias = s.flag("attention_bias", False)
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 32),
        default_head_dim=128,
        windows=rotary_decoder.qwen_windows(s),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm="head",
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layer = family.layers_of(cfg.decoder.transformer)[0]
    return {
        **rotary_decoder.write(cfg),
        **rotary_decoder.qwen_window_settings(cfg),
        "model_type": "qwen3",
        "attention_bias": layer.self_attention.attention.output_linear.bias,
    }


QWEN3 = rotary_decoder.rotary_family("qwen3", "Qwen3ForCausalLM", parts, write)
