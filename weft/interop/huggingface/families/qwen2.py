"""Qwen 2: as Llama, with biases of queries, keys and values (Qwen Team, 2024)."""

from typing import Any

from weft.interop.huggingface import rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import Settings


def parts(s: Settings) -> Parts:
    """Returns what this family's layers have."""
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 32),
        windows=rotary_decoder.qwen_windows(s),
        qkv_bias=True,
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    return {
        **rotary_decoder.write(cfg),
        **rotary_decoder.qwen_window_settings(cfg),
        "model_type": "qwen2",
    }


QWEN2 = rotary_decoder.rotary_family("qwen2", "Qwen2ForCausalLM", parts, write)
