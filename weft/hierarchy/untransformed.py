"""Errors about side effects inside JAX transformations that an invocation does not cross.

`jax.vmap(self.child)(x)` does not pass the context through. The child can read its parameters, so a
pure call works. Its outputs would leak tracers, and its PRNG key would be the same for every index
or iteration, so both are refused.
"""

from typing import TYPE_CHECKING

from weft.core.raw_transformations import lifted_names, running_transformation
from weft.errors import ContextTransformError

if TYPE_CHECKING:
    from weft.hierarchy.context import InvocationContext

# Transformations with another name in this package.
_IN_CONTEXT = {"scan": "scan_in_context"}


def refused(context: "InvocationContext", what: str, why: str) -> ContextTransformError:
    """Returns the error for a refused side effect.

    Args:
        context: context of the call.
        what: the refused effect, such as "the PRNG key is read".
        why: the reason, such as "every iteration would draw the same".
    """
    module = context.module
    of_jax = running_transformation()
    names = [_IN_CONTEXT.get(name, name) for name in lifted_names(of_jax)]
    ours = "` or `".join(names) if of_jax else "the transformation of the same name"
    return ContextTransformError(
        f"{what} in {context.path() if module is None else module.path()!r} inside of "
        f"{of_jax or 'a transformation of JAX'}, "
        f"which does not pass the invocation through, so {why}. Use `{ours}` of "
        "`weft.hierarchy.transforms` instead: it passes parameters, keys and outputs through."
    )
