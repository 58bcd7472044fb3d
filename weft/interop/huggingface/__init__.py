"""Hugging Face checkpoints: GPT-2, Llama and Qwen as causal LMs of the hierarchy, and back."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
