"""Weft: one JAX neural-network library, three ways to write a model, one trainer.

Imports no package before its first use, so that `import weft.config` stays free of JAX.

Examples in docstrings assume `import jax, optax, jax.numpy as jnp, numpy as np` and
`from weft import linen as nn, nnx`.
"""

from weft._distribution import warn_of_namesake
from weft._lazy import lazy_exports, name_missing_extras
from weft.compat.door import open_door

__version__ = "0.2.0"

warn_of_namesake()
name_missing_extras()
open_door()
__getattr__, __dir__, __all__ = lazy_exports(__name__)
