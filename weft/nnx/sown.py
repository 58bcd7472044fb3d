"""What a module leaves behind while its call is captured.

While `nnx.capture` runs, each module has an attribute that takes what is sown. It is a part of the
module's state like any other, so it goes through transformations inside of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft.errors import GraphStructureError
from weft.nnx.pytree import Pytree
from weft.nnx.variables import Variable

PLACE = "_captured"
"""The attribute."""


class Left(Pytree):
    """Variables by the name under which they were left."""


class Captured(Pytree):
    """What one module leaves behind.

    Args:
        kinds: the kinds of variables that are wanted; those derived from them are not.
        outputs: the kind under which the results of methods are left, or None.
        left: what is there from the beginning.

    Attributes:
        left: the variables.
    """

    def __init__(
        self,
        kinds: tuple[type[Variable[Any]], ...],
        outputs: type[Variable[Any]] | None,
        left: dict[str, Variable[Any]],
    ):
        self.kinds, self.outputs, self.left = kinds, outputs, Left()
        for name, variable in left.items():
            setattr(self.left, name, variable)

    def sow(
        self,
        kind: type[Variable[Any]],
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any],
        init_fn: Callable[[], Any],
    ) -> bool:
        """See `Module.sow`; what is not wanted is dropped, and the result is False."""
        if kind not in self.kinds:
            return False
        there = self._there(kind, name)
        before = init_fn() if there is None else there.get_value()
        after = reduce_fn(before, value)
        setattr(self.left, name, kind(after)) if there is None else there.set_value(after)
        return True

    def perturbation(self, kind: type[Variable[Any]], name: str, value: Any) -> Any:
        """What `Module.perturb` adds, or None if nothing is to be added."""
        there = self._there(kind, name)
        if there is None and kind in self.kinds:
            there = kind(jax.tree.map(jnp.zeros_like, value))
            setattr(self.left, name, there)
        return there

    def _there(self, kind: type[Variable[Any]], name: str) -> Variable[Any] | None:
        there = dict(self.left._items()).get(name)
        if there is not None and not isinstance(there, kind):
            raise GraphStructureError(
                f"{name!r} is left as a {type(there).__name__}, and now as a {kind.__name__}, in "
                "one call; use another name."
            )
        return there
