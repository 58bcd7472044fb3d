"""SmolLM 3: as Llama, some layers without positions (Hugging Face, 2025)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    count = rotary_decoder.num_layers(s)
    interval = s.size("no_rope_layer_interval", 4)
    # One is a layer with rotary positions, in spite of the name.
    default = [int((i + 1) % interval != 0) for i in range(count)]
    flags = s.get("no_rope_layers", default)
    if not isinstance(flags, list) or len(flags) != count:
        raise s.refusal(
            "no_rope_layers",
            flags,
            f"can be a list with one entry for each of {count} layers",
        )
    for flag in flags:
        if flag not in (0, 1):
            raise s.refusal("no_rope_layers", flag, "can be a list of 0 and 1")
    rotary = s.rotary(theta=2e6)
    has_bias = s.flag("attention_bias", False)
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 4),
        windows=rotary_decoder.qwen_windows(s),
        rotaries=[rotary if flag else None for flag in flags],
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=s.flag("mlp_bias", False),
        is_tied_by_default=True,
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layers = family.layers_of(cfg.decoder.transformer)
    return {
        **rotary_decoder.write(cfg),
        **rotary_decoder.qwen_window_settings(cfg),
        "model_type": "smollm3",
        "attention_bias": layers[0].self_attention.attention.output_linear.bias,
        "mlp_bias": layers[0].feed_forward.linear2.bias,
        "no_rope_layers": [
            int(rotary_decoder.is_rotary(layer)) for layer in layers
        ],
    }


SMOLLM3 = rotary_decoder.rotary_family(
    "smollm3", "SmolLM3ForCausalLM", parts, write
)
