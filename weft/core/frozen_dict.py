"""A dict that nobody can change, for variables that are shared.

A `FrozenDict` copies the dicts that it is made of, at every depth, and hands them out as
`FrozenDict`s again. It equals a dict with the same entries, is hashable when its values are, and is
a pytree with the same key paths as a dict. `copy` and `pop` of this file work on both.
"""

import textwrap
from collections.abc import Iterable, Iterator, KeysView, Mapping, ValuesView
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from jax.tree_util import DictKey

from weft.errors import FrozenDictMutationError, NestedDictError
from weft.serialization import state_dicts

K = TypeVar("K")
V = TypeVar("V")

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_MUTATORS = ("update", "setdefault", "popitem", "clear")


class FrozenKeysView(KeysView):
    """The keys of a FrozenDict."""

    def __repr__(self) -> str:
        return f"frozen_dict_keys({list(self)})"


class FrozenValuesView(ValuesView):
    """The values of a FrozenDict."""

    def __repr__(self) -> str:
        return f"frozen_dict_values({list(self)})"


@jax.tree_util.register_pytree_with_keys_class
class FrozenDict(Mapping[K, V]):
    """An immutable dict.

    Args:
        *args: what `dict` takes: a mapping, or pairs of keys and values.
        **kwargs: further entries.

    Example:
        >>> variables = FrozenDict({"params": {"w": 1.0}})
        >>> variables["params"]["w"], variables == {"params": {"w": 1.0}}
        (1.0, True)
    """

    __slots__ = ("_dict", "_hash")

    def __init__(self, *args: Any, __unsafe_skip_copy__: bool = False, **kwargs: Any):
        entries: dict[Any, Any] = dict(*args, **kwargs)
        # Nested entries are plain dicts that nobody else holds; `__getitem__` freezes them.
        self._dict: dict[K, V] = entries if __unsafe_skip_copy__ else _thawed(entries)
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
        return self._dict == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.items()))
        return self._hash

    def __repr__(self) -> str:
        return self.pretty_repr()

    def __reduce__(self):
        # Not the hash: that of a string is another one in another process.
        return FrozenDict, (self.unfreeze(),)

    def __setitem__(self, key: K, value: V):
        raise _immutable(f"setting {key!r}")

    def __delitem__(self, key: K):
        raise _immutable(f"deleting {key!r}")

    def __getattr__(self, name: str) -> Any:
        if name in _MUTATORS:
            raise _immutable(f"`{name}`")
        raise AttributeError(f"'FrozenDict' object has no attribute {name!r}")

    def copy(self, add_or_replace: Mapping[K, V] = _NOTHING) -> "FrozenDict[K, V]":
        """One with further or other entries.

        >>> FrozenDict(a=1).copy({"b": 2}).unfreeze()
        {'a': 1, 'b': 2}
        """
        return type(self)({**self, **add_or_replace})

    def pop(self, key: K) -> tuple["FrozenDict[K, V]", V]:
        """One without an entry, and that entry's value.

        >>> rest, value = FrozenDict(a=1, b=2).pop("a")
        >>> rest.unfreeze(), value
        ({'b': 2}, 1)
        """
        value = self[key]
        return type(self)({k: v for k, v in self._dict.items() if k != key}), value

    def unfreeze(self) -> dict[Any, Any]:
        """A dict of dicts with the same entries."""
        return _thawed(self._dict)

    def pretty_repr(self, num_spaces: int = 4) -> str:
        """A line per entry, indented by its depth."""
        return f"FrozenDict({_lines(self._dict, num_spaces)})"

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        keys = tuple(sorted(self._dict))  # pyright: ignore[reportArgumentType]
        return tuple((DictKey(key), self._dict[key]) for key in keys), keys

    @classmethod
    def tree_unflatten(cls, keys: Iterable[K], values: Iterable[V]) -> "FrozenDict[K, V]":
        return cls(zip(keys, values, strict=True), __unsafe_skip_copy__=True)


def _immutable(what: str) -> FrozenDictMutationError:
    return FrozenDictMutationError(
        f"a FrozenDict is immutable, so {what} does not work; use `copy({{key: value}})` for one "
        "with other entries, `pop(key)` for one without an entry, or `unfreeze()` for a dict."
    )


def _frozen(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    view = object.__new__(FrozenDict)  # the constructor would copy the outermost dict
    view._dict, view._hash = value, None
    return view


def _thawed(value: Any) -> Any:
    """New plain dicts in the place of dicts and FrozenDicts, which may lie in each other."""
    if isinstance(value, FrozenDict):
        value = value._dict
    if not isinstance(value, dict):
        return value
    return {key: _thawed(inner) for key, inner in value.items()}


def _lines(value: Any, num_spaces: int) -> str:
    if isinstance(value, FrozenDict):
        return value.pretty_repr(num_spaces)
    if not isinstance(value, dict):
        return repr(value)
    if not value:
        return "{}"
    entries = "".join(f"{key}: {_lines(inner, num_spaces)},\n" for key, inner in value.items())
    return "{\n" + textwrap.indent(entries, " " * num_spaces) + "}"


def freeze(xs: Mapping[Any, Any]) -> FrozenDict[Any, Any]:
    """A FrozenDict with the entries of a nested dict.

    >>> freeze({"a": {"b": 1}})["a"]
    FrozenDict({
        b: 1,
    })
    """
    return FrozenDict(xs)


def unfreeze(x: Any) -> Any:
    """A nested dict with the entries of a FrozenDict, or of a dict that has some inside.

    Args:
        x: what is no dict is returned as it is.

    >>> unfreeze({"a": freeze({"b": 1})})
    {'a': {'b': 1}}
    """
    return _thawed(x)


def _check_dict(x: Any, function: str) -> None:
    if not isinstance(x, FrozenDict | dict):
        raise NestedDictError(
            f"{function} was given a {type(x).__name__}; expected a dict or a FrozenDict."
        )


def copy(x: Any, add_or_replace: Mapping[Any, Any] = _NOTHING) -> Any:
    """A dict or FrozenDict with further or other entries; containers in a dict are copied.

    Raises:
        NestedDictError: if `x` is neither.

    >>> copy({"a": 1}, {"b": 2})
    {'a': 1, 'b': 2}
    """
    _check_dict(x, "copy")
    if isinstance(x, FrozenDict):
        return x.copy(add_or_replace)
    return {**jax.tree.map(lambda leaf: leaf, x), **add_or_replace}


def pop(x: Any, key: Any) -> tuple[Any, Any]:
    """A dict or FrozenDict without an entry, and that entry's value.

    Raises:
        NestedDictError: if `x` is neither.

    >>> pop({"a": 1, "b": 2}, "a")
    ({'b': 2}, 1)
    """
    _check_dict(x, "pop")
    if isinstance(x, FrozenDict):
        return x.pop(key)
    rest = copy(x)
    return rest, rest.pop(key)


def pretty_repr(x: Any, num_spaces: int = 4) -> str:
    """A line per entry of a nested dict or FrozenDict, indented by its depth.

    Args:
        x: what is no dict is written as `repr` does.
        num_spaces: the indentation of each depth.

    >>> print(pretty_repr({"a": {"b": 1}}))
    {
        a: {
            b: 1,
        },
    }
    """
    return _lines(x, num_spaces)


def _to_state_dict(frozen: FrozenDict[Any, Any]) -> dict[str, Any]:
    return state_dicts.to_state_dict(frozen.unfreeze())


def _from_state_dict(frozen: FrozenDict[Any, Any], state: Any) -> FrozenDict[Any, Any]:
    return FrozenDict(state_dicts.from_state_dict(frozen.unfreeze(), state, name=""))


state_dicts.register_serialization_state(FrozenDict, _to_state_dict, _from_state_dict)
