"""Llama: rotary positions, RMSNorm, gated feed-forward layers (Touvron et al., 2023)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns what this family's layers have: biases of all projections, or none."""
    s.require("pretraining_tp", 1)
    has_bias = s.flag("attention_bias", False)
    return Parts(
        num_kv_heads=s.size(
            "num_key_value_heads", s.size("num_attention_heads")
        ),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=s.flag("mlp_bias", False),
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layer = family.layers_of(cfg.decoder.transformer)[0]
    return {
        **rotary_decoder.write(cfg),
        "model_type": "llama",
        "attention_bias": layer.self_attention.attention.output_linear.bias,
        "mlp_bias": layer.feed_forward.linear2.bias,
    }


LLAMA = rotary_decoder.rotary_family("llama", "LlamaForCausalLM", parts, write)
