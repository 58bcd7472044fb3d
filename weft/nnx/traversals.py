"""Nested mappings by the paths of their leaves; the functions are those of `weft.traverse_util`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.errors import NestedDictError
from weft.traverse_util import empty_node, flatten_dict, unflatten_dict

__all__ = ["empty_node", "flatten_mapping", "flatten_to_sequence", "unflatten_mapping"]

Path = tuple[Any, ...]
IsLeaf = Callable[[Path, Any], bool]


def flatten_mapping(
    xs: Mapping[Any, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """The leaves of a nested mapping by their paths.

    Args:
        xs: the nested mapping.
        keep_empty_nodes: keeps mappings without entries, as `empty_node`; else they are left out.
        is_leaf: takes the path and value of a mapping, says whether it is a leaf all the same.
        sep: joins each path to one string, such as "a/b"; by default a path is a tuple.

    Raises:
        NestedDictError: if `xs` is no mapping.
        FlatDictError: if paths cannot be joined, or are equal when they are.

    Example:
        >>> flatten_mapping({"a": {"b": 1, "c": {}}}, keep_empty_nodes=True)
        {('a', 'b'): 1, ('a', 'c'): _EmptyNode()}
    """
    return flatten_dict(xs, keep_empty_nodes, is_leaf, sep)


def flatten_to_sequence(
    xs: Mapping[Any, Any], /, *, is_leaf: IsLeaf | None = None
) -> list[tuple[Path, Any]]:
    """The paths and leaves of a nested mapping, as pairs.

    Args:
        xs: the nested mapping.
        is_leaf: see `flatten_mapping`.

    Raises:
        NestedDictError: if `xs` is no mapping.

    Example:
        >>> flatten_to_sequence({"a": {"b": 1}, "c": 2})
        [(('a', 'b'), 1), (('c',), 2)]
    """
    return list(flatten_dict(xs, is_leaf=is_leaf).items())


def unflatten_mapping(
    xs: Mapping[Any, Any] | Iterable[tuple[Any, Any]], /, *, sep: str | None = None
) -> Any:
    """The nested dict whose leaves a flat mapping holds; undoes the other two.

    Args:
        xs: leaves by their paths, which are tuples of keys, or strings with `sep`; or pairs of
            paths and leaves.
        sep: what the names of a path are joined by.

    Raises:
        NestedDictError: if `xs` is neither a mapping nor pairs.
        FlatDictError: if a path cannot be split, or leads through the leaf of another.

    Example:
        >>> unflatten_mapping([(("a", "b"), 1), (("c",), 2)])
        {'a': {'b': 1}, 'c': 2}
    """
    if not isinstance(xs, Mapping):
        if not isinstance(xs, Iterable):
            raise NestedDictError(
                f"unflatten_mapping was given a {type(xs).__name__}; expected a mapping from paths "
                "to leaves, or pairs of them."
            )
        xs = dict(xs)
    return unflatten_dict(xs, sep)
