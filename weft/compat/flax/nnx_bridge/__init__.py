"""Bridge between Linen and NNX, with state and axis metadata.

`ToNNX` wraps a Linen module, `to_linen` wraps an NNX module, and the bridge's `Module` is an NNX
module written like a Linen one. The code is in `weft.interop` and loads on demand.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
