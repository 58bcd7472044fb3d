"""Nested dicts as flat dicts of paths.

`flatten_dict` makes the path to each leaf a key; `unflatten_dict` inverts it. Mappings are dicts;
all other values are leaves.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import FlatDictError, NestedDictError
from weft.typing import PyTree

Path = tuple[Any, ...]
FlatKey = Any  # a path, or a string of its names joined by a separator


@dataclasses.dataclass(frozen=True)
class _EmptyNode:
    """Placeholder for an empty dict in a flat dict."""

    def __repr__(self) -> str:
        return "empty_node"


empty_node = _EmptyNode()
"""Placeholder for an empty dict in a flat dict."""


def check_mapping(xs: PyTree, function: str) -> None:
    """Raises unless `xs` is a mapping."""
    if not isinstance(xs, Mapping):
        raise NestedDictError(
            f"{function} was given a {type(xs).__name__}; expected a dict, with names as keys."
        )


def _join_path(path: Path, sep: str | None) -> FlatKey:
    if sep is None:
        return path
    for name in path:
        if not isinstance(name, str):
            raise FlatDictError(
                f"the path {path} has {name!r}, which is not a string, so it cannot be joined by "
                f"{sep!r}; leave out `sep`, or make the key a string."
            )
    joined = sep.join(path)
    if not sep or not path:
        return joined
    for name, part in zip(path, joined.split(sep), strict=False):
        if name != part:
            raise FlatDictError(
                f"the path {path} has the key {name!r}, which contains the separator {sep!r}: "
                "split at it again, it would be another path. Use a separator that no key "
                "contains, or leave out `sep`."
            )
    return joined


def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Path, Any], bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Returns the leaves of a nested dict by their paths.

    Args:
        keep_empty_nodes: keeps empty dicts, as `empty_node`; by default they are omitted.
        is_leaf: takes a dict's path and value, returns whether to treat it as a leaf.
        sep: joins each path to one string, such as "a/b"; by default a path is a tuple.

    Raises:
        NestedDictError: if `xs` is not a mapping.
        FlatDictError: if paths cannot be joined, a key contains the separator, or paths are equal
            once joined.

    >>> flatten_dict({"a": {"b": 1, "c": {}}}, keep_empty_nodes=True)
    {('a', 'b'): 1, ('a', 'c'): empty_node}
    """
    check_mapping(xs, "flatten_dict")
    flat: dict[FlatKey, Any] = {}

    def visit(value: PyTree, path: Path) -> None:
        is_dict = isinstance(value, Mapping)
        if is_dict and is_leaf is not None:
            is_dict = not is_leaf(path, value)
        if is_dict:
            for name, inner_value in value.items():
                visit(inner_value, (*path, name))
            is_kept = keep_empty_nodes and path and not value
            if not is_kept:
                return
            value = empty_node
        key = _join_path(path, sep)
        if key in flat:
            raise FlatDictError(
                f"two leaves have the path {key!r} once their names are joined by {sep!r}; use a "
                "separator that no name contains, or leave out `sep`."
            )
        flat[key] = value

    visit(xs, ())
    return flat


def unflatten_dict(xs: Mapping[Any, Any], sep: str | None = None) -> PyTree:
    """Returns the nested dict of a flat dict; inverts `flatten_dict`.

    Paths are tuples of keys, or strings joined by `sep`.

    Raises:
        NestedDictError: if `xs` is not a mapping.
        FlatDictError: if a path cannot be split, or leads through another leaf.

    >>> unflatten_dict({("a", "b"): 1, ("a", "c"): empty_node})
    {'a': {'b': 1, 'c': {}}}
    >>> unflatten_dict({"a/b": 1}, sep="/")
    {'a': {'b': 1}}
    """
    check_mapping(xs, "unflatten_dict")
    root: dict[Any, Any] = {}
    dicts: dict[Path, dict[Any, Any]] = {(): root}
    leaves: set[Path] = set()

    def dict_at(path: Path) -> dict[Any, Any]:
        if path in leaves:
            raise _collision(path)
        if path not in dicts:
            dicts[path] = dict_at(path[:-1]).setdefault(path[-1], {})
        return dicts[path]

    for key, value in xs.items():
        path = _split_key(key, sep)
        if isinstance(value, _EmptyNode):
            dict_at(path)
        elif path == () and len(xs) == 1:
            return value  # `is_leaf` took the whole dict for a leaf
        elif path in dicts:
            raise _collision(path)
        else:
            dict_at(path[:-1])[path[-1]] = value
            leaves.add(path)
    return root


def _collision(path: Path) -> FlatDictError:
    return FlatDictError(
        f"the path {path} is that of a leaf and also the beginning of another leaf's path; take "
        "one of the two out."
    )


def _split_key(key: FlatKey, sep: str | None) -> Path:
    if sep is not None:
        if isinstance(key, str):
            return tuple(key.split(sep))
        raise FlatDictError(
            f"the key {key!r} is not a path; expected a string, as sep is set."
        )
    if isinstance(key, tuple):
        return key
    if isinstance(key, str) and len(key) == 1:
        return (key,)
    raise FlatDictError(
        f'the key {key!r} is not a path; expected a tuple of keys, or `sep`, such as "/".'
    )


def path_aware_map(
    f: Callable[[Path, Any], Any], nested_dict: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Maps a function over the paths and leaves of a nested dict; empty dicts stay.

    Raises NestedDictError if `nested_dict` is not a mapping.

    >>> path_aware_map(lambda path, x: x * (path[-1] == "w"), {"a": {"w": 2, "b": 3}})
    {'a': {'w': 2, 'b': 0}}
    """
    check_mapping(nested_dict, "path_aware_map")
    flat = flatten_dict(nested_dict, keep_empty_nodes=True)
    for path, leaf in flat.items():
        if leaf is not empty_node:
            flat[path] = f(path, leaf)
    return unflatten_dict(flat)
