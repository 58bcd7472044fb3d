"""Mistral: as Llama without biases, with attention within a window (Jiang et al., 2023)."""

from typing import Any

from weft.interop.huggingface import rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import MAX_SIZE, Settings


def parts(s: Settings) -> Parts:
    """Returns what this family's layers have: a window in all of them, or in none."""
    window = None
    if s.values.get("sliding_window", 0) is not None:
        window = s.size("sliding_window", 4096, most=MAX_SIZE)
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 8),
        windows=[window] * rotary_decoder.num_layers(s),
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    window = rotary_decoder.windows_of(cfg)[0]
    return {
        **rotary_decoder.write(cfg),
        "model_type": "mistral",
        "sliding_window": window,
    }


MISTRAL = rotary_decoder.rotary_family(
    "mistral", "MistralForCausalLM", parts, write
)
