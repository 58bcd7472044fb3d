"""States: the contents of a graph of objects, by path.

A `State` is a nested mapping and a pytree; a `FlatState` is a sorted list of paths and values. Both
can be split by filters, merged, and converted to dicts of plain values.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, overload

import jax

from weft.errors import StateFilterError, StatePathError, warn_deprecated
from weft.nnx.display import Enclosing, Rendering, Shown, mapping_repr
from weft.nnx.filters import Filter, Path, filters_text, grouped
from weft.nnx.variables import Variable, value_of
from weft.typing import PyTree

FlatItems = Mapping[Path, PyTree] | Iterable[tuple[Path, PyTree]]
StateLike = PyTree
"""State, nested dicts, or a flat state; or a bare variable or value."""


def _sort_key(path: Path) -> tuple[Any, ...]:
    # Strings and numbers, which Python does not compare, apart.
    return tuple((isinstance(part, str), part) for part in path)


class State(Shown, MutableMapping[Hashable, Any]):
    """Nested mapping from attribute names to a graph's variables and arrays.

    `mapping` is a nested mapping, or an iterable of keys and values.

    >>> state = State({"layer": {"kernel": nnx.Param(1.0)}})
    >>> state.layer.kernel.get_value(), state["layer"]["kernel"].get_value()
    (1.0, 1.0)
    """

    def __init__(
        self,
        mapping: Mapping[Any, PyTree] | Iterable[tuple[Hashable, PyTree]] = (),
        *,
        _copy: bool = True,
    ):
        if isinstance(mapping, State):
            mapping = mapping._mapping
        if _copy or not isinstance(mapping, dict):
            mapping = _as_dicts(dict(mapping))
        # `__setattr__` sets entries.
        object.__setattr__(self, "_mapping", mapping)

    @property
    def raw_mapping(self) -> dict[Hashable, Any]:
        """The underlying nested dicts."""
        return self._mapping

    def __getitem__(self, key: Hashable) -> PyTree:
        mapping = self._mapping
        if key not in mapping:
            keys = ", ".join(map(repr, mapping)) or "nothing"
            raise StatePathError(f"the state has no {key!r}; its keys: {keys}.")
        value = mapping[key]
        if isinstance(value, dict):
            return State(value, _copy=False)
        return value

    def __setitem__(self, key: Hashable, value: PyTree) -> None:
        if isinstance(value, State | dict):
            value = _as_dicts(value)
        self._mapping[key] = value

    def __delitem__(self, key: Hashable) -> None:
        del self._mapping[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except StatePathError as error:
            raise AttributeError(str(error)) from None

    def __setattr__(self, name: str, value: PyTree) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __or__(self, other: "State") -> "State":
        if not isinstance(other, State):
            return NotImplemented
        return merge_state(self, other)

    def __sub__(self, other: "State") -> "State":
        if not isinstance(other, State):
            return NotImplemented
        warn_deprecated(
            "the difference of states", "compare the paths of nnx.to_flat_state"
        )
        remaining = dict(to_flat_state(self))
        for path, _ in to_flat_state(other):
            remaining.pop(path, None)
        return from_flat_state(remaining)

    def _repr_inside(self, inside: Enclosing) -> str:
        return mapping_repr(type(self).__name__, self.items(), inside)

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Callable[..., Rendering]
    ) -> Rendering:
        """Shows the values in Treescope's trees."""
        from treescope.repr_lib import render_dictionary_wrapper

        return render_dictionary_wrapper(
            type(self), self._mapping, path, subtree_renderer
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return State, (self._mapping,)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the contents of a state that Flax pickled."""
        self.__init__(state["_mapping"])

    # Deprecated methods, with the functions that replace them.

    def map(self, f: Callable[[Path, Any], PyTree]) -> "State":
        _warn_method("map", "map_state(f, state)")
        return map_state(f, self)

    def flat_state(self) -> "FlatState":
        """Returns the state as paths and values."""
        _warn_method("flat_state", "to_flat_state(state)")
        return to_flat_state(self)

    @classmethod
    def from_flat_path(cls, flat_state: FlatItems) -> "State":
        """Builds a state from paths and values."""
        _warn_method("from_flat_path", "from_flat_state(flat_state)")
        return from_flat_state(flat_state)

    def split(self, first: Filter, /, *filters: Filter) -> Any:
        _warn_method("split", "split_state(state, *filters)")
        return split_state(self, first, *filters)

    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        _warn_method("filter", "filter_state(state, *filters)")
        return filter_state(self, first, *filters)

    @classmethod
    def merge(cls, state: StateLike, /, *states: StateLike) -> "State":
        _warn_method("merge", "merge_state(*states)")
        return merge_state(state, *states)

    def to_pure_dict(
        self, extract_fn: Callable[[Any], PyTree] | None = None
    ) -> dict[Hashable, Any]:
        _warn_method("to_pure_dict", "to_pure_dict(state)")
        return to_pure_dict(self, extract_fn)

    def replace_by_pure_dict(
        self,
        pure_dict: Mapping[Hashable, Any],
        replace_fn: Callable[[Any, Any], PyTree] | None = None,
    ) -> None:
        _warn_method(
            "replace_by_pure_dict", "replace_by_pure_dict(state, pure_dict)"
        )
        replace_by_pure_dict(self, pure_dict, replace_fn)


def _warn_method(name: str, replacement: str) -> None:
    warn_deprecated(f"State.{name}", f"call nnx.{replacement}")


def value_at(nested: StateLike, path: Path) -> PyTree:
    """Returns a part of a state, or of nested dicts."""
    if isinstance(nested, State):
        nested = nested._mapping
    for part in path:
        nested = nested[part]
    return nested


def path_text(path: Path) -> str:
    """Returns a path as text."""
    return "/".join(map(str, path))


def _as_dicts(nested: State | dict[Hashable, PyTree]) -> dict[Hashable, PyTree]:
    """Returns a copy of nested states and dicts, as dicts."""
    if isinstance(nested, State):
        nested = nested._mapping
    copied: dict[Hashable, PyTree] = {}
    for key, value in nested.items():
        if isinstance(value, State | dict):
            value = _as_dicts(value)
        copied[key] = value
    return copied


def _flatten_state(
    state: State,
) -> tuple[tuple[PyTree, ...], tuple[Hashable, ...]]:
    nested = state._mapping
    try:
        keys = tuple(sorted(nested))  # pyright: ignore[reportArgumentType]
    except TypeError:
        keys = tuple(sorted(nested, key=lambda key: _sort_key((key,))))
    children: list[PyTree] = []
    for key in keys:
        child = nested[key]
        children.append(_sortable(child) if type(child) is dict else child)
    return tuple(children), keys


def _sortable(
    nested: dict[Hashable, PyTree],
) -> State | dict[Hashable, PyTree]:
    """Converts dicts whose keys JAX may be unable to sort to states.

    All others stay dicts, which JAX flattens much faster. This depends only on a dict's own keys,
    so a prefix of a state has the same nodes as the state.
    """
    key_types = set(map(type, nested))
    if len(key_types) > 1 or not key_types <= _SORTED_BY_JAX:
        return State(nested, _copy=False)
    return _with_replaced(nested, (dict,), _sortable)


_SORTED_BY_JAX = {str, int}


def _unsorted(nested: State | dict[Hashable, PyTree]) -> dict[Hashable, PyTree]:
    """Converts the states of `_sortable` back to dicts."""
    if isinstance(nested, State):
        return nested._mapping
    return _with_replaced(nested, (dict, State), _unsorted)


def _with_replaced(
    nested: dict[Hashable, PyTree],
    types: tuple[type, ...],
    convert: Callable[[Any], PyTree],
) -> dict[Hashable, PyTree]:
    """Returns a dict with converted values of some types; itself if all stay the same."""
    converted = nested
    for key, value in nested.items():
        if type(value) not in types:
            continue
        new_value = convert(value)
        if new_value is value:
            continue
        if converted is nested:
            converted = dict(nested)
        converted[key] = new_value
    return converted


def _unflatten_state(
    keys: tuple[Hashable, ...], children: Iterable[PyTree]
) -> State:
    nested: dict[Hashable, PyTree] = {}
    for key, child in zip(keys, children, strict=True):
        if type(child) in (dict, State):
            child = _unsorted(child)
        nested[key] = child
    return State(nested, _copy=False)


_KeysAndValues = list[tuple[Any, PyTree]]
"""Children of a pytree with JAX's keys."""


def _flatten_state_with_keys(
    state: State,
) -> tuple[_KeysAndValues, tuple[Hashable, ...]]:
    children, keys = _flatten_state(state)
    jax_keys = map(jax.tree_util.DictKey, keys)
    return list(zip(jax_keys, children, strict=True)), keys


jax.tree_util.register_pytree_with_keys(
    State, _flatten_state_with_keys, _unflatten_state, _flatten_state
)


class FlatState(list[tuple[Path, Any]]):
    """List of paths and values, sorted by path; sorts `items` if `sort`."""

    def __init__(
        self, items: Iterable[tuple[Path, PyTree]] = (), /, *, sort: bool = True
    ):
        super().__init__((tuple(path), value) for path, value in items)
        if sort:
            self.sort(key=lambda item: _sort_key(item[0]))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the values."""
        return tuple(path for path, _ in self)

    @property
    def leaves(self) -> list[Any]:
        """Values in the order of their paths."""
        return [value for _, value in self]

    @classmethod
    def from_sorted_keys_values(
        cls, keys: Iterable[Path], values: Iterable[PyTree]
    ) -> "FlatState":
        """Builds a flat state from sorted paths and values."""
        return cls(zip(keys, values, strict=True), sort=False)

    def to_nested_state(self) -> State:
        return from_flat_state(self)

    @overload
    def split(self, only: Filter, /) -> "FlatState": ...
    @overload
    def split(
        self, first: Filter, second: Filter, /, *filters: Filter
    ) -> "tuple[FlatState, ...]": ...
    def split(
        self, first: Filter, /, *filters: Filter
    ) -> "FlatState | tuple[FlatState, ...]":
        groups = split_flat_state(self, (first, *filters))
        return tuple(groups) if filters else groups[0]

    @overload
    def filter(self, only: Filter, /) -> "FlatState": ...
    @overload
    def filter(
        self, first: Filter, second: Filter, /, *filters: Filter
    ) -> "tuple[FlatState, ...]": ...
    def filter(
        self, first: Filter, /, *filters: Filter
    ) -> "FlatState | tuple[FlatState, ...]":
        matched_groups, _ = grouped(self, (first, *filters))
        groups = [FlatState(group, sort=False) for group in matched_groups]
        return tuple(groups) if filters else groups[0]

    @staticmethod
    def merge(flat_state: FlatItems, /, *flat_states: FlatItems) -> "FlatState":
        """Merges flat states; later ones replace earlier ones."""
        merged = dict(flat_state)
        for later_state in flat_states:
            merged.update(later_state)
        return FlatState(merged.items())

    def __repr__(self) -> str:
        if not self:
            return "FlatState([])"
        lines = [f"  {item!r}".replace("\n", "\n  ") + "," for item in self]
        return "\n".join(["FlatState([", *lines, "])"])


def _flatten_flat_state(
    flat_state: FlatState,
) -> tuple[_KeysAndValues, tuple[Path, ...]]:
    children: _KeysAndValues = []
    for path, value in flat_state:
        children.append((jax.tree_util.DictKey(path), value))
    return children, flat_state.paths


jax.tree_util.register_pytree_with_keys(
    FlatState, _flatten_flat_state, FlatState.from_sorted_keys_values
)


def to_flat_state(state: StateLike) -> FlatState:
    """Returns a state as paths and values; a bare variable or value has the empty path.

    >>> to_flat_state(State({"b": {"c": 1}, "a": 2})).paths
    (('a',), ('b', 'c'))
    """
    if isinstance(state, FlatState):
        return state
    if not isinstance(state, Mapping):
        return FlatState([((), state)])
    items: list[tuple[Path, PyTree]] = []

    def walk(nested: Mapping[Hashable, PyTree], path: Path) -> None:
        if isinstance(nested, State):
            nested = nested._mapping  # whose items need no state of their own
        for key, value in nested.items():
            if isinstance(value, State | dict):
                walk(value, (*path, key))
            else:
                items.append(((*path, key), value))

    walk(state, ())
    return FlatState(items)


def from_flat_state(
    flat_state: FlatItems, *, cls: type[State] = State
) -> State:
    """Returns a state of class `cls` from a mapping, or pairs of paths and values.

    Raises StatePathError if a path leads through a value.
    """
    items: Iterable[tuple[Path, PyTree]] = (
        flat_state.items() if isinstance(flat_state, Mapping) else flat_state
    )
    nested: dict[Hashable, PyTree] = {}
    for path, value in items:
        if not path:
            return value  # a bare variable or value, whose path is empty
        *parent_path, name = path
        parent = nested
        for part in parent_path:
            parent = parent.setdefault(part, {})
            if not isinstance(parent, dict):
                raise StatePathError(
                    f"{path_text(path)!r} leads through {part!r}, which is a value; "
                    "a path has a value or further paths."
                )
        parent[name] = value
    return cls(nested, _copy=False)


def split_flat_state(
    flat_state: FlatState, filters: Sequence[Filter]
) -> list[FlatState]:
    """Returns one flat state per filter; raises StateFilterError if none matches a value."""
    groups, unmatched = grouped(flat_state, filters)
    if unmatched:
        path, value = unmatched[0]
        paths = repr(path_text(path))
        if len(unmatched) > 1:
            paths += f" and {len(unmatched) - 1} more"
        raise StateFilterError(
            f"no filter matches {paths}, a {type(value).__name__}; the filters are "
            f"{filters_text(filters)}; add `...` as the last."
        )
    return [FlatState(group, sort=False) for group in groups]


@overload
def split_state(state: StateLike, only: Filter, /) -> State: ...
@overload
def split_state(
    state: StateLike, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[State, ...]: ...


def split_state(
    state: StateLike, first: Filter, /, *filters: Filter
) -> State | tuple[State, ...]:
    """Splits a state into one state per filter; a value goes to the first filter that matches.

    Raises StateFilterError if no filter matches a value.

    >>> state = State({"a": nnx.Param(1), "b": nnx.Cache(2)})
    >>> params, rest = split_state(state, nnx.Param, ...)
    >>> list(params), list(rest)
    (['a'], ['b'])
    """
    groups = split_flat_state(to_flat_state(state), (first, *filters))
    states = [group.to_nested_state() for group in groups]
    return tuple(states) if filters else states[0]


@overload
def filter_state(state: StateLike, only: Filter, /) -> State: ...
@overload
def filter_state(
    state: StateLike, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[State, ...]: ...


def filter_state(
    state: StateLike, first: Filter, /, *filters: Filter
) -> State | tuple[State, ...]:
    """Splits like `split_state`, and omits unmatched values."""
    groups, _ = grouped(to_flat_state(state), (first, *filters))
    states = [from_flat_state(group) for group in groups]
    return tuple(states) if filters else states[0]


def merge_state(
    state: StateLike, /, *states: StateLike, cls: type[State] = State
) -> State:
    """Merges states into one of class `cls`; later ones replace earlier ones."""
    flat_states = map(to_flat_state, (state, *states))
    return from_flat_state(FlatState.merge(*flat_states), cls=cls)


def map_state(f: Callable[[Path, Any], PyTree], state: StateLike) -> State:
    """Returns a state with `f(path, value)` in place of each value."""
    return from_flat_state(
        (path, f(path, value)) for path, value in to_flat_state(state)
    )


def to_pure_dict(
    state: StateLike, extract_fn: Callable[[Any], PyTree] | None = None
) -> dict[Hashable, Any]:
    """Converts a state to nested dicts of its values, or of `extract_fn(variable or array)`."""
    extract = extract_fn or value_of
    return _as_dicts(map_state(lambda _, x: extract(x), state))


def replace_by_pure_dict(
    state: StateLike,
    pure_dict: Mapping[Hashable, Any],
    replace_fn: Callable[[Any, Any], PyTree] | None = None,
) -> None:
    """Sets values of a state in place from nested dicts, the inverse of `to_pure_dict`.

    Args:
        replace_fn: maps the present entry and a value to the new entry.

    Raises StatePathError if the state lacks a path of the dicts.
    """
    replace = replace_fn or _replace_value
    entries = dict(to_flat_state(state))
    for path, value in to_flat_state(restore_int_paths(pure_dict, entries)):
        if path not in entries:
            raise StatePathError(
                f"the state has nothing at {path_text(path)!r}, which the dict has; "
                "remove it from the dict."
            )
        *parent_path, name = path
        parent = value_at(state, tuple(parent_path))
        parent[name] = replace(entries[path], value)


def _replace_value(entry: PyTree, value: PyTree) -> PyTree:
    return entry.replace(value) if isinstance(entry, Variable) else value


def restore_int_paths(
    pure_dict: Mapping[Hashable, Any], paths: Iterable[Path] = ()
) -> dict[Hashable, Any]:
    """Converts string keys such as "0", except at `paths`, back to integers after file reads."""
    excepted_paths = set(paths)
    value_of_path: dict[Path, PyTree] = {}
    for path, value in to_flat_state(pure_dict):
        if path not in excepted_paths:
            path = tuple(map(_int_or_same, path))
        value_of_path[path] = value
    return _as_dicts(from_flat_state(value_of_path))


def _int_or_same(part: Hashable) -> Hashable:
    if isinstance(part, str) and part.isdigit():
        return int(part)
    return part
