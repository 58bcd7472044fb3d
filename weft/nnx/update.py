"""In-place changes of objects: update from a state, and removal of variables."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, overload

from weft.errors import GraphStructureError, StateFilterError, StatePathError
from weft.nnx.filters import Filter, Path, grouped
from weft.nnx.graph import flatten_graph
from weft.nnx.pytree import Pytree, children, iter_graph, with_children
from weft.nnx.state import State, from_flat_state, merge_state, path_text
from weft.nnx.variables import Variable
from weft.typing import PyTree


def update(node: PyTree, state: PyTree, /, *states: PyTree) -> None:
    """Updates the variables of an object in place from states.

    Args:
        state: complete or partial state, of variables or values; new paths become attributes.

    Raises StatePathError if the state's structure conflicts with the object, which stays unchanged.

    >>> model = nnx.Dict(w=nnx.Param(1.0))
    >>> nnx.update(model, {"w": 2.0})
    >>> model.w[...]
    2.0
    """
    new_state = merge_state(state, *states)
    # A bare variable or value has no paths, and stays what it is.
    new_values = (
        new_state.raw_mapping if isinstance(new_state, State) else new_state
    )
    plan = _UpdatePlan()
    if plan.updated(node, new_values, ()) is not node:
        raise StatePathError(
            f"a {type(node).__name__} cannot be updated from a {type(new_values).__name__}; give "
            "a state, nested dicts, or nnx.state(...) of an object."
        )
    for change in plan.changes:
        change()


class _UpdatePlan:
    """Changes of an object, to make once all of them are checked."""

    def __init__(self) -> None:
        self.changes: list[Callable[[], None]] = []

    def updated(self, old: PyTree, new: PyTree, path: Path) -> PyTree:
        """Returns what takes the place of a part: itself, if it changes in place."""
        if isinstance(old, Variable):
            if isinstance(new, Variable):
                change = functools.partial(old.update_from_state, new)
            else:
                change = functools.partial(old.set_raw_value, new)
            self.changes.append(change)
            return old
        if isinstance(new, dict):
            return self._with_updated_children(old, new, path)
        if isinstance(old, Pytree) and path:
            raise StatePathError(
                f"the object has a {type(old).__name__} at {path_text(path)!r}, and the state a "
                f"{type(new).__name__} there; give a state of that object, or assign the attribute."
            )
        return new

    def _with_updated_children(
        self, old: PyTree, new: dict[Hashable, PyTree], path: Path
    ) -> PyTree:
        old_children = dict(children(old))
        if not old_children and not isinstance(old, Pytree):
            first_key = next(iter(new), "...")
            raise StatePathError(
                f"the object has {old!r} at {path_text(path)!r}, and the state leads through it "
                f"to {path_text((*path, first_key))!r}; remove that from the state."
            )
        replaced: dict[Hashable, PyTree] = {}
        n_items = len(old_children)
        for name, value in new.items():
            if name in old_children:
                child = old_children[name]
                updated_child = self.updated(child, value, (*path, name))
                if updated_child is not child:
                    replaced[name] = updated_child
            # A state has no class for a new object, only values of a new variable's or array's.
            elif _may_add(old, name, n_items) and not isinstance(value, dict):
                replaced[name] = value
                n_items += 1
            else:
                names = ", ".join(map(str, old_children)) or "nothing"
                raise StatePathError(
                    f"{type(old).__name__} has nothing at {path_text((*path, name))!r}, which the "
                    f"state has; it has: {names}."
                )
        if not replaced:
            return old
        if isinstance(old, Pytree | list | dict):
            for name, value in replaced.items():
                self.changes.append(
                    functools.partial(_set_child, old, name, value)
                )
            return old
        if not path:
            raise StatePathError(
                f"a {type(old).__name__} cannot take the values at "
                f"{', '.join(map(str, replaced))}, as it is immutable; use a list."
            )
        # A tuple is immutable: its owner takes another one.
        return with_children(old, list({**old_children, **replaced}.values()))


def _may_add(owner: PyTree, name: Hashable, n_items: int) -> bool:
    """Returns whether an attribute or item can be added, the next one in case of a list."""
    if isinstance(owner, list):
        return isinstance(owner, Pytree) and name == n_items
    return isinstance(owner, Pytree | dict)


def _set_child(owner: Any, name: Any, value: PyTree) -> None:
    if isinstance(owner, list) and name == len(owner):
        owner.append(value)
    elif _is_item(owner, name):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _is_item(owner: PyTree, name: Hashable) -> bool:
    # A list may have attributes too.
    if isinstance(owner, list):
        return not isinstance(name, str)
    return isinstance(owner, dict)


class _Place(NamedTuple):
    """Attribute or item that holds a variable; `path` is that of its owner."""

    owner: PyTree
    name: Any
    path: Path


@overload
def pop(node: PyTree, only: Filter, /) -> State: ...
@overload
def pop(
    node: PyTree, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[State, ...]: ...


def pop(node: PyTree, *filters: Filter) -> State | tuple[State, ...]:
    """Removes variables and arrays from an object, and returns one state per filter.

    Raises:
        StateFilterError: without a filter.
        GraphStructureError: if a variable is in a tuple, which cannot lose it.

    >>> model = nnx.Dict(w=nnx.Param(1.0), seen=nnx.Intermediate(2))
    >>> nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate)), list(model)
    ({'seen': 2}, ['w'])
    """
    if not filters:
        raise StateFilterError(
            "pop needs a filter, such as nnx.pop(model, nnx.Intermediate)."
        )
    flat = flatten_graph(node)
    groups, _ = grouped(flat.items(), filters)
    removed_ids: set[int] = set()
    for group in groups:
        removed_ids.update(id(variable) for _, variable in group)
    places: list[_Place] = []
    for path, owner in iter_graph(node):
        for name, value in children(owner):
            if id(value) in removed_ids:
                places.append(_Place(owner, name, path))
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
