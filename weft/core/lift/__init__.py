"""JAX transformations of functions of scopes.

A lifted function takes a scope, or a pytree of scopes, before its other arguments. Filters such as
`variables` and `rngs` select collections and PRNG streams; unselected ones cannot be used inside.
`weft.lifting` contains the implementation.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
