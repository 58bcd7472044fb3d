"""What a child may do inside of a JAX transformation that the invocation around it does not cross.

`jax.vmap(self.child)(x)` hands no context through. The child finds its parameters, so a pure call
passes. What it would add to the outputs would leak a tracer, and its PRNG key would be the same for
every index or iteration, so these are refused.
"""

from typing import TYPE_CHECKING

from weft.core.raw_transformations import lifted_names, running_transformation
from weft.errors import ContextTransformError

if TYPE_CHECKING:
    from weft.hierarchy.context import InvocationContext

# What takes the place of those that have another name here than in the other packages.
_IN_CONTEXT = {"scan": "scan_in_context"}


def refused(context: "InvocationContext", what: str, why: str) -> ContextTransformError:
    """The error about something that a call inside of a transformation may not do.

    Args:
        context: in which it was to be done.
        what: was to be done.
        why: it is not.
    """
    module = context.module
    of_jax = running_transformation()
    names = [_IN_CONTEXT.get(name, name) for name in lifted_names(of_jax)]
    ours = "` or `".join(names) if of_jax else "the transformation of the same name"
    return ContextTransformError(
        f"{what} in {context.path() if module is None else module.path()!r} inside of "
        f"{of_jax or 'a transformation of JAX'}, "
        f"through which the invocation is not handed, so {why}. Use `{ours}` of "
        "`weft.hierarchy.transforms` in its place: it hands parameters, keys and outputs through."
    )
