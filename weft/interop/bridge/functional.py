"""NNX classes as pairs of pure functions: `init` gives a state, `apply` takes one."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from weft.errors import GraphStructureError
from weft.nnx.graph import GraphDef
from weft.nnx.rngs import Rngs
from weft.nnx.splitting import split
from weft.nnx.state import State

__all__ = ["Functional", "functional"]

M = TypeVar("M")


@dataclasses.dataclass
class Functional(Generic[M]):
    """A module to be made by `init`.

    Attributes:
        graphdef: its description, once `init` has run.
    """

    module_type: type[M]
    graphdef: GraphDef | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: Rngs | None = None) -> State:
        """Makes the module and returns its state; `rngs` go to the class if it takes streams."""
        streams = {} if rngs is None else {"rngs": rngs}
        self.graphdef, state = split(self.module_type(*self.args, **self.kwargs, **streams))
        return state

    def apply(self, *states: Any) -> Any:
        """Returns a callable like the module, on the given state or its parts.

        See `nnx.call`: calls return the result, and the new description and state.

        Raises:
            GraphStructureError: before `init`.
        """
        if self.graphdef is None:
            raise GraphStructureError(
                f"the structure of {self.module_type.__name__} is known after `init` was called; "
                "call it once before `apply`."
            )
        return self.graphdef.apply(*states)


def functional(cls: type[M]) -> Callable[..., Functional[M]]:
    """Returns a class of modules whose instances are made by `init`.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> linear = functional(nnx.Linear)(3, 2)
        >>> state = linear.init(rngs=nnx.Rngs(0))
        >>> y, (graphdef, state) = linear.apply(state)(jnp.ones((1, 3)))
        >>> y.shape
        (1, 2)
    """
    return lambda *args, **kwargs: Functional(cls, None, args, kwargs)
