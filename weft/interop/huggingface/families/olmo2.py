"""OLMo 2: norms after the branches, and of all heads together (OLMo Team, 2025)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    has_bias = s.flag("attention_bias", False)
    return Parts(
        num_kv_heads=s.size(
            "num_key_value_heads", s.size("num_attention_heads")
        ),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm="all",
        structure="v2",
        default_eps=1e-5,
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layer = family.layers_of(cfg.decoder.transformer)[0]
    return {
        **rotary_decoder.write(cfg),
        "model_type": "olmo2",
        "attention_bias": layer.self_attention.attention.output_linear.bias,
    }


OLMO2 = rotary_decoder.rotary_family("olmo2", "Olmo2ForCausalLM", parts, write)
