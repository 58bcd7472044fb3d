"""Hugging Face checkpoints: GPT-2, Llama and Qwen as causal LMs of the hierarchy, and back."""

from weft.interop.huggingface.folders import (
    FAMILIES,
    from_huggingface,
    huggingface_model_config,
    load_huggingface_params,
    to_huggingface,
)

__all__ = [
    "from_huggingface",
    "to_huggingface",
    # The two steps of reading.
    "huggingface_model_config",
    "load_huggingface_params",
    "FAMILIES",
]
