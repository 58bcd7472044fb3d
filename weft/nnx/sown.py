"""Storage of sown values during `nnx.capture`.

Each module then has an attribute that collects sown values. It is part of the module's state, so it
passes through transformations inside the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft.core.tracing import current_trace
from weft.errors import GraphStructureError
from weft.nnx.pytree import Pytree
from weft.nnx.variables import Variable

PLACE = "_captured"
"""Name of the attribute."""


class Unreturned(NamedTuple):
    """Placeholder for a value sown in an inner trace and not yet returned, with a previous one."""

    before: tuple[Any, ...]


class Captured(Pytree):
    """Values sown by one module.

    Each kind has one variable from the start, with a dict by name, so that transformations that
    return only variables' values return sown values too.

    Args:
        kinds: kinds of variables to collect, excluding derived kinds.
        outputs: kind for the results of methods, or None.
        left: initial values.
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
        """Stores a value as `Module.sow` does; returns False for kinds not collected."""
        if kind not in self.kinds:
            return False
        there = self._there(kind, name)
        before = init_fn() if there is None else _values(there)[name]
        variable = self._of_kind(kind) if there is None else there
        self._leave(variable, name, reduce_fn(before, value))
        return True

    def perturbation(self, kind: type[Variable[Any]], name: str, value: Any) -> Any:
        """Returns the term that `Module.perturb` adds, or None."""
        there = self._there(kind, name)
        if there is not None:
            return _values(there)[name]
        if kind not in self.kinds:
            return None
        zeros = jax.tree.map(jnp.zeros_like, value)
        self._leave(self._of_kind(kind), name, zeros)
        return zeros

    def unreturned(self) -> Iterator[str]:
        """Yields names of values that copies sowed and their trace did not return."""
        for variable in self.left:
            for name, value in variable.get_raw_value().items():
                if isinstance(value, Unreturned):
                    yield name

    def values(self) -> Iterator[tuple[str, Variable[Any]]]:
        """Yields each value as a variable, sorted by name."""
        holder = {name: v for v in self.left for name in v.get_raw_value()}
        for name in sorted(holder):
            yield name, type(holder[name])(holder[name].get_raw_value()[name])

    def _of_kind(self, kind: type[Variable[Any]]) -> Variable[Any]:
        return next(variable for variable in self.left if type(variable) is kind)

    def _leave(self, variable: Variable[Any], name: str, value: Any) -> None:
        here = current_trace()
        if variable._trace != here and self._watch.trace == here:
            variable = self._replace_outer(variable, name)
        variable.set_raw_value({**variable.get_raw_value(), name: value})

    def _replace_outer(self, outer: Variable[Any], name: str) -> Variable[Any]:
        """Replaces an outer trace's variable, leaving a placeholder in it."""
        values = _values(outer)
        inner = type(outer).from_metadata(values, outer.get_metadata())
        self.left[next(i for i, x in enumerate(self.left) if x is outer)] = inner
        before = (values[name],) if name in values else ()
        noted = {**outer.get_raw_value(), name: Unreturned(before)}
        outer.set_raw_value(noted, _unsafe_bypass_check=True)
        return inner

    def _there(self, kind: type[Variable[Any]], name: str) -> Variable[Any] | None:
        there = next((v for v in self.left if name in _values(v)), None)
        if there is not None and not isinstance(there, kind):
            raise GraphStructureError(
                f"{name!r} was sown as a {type(there).__name__}, and now as a {kind.__name__}, in "
                "one call; use another name."
            )
        return there


def _values(variable: Variable[Any]) -> dict[str, Any]:
    """Returns the values by name, with placeholders replaced by previous values."""
    values: dict[str, Any] = {}
    for name, value in variable.get_raw_value().items():
        if not isinstance(value, Unreturned):
            values[name] = value
        elif value.before:
            values[name] = value.before[0]
    return values
