"""Immutable dicts, for shared variables.

A `FrozenDict` copies nested dicts on construction and returns them as `FrozenDict`s. It equals a
dict with the same entries, is hashable if its values are, and is a pytree with a dict's key paths.
The functions `copy` and `pop` accept both.
"""

import textwrap
from collections.abc import (
    Hashable,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from weft.errors import FrozenDictMutationError, NestedDictError
from weft.serialization import state_dicts
from weft.typing import PyTree

K = TypeVar("K")
V = TypeVar("V")

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_MUTATORS = ("update", "setdefault", "popitem", "clear")


class FrozenKeysView(KeysView):
    """Keys of a FrozenDict."""

    def __repr__(self) -> str:
        return f"frozen_dict_keys({list(self)})"


class FrozenValuesView(ValuesView):
    """Values of a FrozenDict."""

    def __repr__(self) -> str:
        return f"frozen_dict_values({list(self)})"


@jax.tree_util.register_pytree_with_keys_class
class FrozenDict(Mapping[K, V]):
    """Immutable dict, with the constructor of `dict`.

    >>> variables = FrozenDict({"params": {"w": 1.0}})
    >>> variables["params"]["w"], variables == {"params": {"w": 1.0}}
    (1.0, True)
    """

    __slots__ = ("_dict", "_hash")

    def __init__(
        self, *args: Any, __unsafe_skip_copy__: bool = False, **kwargs: Any
    ):
        entries: dict[Any, Any] = dict(*args, **kwargs)
        # Nested entries are unshared plain dicts; `__getitem__` freezes them.
        self._dict: dict[K, V] = (
            entries if __unsafe_skip_copy__ else _thawed(entries)
        )
        self._hash: int | None = None

    def __getitem__(self, key: K) -> V:
        return _frozen(self._dict[key])

    def __contains__(self, key: object) -> bool:
        return key in self._dict

    def __iter__(self) -> Iterator[K]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def keys(self) -> FrozenKeysView:
        return FrozenKeysView(self)

    def values(self) -> FrozenValuesView:
        return FrozenValuesView(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenDict):
            return self._dict == other._dict
        if isinstance(other, Mapping):
            return self._dict == dict(other)
        return NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.items()))
        return self._hash

    def __repr__(self) -> str:
        return self.pretty_repr()

    def __reduce__(self):
        # Without the hash, since hashes of strings differ between processes.
        return FrozenDict, (self.unfreeze(),)

    def __setitem__(self, key: K, value: V):
        raise _immutable(f"setting {key!r}")

    def __delitem__(self, key: K):
        raise _immutable(f"deleting {key!r}")

    def __getattr__(self, name: str) -> Any:
        if name in _MUTATORS:
            raise _immutable(f"`{name}`")
        raise AttributeError(f"'FrozenDict' object has no attribute {name!r}")

    def copy(
        self, add_or_replace: Mapping[K, V] = _NOTHING
    ) -> "FrozenDict[K, V]":
        """Returns a copy with added or replaced entries."""
        return type(self)({**self, **add_or_replace})

    def pop(self, key: K) -> tuple["FrozenDict[K, V]", V]:
        """Returns a copy without an entry, and that entry's value."""
        entries = dict(self._dict)
        value = _frozen(entries.pop(key))
        return type(self)(entries), value

    def unfreeze(self) -> dict[Any, Any]:
        """Returns a nested dict with the same entries."""
        return _thawed(self._dict)

    def pretty_repr(self, num_spaces: int = 4) -> str:
        """Formats one entry per line, indented by depth."""
        return f"FrozenDict({_lines(self._dict, num_spaces)})"

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[Hashable, V], ...], tuple[K, ...]]:
        keys = tuple(sorted(self._dict))  # pyright: ignore[reportArgumentType]
        children: list[tuple[Hashable, V]] = []
        for key in keys:
            children.append((jax.tree_util.DictKey(key), self._dict[key]))
        return tuple(children), keys

    @classmethod
    def tree_unflatten(
        cls, keys: Iterable[K], values: Iterable[V]
    ) -> "FrozenDict[K, V]":
        return cls(zip(keys, values, strict=True), __unsafe_skip_copy__=True)


def _immutable(change: str) -> FrozenDictMutationError:
    return FrozenDictMutationError(
        f"a FrozenDict is immutable, so {change} does not work; use `copy({{key: value}})` for one "
        "with other entries, `pop(key)` for one without an entry, or `unfreeze()` for a dict."
    )


def _frozen(value: PyTree) -> PyTree:
    if not isinstance(value, dict):
        return value
    view = object.__new__(
        FrozenDict
    )  # the constructor would copy the outermost dict
    view._dict = value
    view._hash = None
    return view


def _thawed(value: PyTree) -> PyTree:
    if isinstance(value, FrozenDict):
        value = value._dict
    if not isinstance(value, dict):
        return value
    return {key: _thawed(inner) for key, inner in value.items()}


def _lines(value: PyTree, num_spaces: int) -> str:
    if isinstance(value, FrozenDict):
        return value.pretty_repr(num_spaces)
    if not isinstance(value, dict):
        return repr(value)
    if not value:
        return "{}"
    entries = ""
    for key, inner in value.items():
        entries += f"{key}: {_lines(inner, num_spaces)},\n"
    return "{\n" + textwrap.indent(entries, " " * num_spaces) + "}"


def freeze(xs: Mapping[Any, Any]) -> FrozenDict[Any, Any]:
    """Returns a FrozenDict with the entries of a nested dict.

    >>> freeze({"a": {"b": 1}})["a"]
    FrozenDict({
        b: 1,
    })
    """
    return FrozenDict(xs)


def unfreeze(x: PyTree) -> PyTree:
    """Returns a nested dict with the entries of a FrozenDict or dict; other values unchanged."""
    return _thawed(x)


def _check_dict(x: PyTree, function: str) -> None:
    if not isinstance(x, FrozenDict | dict):
        raise NestedDictError(
            f"{function} was given a {type(x).__name__}; expected a dict or a FrozenDict."
        )


def copy(x: PyTree, add_or_replace: Mapping[Any, Any] = _NOTHING) -> PyTree:
    """Returns a dict or FrozenDict with added or replaced entries; containers in a dict are copied.

    Raises NestedDictError if `x` is neither.

    >>> copy({"a": 1}, {"b": 2})
    {'a': 1, 'b': 2}
    """
    _check_dict(x, "copy")
    if isinstance(x, FrozenDict):
        return x.copy(add_or_replace)
    copied_entries = jax.tree.map(lambda leaf: leaf, x)
    return {**copied_entries, **add_or_replace}


def pop(x: PyTree, key: Any) -> tuple[PyTree, Any]:
    """Returns a dict or FrozenDict without an entry, and that entry's value.

    Raises NestedDictError if `x` is neither.

    >>> pop({"a": 1, "b": 2}, "a")
    ({'b': 2}, 1)
    """
    _check_dict(x, "pop")
    if isinstance(x, FrozenDict):
        return x.pop(key)
    entries = copy(x)
    return entries, entries.pop(key)


def pretty_repr(x: PyTree, num_spaces: int = 4) -> str:
    """Formats a nested dict or FrozenDict with one entry per line; other values by `repr`.

    >>> print(pretty_repr({"a": {"b": 1}}))
    {
        a: {
            b: 1,
        },
    }
    """
    return _lines(x, num_spaces)


state_dicts.register_serialization_state(
    FrozenDict,
    lambda frozen: state_dicts.to_state_dict(frozen.unfreeze()),
    lambda frozen, state: freeze(
        state_dicts.from_state_dict(frozen.unfreeze(), state, name="")
    ),
)


FrozenVariableDict = FrozenDict[str, Mapping[str, Any]]
