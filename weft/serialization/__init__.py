"""Trees of state as dicts of plain values, and as bytes in Flax's format.

`to_bytes` and `from_bytes` combine both steps. `save_safetensors` and `load_safetensors` exchange
arrays with other programs.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
