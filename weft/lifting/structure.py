"""Functions that are traced once for equal structure, also outside of `jax.jit`.

Outside of `jax.jit`, JAX compiles a loop or a branch for the identity of its function, which is new
at each call here. The call therefore runs in a `jax.jit`, with static values as structure. Inside
of another trace, this has no effect.

An output that is an unchanged input is replaced by the caller's value, so that surrounding
transformations, which may share it, recognize it as unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from weft.lifting.crossing import Static, Units
from weft.lifting.functions import AtFirstCall, Same
from weft.lifting.names import named_after
from weft.lifting.stack import with_room


def traced_by_structure(fns: Any, options: Any, pure: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `pure(static, units, *arrays)` as a function that is traced once for equal structure.

    `fns` are the user's functions that `pure` calls, and `options` its other dependencies.
    """

    # Takes leaves instead of trees, since JAX flattens its arguments repeatedly.
    def of_leaves(structure: Static, leaves: list[Any], *arrays: Any) -> tuple[Any, Static]:
        static, layout, trees = structure.value
        rest = map(_shown, leaves)
        values = [tree.unflatten(itertools.islice(rest, tree.num_leaves)) for tree in trees]
        results, tree = jax.tree.flatten(with_room(pure, static, Units(layout, values), *arrays))
        given = {id(x): i for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        kept = {i: given[id(x)] for i, x in enumerate(results) if id(x) in given}
        changed = [x for i, x in enumerate(results) if i not in kept]
        return changed, Static((tree, tuple(kept.items())))

    def make() -> Callable[..., Any]:
        named = fns[-1] if isinstance(fns, tuple) else fns
        return jax.jit(named_after(named, of_leaves), inline=True)

    jitted = AtFirstCall((fns, options), make)

    def call(static: Any, units: Units, *arrays: Any) -> Any:
        leaves, trees = [], []
        for value, role in units.pairs():
            of_value, tree = jax.tree.flatten(value)
            leaves.extend(map(_hidden, of_value) if role is None else of_value)
            trees.append(tree)
        structure = Static((static, units.layout, tuple(trees)))
        changed, rest = jitted.value(structure, leaves, *arrays)
        tree, kept = rest.value
        if not kept:
            return tree.unflatten(changed)
        own, others = dict(kept), iter(changed)
        return tree.unflatten(
            leaves[own[i]] if i in own else next(others) for i in range(tree.num_leaves)
        )

    return call


@jax.tree_util.register_static
class _Hidden(Static):
    """Static value that is equal to all others."""


def _hidden(x: Any) -> Any:
    if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return x
    return _Hidden(x if isinstance(x, Hashable) else Same(x))


def _shown(x: Any) -> Any:
    value = x.value if isinstance(x, _Hidden) else x
    return value.value if isinstance(value, Same) else value
