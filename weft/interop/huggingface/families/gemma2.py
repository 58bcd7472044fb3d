"""Gemma 2: norms on both sides of a branch, bounded logits (Gemma Team, 2024)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    s.require("use_bidirectional_attention", False)
    count = rotary_decoder.num_layers(s)
    types = [rotary_decoder.SLIDING, rotary_decoder.FULL] * count
    types = rotary_decoder.layer_types(s, types[:count])
    has_bias = s.flag("attention_bias", False)
    attention_cap = s.get("attn_logit_softcapping", None)
    logit_cap = s.get("final_logit_softcapping", None)
    if attention_cap is not None:
        attention_cap = s.number("attn_logit_softcapping", least=1e-6)
    if logit_cap is not None:
        logit_cap = s.number("final_logit_softcapping", least=1e-6)
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 4),
        default_head_dim=256,
        windows=rotary_decoder.windows_by_type(s, types, 4096),
        qkv_bias=has_bias,
        output_bias=has_bias,
        structure="hybridnorm",
        scale_offset=1.0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        query_scale=s.number("query_pre_attn_scalar", 256, least=1e-6) ** -0.5,
        atten_logit_cap=attention_cap,
        logit_cap=logit_cap,
        embedding_scale="unit",
        is_tied_by_default=True,
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    decoder = cfg.decoder
    layer = family.layers_of(decoder.transformer)[0]
    attention = layer.self_attention.attention
    values = rotary_decoder.write(cfg)
    return {
        **values,
        **rotary_decoder.window_settings(cfg),
        "model_type": "gemma2",
        "attention_bias": attention.output_linear.bias,
        "hidden_activation": values["hidden_act"],
        "query_pre_attn_scalar": rotary_decoder.query_pre_attn_scalar(
            attention
        ),
        "attn_logit_softcapping": attention.atten_logit_cap,
        "final_logit_softcapping": decoder.emb.soft_cap_logits,
    }


GEMMA2 = rotary_decoder.rotary_family(
    "gemma2", "Gemma2ForCausalLM", parts, write
)
