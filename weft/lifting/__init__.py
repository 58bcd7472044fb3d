"""Every JAX transformation, once, for anything that carries state.

`crossing` is the trip that state makes, `roles` says what happens to each part of it, and each
transformation is a function of a `Kind`: of how one sort of carrier (a context, a scope, an object)
makes that trip.
"""

from weft.lifting.autodiff import grad, value_and_grad
from weft.lifting.crossing import Kind
from weft.lifting.jit import jit
from weft.lifting.remat import remat
from weft.lifting.roles import CARRY, DIFF, FORK, Roles
from weft.lifting.scan import scan
from weft.lifting.vmap import vmap

__all__ = [
    "CARRY",
    "DIFF",
    "FORK",
    "Kind",
    "Roles",
    "grad",
    "jit",
    "remat",
    "scan",
    "value_and_grad",
    "vmap",
]
