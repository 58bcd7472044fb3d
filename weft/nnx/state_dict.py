"""State in an object that tracks changes.

A `State` can change unnoticed, so a call that remembers an object's structure would have to check
it each time. Optimizers and averages keep their state per parameter in a `StateDict` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from weft.errors import OptimizerStateError
from weft.nnx.containers import Dict, List
from weft.nnx.filters import Path
from weft.nnx.graph import children, data_children, is_array
from weft.nnx.pytree import Pytree
from weft.nnx.state import State, shown_path
from weft.nnx.variables import Variable


class StateDict(Dict):
    """Dict with the structure of a `State`; arguments as for `dict`.

    Example:
        >>> from weft import nnx
        >>> kept = StateDict({"layer": {"kernel": nnx.Param(1.0)}})
        >>> kept.layer.kernel[...], kept["layer"]["kernel"][...]
        (1.0, 1.0)
    """


def kept(tree: Any, make: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Returns a pytree with variables `make(path, leaf)` as leaves, in change-tracking containers.

    States become a `StateDict`, lists and dicts a `List` and a `Dict`; `path` prefixes all paths.

    Example:
        >>> from weft import nnx
        >>> kept({"count": 0}, lambda path, x: nnx.Variable(x)).count[...]
        0
    """
    if isinstance(tree, Variable):
        return make(path, tree)
    kind = type(tree)
    if kind is State:
        mapping = tree.raw_mapping
        return StateDict({name: kept(value, make, (name,)) for name, value in mapping.items()})
    if kind is dict:
        return Dict({name: kept(value, make, (*path, name)) for name, value in tree.items()})
    if kind is list:
        return List([kept(value, make, (*path, i)) for i, value in enumerate(tree)])
    below, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    if below and below[0] is tree:
        return make(path, tree)
    parts = [kept(value, make, (*path, i)) for i, value in enumerate(below)]
    return jax.tree.unflatten(structure, parts)


def raw(x: Any) -> Any:
    """Returns the value of a variable without hooks; other leaves are unchanged."""
    if not isinstance(x, Variable):
        return x
    value = x.get_raw_value()
    return value[...] if isinstance(value, jax.Ref) else value


def values_of(tree: Any) -> Any:
    """Returns the pytree given to `kept`, with the variables' current values."""
    if isinstance(tree, Variable):
        return raw(tree)
    if isinstance(tree, Dict):
        values = {name: values_of(value) for name, value in tree.items()}
        return State(values, _copy=False) if isinstance(tree, StateDict) else values
    if isinstance(tree, List):
        return [values_of(value) for value in tree]
    below, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    if below and below[0] is tree:
        return tree
    return jax.tree.unflatten(structure, [values_of(value) for value in below])


def matched(tree: Any, values: Any, path: Path = ()) -> Iterator[tuple[Variable[Any], Any]]:
    """Yields the variables of a result of `kept`, each with its value in another pytree.

    Raises:
        OptimizerStateError: if the structures differ.
    """
    if isinstance(tree, Variable):
        yield tree, values
        return
    there, given = children(tree), dict(children(values))
    if len(there) != len(given) or any(name not in given for name, _ in there):
        names = ", ".join(str(name) for name, _ in there) or "nothing"
        raise OptimizerStateError(
            f"the state of the optimizer has {names} at {shown_path(path) or 'its root'!r}, but "
            f"its transformation returned {', '.join(map(str, given)) or repr(values)} for it; an "
            "update must return a state with the structure that init returned."
        )
    for name, value in there:
        yield from matched(value, given[name], (*path, name))


def leaves_of(tree: Any, once: bool | None = None) -> dict[Path, Any]:
    """Returns the variables and other leaves of a model, a state or nested dicts, by path.

    With `once`, the default for objects, a repeated variable has only its first path.

    Example:
        >>> list(leaves_of({"a": {"b": 1.0}, "c": None}))
        [('a', 'b')]
    """
    found: dict[Path, Any] = {}
    seen: set[int] = set()
    once = isinstance(tree, Pytree) if once is None else once

    def walk(x: Any, path: Path) -> None:
        if isinstance(x, Variable) or is_array(x):
            if not (once and isinstance(x, Variable) and id(x) in seen):
                found[path] = x
                seen.add(id(x))
        elif below := data_children(x):
            if isinstance(x, Pytree):
                if id(x) in seen:
                    return
                seen.add(id(x))
            for name, value in below:
                walk(value, (*path, name))
        elif not (x is None or isinstance(x, Mapping | Sequence | Pytree)):
            found[path] = x

    walk(tree, ())
    return found
