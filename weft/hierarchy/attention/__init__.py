"""Attention and transformers in one namespace; each family has its own file.

From the inside out: projections and scales (`qkv_linear`, `rope`), biases (`bias`),
caches (`kv_cache`), attention (`multihead_attention`), residual branches and the feed-forward layer
(`feed_forward`), layers (`transformer`), stacks (`stack`).
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
