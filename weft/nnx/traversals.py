"""Flat versions of nested mappings, from `weft.traverse_util`."""

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
    """Flattens a nested mapping to leaves by path; see `weft.traverse_util.flatten_dict`."""
    return flatten_dict(xs, keep_empty_nodes, is_leaf, sep)


def flatten_to_sequence(
    xs: Mapping[Any, Any], /, *, is_leaf: IsLeaf | None = None
) -> list[tuple[Path, Any]]:
    """Flattens a nested mapping to pairs of path and leaf.

    Raises NestedDictError if `xs` is not a mapping.

    >>> flatten_to_sequence({"a": {"b": 1}, "c": 2})
    [(('a', 'b'), 1), (('c',), 2)]
    """
    return list(flatten_dict(xs, is_leaf=is_leaf).items())


def unflatten_mapping(
    xs: Mapping[Any, Any] | Iterable[tuple[Any, Any]], /, *, sep: str | None = None
) -> Any:
    """Returns the nested dict of a flat mapping or of pairs; `sep` separates joined paths.

    Raises:
        NestedDictError: if `xs` is neither a mapping nor pairs.
        FlatDictError: if a path cannot be split, or leads through another leaf.

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
