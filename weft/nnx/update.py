"""In-place changes of objects: update from a state, and removal of variables."""

import functools
from collections.abc import Callable
from typing import Any

from weft.errors import GraphStructureError, StateFilterError, StatePathError
from weft.nnx.filters import Filter, Path, grouped
from weft.nnx.graph import flatten_graph
from weft.nnx.pytree import Pytree, children, iter_graph, with_children
from weft.nnx.state import State, from_flat_state, merge_state, path_text
from weft.nnx.variables import Variable


def update(node: object, state: object, /, *states: object) -> None:
    """Updates the variables of an object in place from states.

    Args:
        state: complete or partial state, of variables or values; new paths become attributes.

    Raises StatePathError if the state's structure conflicts with the object, which stays unchanged.

    >>> model = nnx.Dict(w=nnx.Param(1.0))
    >>> nnx.update(model, {"w": 2.0})
    >>> model.w[...]
    2.0
    """
    whole = merge_state(state, *states)
    nested = whole.raw_mapping if isinstance(whole, State) else whole
    changes: list[Callable[[], None]] = []
    if _plan_update(node, nested, (), changes) is not node:
        raise StatePathError(
            f"a {type(node).__name__} cannot be updated from a {type(nested).__name__}; give a "
            "state, nested dicts, or nnx.state(...) of an object."
        )
    for change in changes:
        change()


def _plan_update(x: object, new: object, path: Path, changes: list[Callable[[], None]]) -> Any:
    if isinstance(x, Variable):
        if isinstance(new, Variable):
            changes.append(lambda: x.update_from_state(new))
        else:
            changes.append(lambda: x.set_raw_value(new))
        return x
    if not isinstance(new, dict):
        if isinstance(x, Pytree) and path:
            raise StatePathError(
                f"the object has a {type(x).__name__} at {path_text(path)!r}, and the state a "
                f"{type(new).__name__} there; give a state of that object, or assign the attribute."
            )
        return new
    there = dict(children(x))
    if not there and not isinstance(x, Pytree):
        raise StatePathError(
            f"the object has {x!r} at {path_text(path)!r}, and the state leads through it to "
            f"{path_text((*path, next(iter(new), '...')))!r}; remove that from the state."
        )
    replaced, n_added = {}, 0
    for name, value in new.items():
        if name in there:
            after = _plan_update(there[name], value, (*path, name), changes)
            if after is not there[name]:
                replaced[name] = after
        elif isinstance(value, dict) or not _may_add(x, name, len(there) + n_added):
            raise StatePathError(
                f"{type(x).__name__} has nothing at {path_text((*path, name))!r}, which the "
                f"state has; it has: {', '.join(map(str, there)) or 'nothing'}."
            )
        else:
            replaced[name] = value
            n_added += 1
    if not replaced:
        return x
    if isinstance(x, Pytree | list | dict):
        changes.extend(functools.partial(_set, x, name, v) for name, v in replaced.items())
        return x
    if not path:
        raise StatePathError(
            f"a {type(x).__name__} cannot take the values at "
            f"{', '.join(map(str, replaced))}, as it is immutable; use a list."
        )
    return with_children(x, [replaced.get(name, value) for name, value in there.items()])


def _may_add(x: object, name: object, n_items: int) -> bool:
    """Returns whether an attribute or item can be added, the next one in case of a list."""
    if isinstance(x, list):
        return isinstance(x, Pytree) and name == n_items
    return isinstance(x, Pytree | dict)


def _set(owner: Any, name: Any, value: object) -> None:
    if isinstance(owner, list) and name == len(owner):
        owner.append(value)
    elif _is_item(owner, name):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _is_item(owner: object, name: object) -> bool:
    # A list may have attributes too.
    return isinstance(owner, dict) or (isinstance(owner, list) and not isinstance(name, str))


def pop(node: object, *filters: Filter) -> Any:
    """Removes variables and arrays from an object, and returns one state per filter.

    Raises:
        StateFilterError: without a filter.
        GraphStructureError: if a variable is in a tuple, which cannot lose it.

    >>> model = nnx.Dict(w=nnx.Param(1.0), seen=nnx.Intermediate(2))
    >>> nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate)), list(model)
    ({'seen': 2}, ['w'])
    """
    if not filters:
        raise StateFilterError("pop needs a filter, such as nnx.pop(model, nnx.Intermediate).")
    flat = flatten_graph(node)
    items = list(flat.items())
    groups, _ = grouped(items, filters)
    gone = {id(variable) for group in groups for _, variable in group}
    places: list[tuple[Any, Any, Path]] = [
        (owner, name, path)
        for path, owner in iter_graph(node)
        for name, value in children(owner)
        if id(value) in gone
    ]
    for owner, name, path in places:
        if not isinstance(owner, Pytree | list | dict):
            raise GraphStructureError(
                f"the variable at {path_text((*path, name))!r} is in a "
                f"{type(owner).__name__}, which cannot lose it; keep it in a list or an attribute."
            )
    for owner, name, _ in reversed(places):  # the last of a list first
        if _is_item(owner, name):
            del owner[name]
        else:
            delattr(owner, name)
    states = [from_flat_state(group) for group in groups]
    return states[0] if len(states) == 1 else tuple(states)
