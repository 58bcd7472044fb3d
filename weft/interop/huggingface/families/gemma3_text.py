"""Gemma 3, for text: windows and positions by kind of layer (Gemma Team, 2025)."""

from typing import Any

from weft import hierarchy
from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Rotary, Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    s.require("use_bidirectional_attention", False)
    s.require("attn_logit_softcapping")
    s.require("final_logit_softcapping")
    count = rotary_decoder.num_layers(s)
    pattern = s.size(
        "sliding_window_pattern", s.size("_sliding_window_pattern", 6)
    )
    types = [rotary_decoder.SLIDING] * count
    types[pattern - 1 :: pattern] = [rotary_decoder.FULL] * (count // pattern)
    types = rotary_decoder.layer_types(s, types)
    rotaries = {
        rotary_decoder.FULL: s.rotary(rotary_decoder.FULL, theta=1e6),
        rotary_decoder.SLIDING: _local_rotary(s),
    }
    has_bias = s.flag("attention_bias", False)
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 4),
        default_head_dim=256,
        windows=rotary_decoder.windows_by_type(s, types, 4096),
        rotaries=[rotaries[layer_type] for layer_type in types],
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm="head",
        structure="hybridnorm",
        scale_offset=1.0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        query_scale=s.number("query_pre_attn_scalar", 256, least=1e-6) ** -0.5,
        embedding_scale="unit",
        is_tied_by_default=True,
    )


def _local_rotary(s: Settings) -> Rotary:
    """Returns the positions of layers with windows, which an extension does not change."""
    values = s.get("rope_parameters", {})
    if isinstance(values, dict) and rotary_decoder.SLIDING in values:
        return s.rotary(rotary_decoder.SLIDING)
    theta = s.number("rope_local_base_freq", 10000.0, least=1.0)
    return hierarchy.RoFormerSinusoidalPositionalEmbedding.default_config().set(
        theta=theta
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layers = family.layers_of(cfg.decoder.transformer)
    attention = layers[0].self_attention.attention
    values = rotary_decoder.write(cfg)
    windows = rotary_decoder.windows_of(cfg)
    ropes: dict[str, Any] = {}
    for layer, window in zip(layers, windows, strict=True):
        layer_type = rotary_decoder.SLIDING
        if window is None:
            layer_type = rotary_decoder.FULL
        if layer_type not in ropes:
            ropes[layer_type] = rotary_decoder.rotary_settings([layer])
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    ropes = {
        rotary_decoder.FULL: {**plain, "rope_theta": 1e6},
        rotary_decoder.SLIDING: plain,
        **ropes,
    }
    for name in ("rope_theta", "rope_scaling", "hidden_act"):
        values.pop(name, None)
    return {
        **values,
        **rotary_decoder.window_settings(cfg),
        "model_type": "gemma3_text",
        "attention_bias": attention.output_linear.bias,
        "hidden_activation": family.activation_name(
            layers[0].feed_forward.activation[0]
        ),
        "query_pre_attn_scalar": rotary_decoder.query_pre_attn_scalar(
            attention
        ),
        "rope_parameters": ropes,
        # Of readers before transformers 5.
        "rope_theta": ropes[rotary_decoder.FULL]["rope_theta"],
        "rope_local_base_freq": ropes[rotary_decoder.SLIDING]["rope_theta"],
    }


GEMMA3_TEXT = rotary_decoder.rotary_family(
    "gemma3_text", "Gemma3ForCausalLM", parts, write
)
