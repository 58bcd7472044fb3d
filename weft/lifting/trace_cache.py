"""Functions that are compiled once, and objects that are made once for equal parts.

In another trace, a loop is a part of that trace. Outside of any, JAX would compile it at each call,
so it runs in a `jax.jit` that the transformed function keeps. As everywhere in JAX, what the user's
function reads from its closure or from globals is read when it is traced.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import numpy as np

from weft.lifting.kind import PureResults, Static
from weft.lifting.signature import named_after
from weft.lifting.static_keys import jax_products, value_key
from weft.lifting.traces import is_tracing
from weft.lifting.units import Units
from weft.typing import Fn, PyTree

T = TypeVar("T")

_MAX_CACHED = 256
_cache: OrderedDict[Hashable, Any] = OrderedDict()


def cached(parts: PyTree, make: Callable[[], T]) -> T:
    """Returns the object that `make` returned before for equal `parts`, all its static inputs."""
    key = value_key(parts)
    if key in _cache:
        _cache.move_to_end(key)
    else:
        _cache[key] = make()
        if len(_cache) > _MAX_CACHED:
            _cache.popitem(last=False)
    return _cache[key]


def jit_outside_traces(
    fn: Fn, pure: Callable[[Any, Units], PureResults]
) -> Callable[[Hashable, Units], PureResults]:
    """Returns `pure(static, units)`, which outside of a trace is compiled for each structure.

    `fn` is the user's function that `pure` calls, for its name.
    """

    def of_structure(structure: Static, values: list[PyTree]) -> PureResults:
        static, layout, _ = structure.value
        return pure(static, Units(layout, _unwrap_static(values)))

    jitted = jax.jit(named_after(fn, of_structure))

    def call(static: Hashable, units: Units) -> PureResults:
        has_refs = any(
            isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves(units.values)
        )
        # A function of `jax.jit` cannot return references.
        if is_tracing() or has_refs:
            return pure(static, units)
        # Shared values may be no arrays; the carry and slices are, or JAX makes arrays of them.
        values: list[PyTree] = []
        for unit, value in units.items():
            if unit.role is None:
                value = _wrap_static(value)
            values.append(value)
        return jitted(Static((static, units.layout, jax_products())), values)

    return call


@jax.tree_util.register_static
class _StaticLeaf:
    """Leaf of an argument other than an array, such as a string that all iterations share."""

    def __init__(self, value: Any):
        self.value = value
        self._key = value_key(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StaticLeaf) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic)


def _wrap_static(tree: PyTree) -> PyTree:
    def wrap_leaf(leaf: Any) -> Any:
        return leaf if isinstance(leaf, _ARRAY_TYPES) else _StaticLeaf(leaf)

    return jax.tree.map(wrap_leaf, tree)


def _unwrap_static(tree: PyTree) -> PyTree:
    def unwrap_leaf(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, _StaticLeaf) else leaf

    return jax.tree.map(
        unwrap_leaf, tree, is_leaf=lambda x: isinstance(x, _StaticLeaf)
    )
