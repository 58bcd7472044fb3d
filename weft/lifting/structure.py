"""Functions that are traced once for equal structure, also outside of any `jax.jit`.

A loop or a branch that runs outside of `jax.jit` is compiled by JAX for the function it is given.
That is a new one at each call here, so the call itself is put under a `jax.jit` of its own, with
all that is not an array as structure. Inside of another trace it leaves no mark.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from weft.lifting.crossing import Static, Units
from weft.lifting.functions import AtFirstCall, Same


def traced_by_structure(fns: Any, options: Any, pure: Callable[..., Any]) -> Callable[..., Any]:
    """A function of what crosses that is traced once for equal structure.

    Args:
        fns: the user's functions that `pure` calls.
        options: all else that `pure` depends on.
        pure: `pure(static, packed, *arrays)`, with a `Static` and the packed arguments. It calls
            `shown` on these.

    Returns:
        `call(static, units, *arrays)`.
    """
    jitted = AtFirstCall((fns, options), lambda: jax.jit(pure, inline=True))

    def call(static: Any, units: Units, *arrays: Any) -> Any:
        values = [
            jax.tree.map(_hidden, value) if role is None else value for value, role in units.pairs()
        ]
        return jitted.value(Static(static), units.rebuild(values), *arrays)

    return call


class _Hidden(Static):
    """What is no array and is the same for all."""


jax.tree_util.register_static(_Hidden)


def _hidden(x: Any) -> Any:
    if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return x
    return _Hidden(x if isinstance(x, Hashable) else Same(x))


def shown(packed: Any) -> Any:
    """The packed arguments as they were, inside of `pure`."""

    def show(x: Any) -> Any:
        value = x.value if isinstance(x, _Hidden) else x
        return value.value if isinstance(value, Same) else value

    return jax.tree.map(show, packed, is_leaf=lambda x: isinstance(x, _Hidden))
