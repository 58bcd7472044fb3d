"""Hugging Face checkpoints of GPT-2, Llama, Mistral and Qwen as causal LMs, and back."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
