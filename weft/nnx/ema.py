"""Exponential moving averages of a model's variables."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from weft.errors import AverageLeafError, AverageStructureError
from weft.functional.statistics import update_running_average
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.graph import build_graph, flatten_graph
from weft.nnx.optimizer import leaves_by_path, raw_value, to_state_dict
from weft.nnx.pytree import Pytree, static
from weft.nnx.split_merge import state
from weft.nnx.state import path_text, to_flat_state
from weft.nnx.variables import Variable

M = TypeVar("M")


class EMA(Pytree):
    """Exponential moving average of each variable of a model.

    Args:
        params: model or state that provides the initial values.
        decay: weight of the old average in an update; an array if it should change.

    Attributes:
        params: averages, variables at the model's paths.

    Raises AverageLeafError if the filter matches an array that is not a variable.

    >>> model = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    >>> ema = EMA(model, decay=0.75)
    >>> model.w[...] = 4.0
    >>> ema.update(model)
    >>> ema.apply_to(model).w.tolist()
    [1.0, 1.0]
    """

    def __init__(
        self, params: object, decay: float, *, only: Filter = ..., graph: bool | None = None
    ):
        self.decay = decay
        self.filter = static(tuple(only) if isinstance(only, list) else only)
        self.params = to_state_dict(state(params, self.filter), _average)

    def update(self, updates: object) -> None:
        """Updates the averages: `average = decay * average + (1 - decay) * value`.

        Raises AverageStructureError if paths or shapes differ from those of the averages.
        """
        given, averages = leaves_by_path(updates), dict(to_flat_state(self.params))
        matches = to_predicate(self.filter)
        for path, x in given.items():
            if path not in averages and matches(path, x):
                raise AverageStructureError(
                    f"there is a value for {path_text(path)!r}, but no average; update with the "
                    "variables that the averages were made of."
                )
        moved = [
            (average, self._averaged(path, raw_value(average), given))
            for path, average in averages.items()
        ]
        for average, value in moved:
            average.set_raw_value(value)

    def _averaged(self, path: Path, average: Any, given: dict[Path, Any]) -> Any:
        if path not in given:
            raise AverageStructureError(
                f"there is an average for {path_text(path)!r}, but no value; update with the "
                "variables that the averages were made of."
            )
        value = raw_value(given[path])
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (average, value)]
        if shapes[0] != shapes[1]:
            raise AverageStructureError(
                f"the value for {path_text(path)!r} has shape {shapes[1]}, and its average "
                f"{shapes[0]}; update with the variables that the averages were made of."
            )

        def mean(a: Any, x: Any) -> jax.Array:
            return update_running_average(jnp.asarray(a), x, decay=self.decay)

        return jax.tree.map(mean, average, value)

    def apply_to(self, model: M) -> M:
        """Returns a copy of the model with the averages as values; other variables are shared.

        >>> model = nnx.Dict(w=nnx.Param(1.0))
        >>> EMA(model, 0.5).apply_to(model).w is model.w
        False
        """
        averages = dict(to_flat_state(self.params))
        flat = flatten_graph(model)
        pairs = zip(flat.graphdef.paths, flat.leaves, strict=True)
        leaves = [averages.get(path, leaf) for path, leaf in pairs]
        return build_graph(flat.graphdef, leaves, share=True)[0]


def _average(path: Path, x: object) -> Any:
    if not isinstance(x, Variable):
        raise AverageLeafError(
            f"there is a {type(x).__name__} at {path_text(path)!r}, and only variables have "
            "averages; make it a variable, or give only=nnx.Param."
        )
    return x.copy()
