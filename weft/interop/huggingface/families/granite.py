"""Granite: as Llama, with factors of embeddings, branches and logits (IBM, 2024)."""

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
        mlp_bias=s.flag("mlp_bias", False),
        query_scale=s.number("attention_multiplier", 1.0),
        embedding_scale=s.number("embedding_multiplier", 1.0),
        residual_weight=s.number("residual_multiplier", 1.0),
        logit_divisor=s.number("logits_scaling", 1.0, least=1e-6),
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    decoder = cfg.decoder
    layer = family.layers_of(decoder.transformer)[0]
    attention = layer.self_attention.attention
    modifier = decoder.output_logits_modifier
    return {
        **rotary_decoder.write(cfg),
        "model_type": "granite",
        "attention_bias": attention.output_linear.bias,
        "mlp_bias": layer.feed_forward.linear2.bias,
        "attention_multiplier": attention.query_scale.scale_factor.value,
        "embedding_multiplier": decoder.emb.token_emb.scale_constant or 1.0,
        "residual_multiplier": layer.feed_forward.residual_weight,
        "logits_scaling": 1.0 if modifier is None else modifier.temperature,
    }


GRANITE = rotary_decoder.rotary_family(
    "granite", "GraniteForCausalLM", parts, write
)
