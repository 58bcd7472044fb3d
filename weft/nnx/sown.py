"""What a module leaves behind while its call is captured.

While `nnx.capture` runs, each module has an attribute that takes what is sown. It is a part of the
module's state like any other, so it goes through transformations inside of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from weft.errors import GraphStructureError
from weft.nnx.pytree import Pytree
from weft.nnx.variables import Variable

PLACE = "_captured"
"""The attribute."""


class Captured(Pytree):
    """What one module leaves behind.

    For each kind there is one variable from the beginning, whose value is a dict by name. So a
    transformation that returns only values of variables returns what was sown.

    Args:
        kinds: the kinds of variables that are wanted; those derived from them are not.
        outputs: the kind under which the results of methods are left, or None.
        left: what is there from the beginning.

    Attributes:
        left: the variables, one for each kind that is wanted or there from the beginning.
    """

    def __init__(
        self,
        kinds: tuple[type[Variable[Any]], ...],
        outputs: type[Variable[Any]] | None,
        left: dict[str, Variable[Any]],
    ):
        self.kinds, self.outputs = kinds, outputs
        values: dict[type[Variable[Any]], dict[str, Any]] = {kind: {} for kind in kinds}
        for name, variable in left.items():
            values.setdefault(type(variable), {})[name] = variable.get_raw_value()
        self.left = [kind.from_metadata(value, {}) for kind, value in values.items()]

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
        before = init_fn() if there is None else there.get_raw_value()[name]
        self._leave(kind, there, name, reduce_fn(before, value))
        return True

    def perturbation(self, kind: type[Variable[Any]], name: str, value: Any) -> Any:
        """What `Module.perturb` adds, or None if nothing is to be added."""
        there = self._there(kind, name)
        if there is not None:
            return there.get_raw_value()[name]
        if kind not in self.kinds:
            return None
        zeros = jax.tree.map(jnp.zeros_like, value)
        self._leave(kind, there, name, zeros)
        return zeros

    def values(self) -> Iterator[tuple[str, Variable[Any]]]:
        """Each value that was left, as a variable, sorted by name."""
        holder = {name: v for v in self.left for name in v.get_raw_value()}
        for name in sorted(holder):
            yield name, type(holder[name])(holder[name].get_raw_value()[name])

    def _leave(
        self, kind: type[Variable[Any]], there: Variable[Any] | None, name: str, value: Any
    ) -> None:
        if there is None:
            there = next(variable for variable in self.left if type(variable) is kind)
        there.set_raw_value({**there.get_raw_value(), name: value})

    def _there(self, kind: type[Variable[Any]], name: str) -> Variable[Any] | None:
        """The variable that has a value of that name."""
        there = next((v for v in self.left if name in v.get_raw_value()), None)
        if there is not None and not isinstance(there, kind):
            raise GraphStructureError(
                f"{name!r} is left as a {type(there).__name__}, and now as a {kind.__name__}, in "
                "one call; use another name."
            )
        return there
