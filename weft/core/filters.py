"""Filters of groups of state.

A filter is True (everything), False (nothing), a name, a collection of names, or `DenyList(filter)`
(everything else). Unions, intersections and differences of filters are filters.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Union

from weft.errors import InvalidFilterError


@dataclasses.dataclass(frozen=True)
class DenyList:
    """Complement of a filter.

    >>> in_filter(DenyList("params"), "cache")
    True
    """

    deny: "Filter"


Filter = Union[bool, str, Collection[str], DenyList]  # noqa: UP007 - DenyList refers to it by name
CanonicalFilter = tuple[bool, frozenset[str]]
"""Hashable form of a filter: whether it denies, and the names that it lists or denies."""


def in_filter(filter_like: Filter, col: str) -> bool:
    """Returns whether a filter matches the name of a collection, PRNG stream or context field.

    Raises InvalidFilterError if `filter_like` is not a filter.

    >>> in_filter(("params", "cache"), "cache")
    True
    """
    if isinstance(filter_like, bool):
        return filter_like
    if isinstance(filter_like, str):
        return col == filter_like
    if isinstance(filter_like, DenyList):
        return not in_filter(filter_like.deny, col)
    if isinstance(filter_like, Collection):
        return col in filter_like
    raise InvalidFilterError(filter_like)


def filter_to_set(x: Filter) -> set[str]:
    """Returns the names that a filter lists.

    Raises InvalidFilterError if `x` is not a filter, contains a non-string, or is True or a
    DenyList, whose names cannot be listed.

    >>> sorted(filter_to_set(("params", "cache")))
    ['cache', 'params']
    """
    if x is False:
        return set()
    if isinstance(x, str):
        return {x}
    if x is True or isinstance(x, DenyList):
        raise InvalidFilterError(
            x, "it matches names without end, so they cannot be listed"
        )
    if not isinstance(x, Collection):
        raise InvalidFilterError(x)
    for name in x:
        if not isinstance(name, str):
            raise InvalidFilterError(x, f"{name!r} in it is not a name")
    return set(x)


def canonical(x: Filter) -> CanonicalFilter:
    """Returns the hashable form of a filter, equal for filters that match the same names."""
    if isinstance(x, DenyList):
        denies, names = canonical(x.deny)
        return not denies, names
    if x is True:
        return True, frozenset()
    return False, frozenset(filter_to_set(x))


def from_canonical(parts: CanonicalFilter) -> Filter:
    """Inverts `canonical`, up to filters that match the same names."""
    denies, names = parts
    if denies:
        return DenyList(set(names)) if names else True
    return set(names) if names else False


def union_filters(a: Filter, b: Filter) -> Filter:
    """Returns a filter that matches names of either filter.

    >>> union_filters("params", DenyList(("params", "cache")))
    DenyList(deny={'cache'})
    """
    (deny_a, names_a), (deny_b, names_b) = canonical(a), canonical(b)
    if deny_a and deny_b:
        return from_canonical((True, names_a & names_b))
    if deny_a:
        return from_canonical((True, names_a - names_b))
    if deny_b:
        return from_canonical((True, names_b - names_a))
    return from_canonical((False, names_a | names_b))


def subtract_filters(a: Filter, b: Filter) -> Filter:
    """Returns a filter that matches names of `a` that are not in `b`.

    >>> subtract_filters(True, "params")
    DenyList(deny={'params'})
    """
    return intersect_filters(a, DenyList(b))


def intersect_filters(a: Filter, b: Filter) -> Filter:
    """Returns a filter that matches names of both filters.

    >>> intersect_filters(DenyList("params"), ("params", "cache"))
    {'cache'}
    """
    denies, names = canonical(union_filters(DenyList(a), DenyList(b)))
    return from_canonical((not denies, names))


def is_filter_empty(filter_like: Filter) -> bool:
    """Returns whether a filter is known to match nothing.

    >>> is_filter_empty(()), is_filter_empty(DenyList(True)), is_filter_empty("params")
    (True, True, False)
    """
    return canonical(filter_like) == (False, frozenset())


def group_collections(
    xs: Mapping[str, Any], col_filters: Sequence[Filter]
) -> tuple[dict[str, Any], ...]:
    """Groups entries by the first filter that matches; drops entries without a match.

    >>> group_collections({"params": 1, "cache": 2}, ("params", True))
    ({'params': 1}, {'cache': 2})
    """
    groups: tuple[dict[str, Any], ...] = tuple({} for _ in col_filters)
    for name, value in xs.items():
        for where, group in zip(col_filters, groups, strict=True):
            if in_filter(where, name):
                group[name] = value
                break
    return groups
