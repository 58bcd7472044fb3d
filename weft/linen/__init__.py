"""Linen: dataclass modules whose variables are stored in scopes.

`init` creates a module's variables and `apply` uses them. Transformations accept module classes,
methods and functions of modules. Layers declare parameters and compute with `weft.functional`.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
