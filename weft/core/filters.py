"""The one language in which groups of state are named.

A filter is True (everything), False (nothing), a name, a collection of names, or `DenyList(filter)`
(everything else).
"""

import dataclasses
from collections.abc import Collection
from typing import Union


@dataclasses.dataclass(frozen=True)
class DenyList:
    """Matches what its filter does not.

    Example:
        >>> in_filter(DenyList("params"), "cache")
        True
    """

    deny: "Filter"


Filter = Union[bool, str, Collection[str], DenyList]  # noqa: UP007 - DenyList refers to it by name


def in_filter(where: Filter, name: str) -> bool:
    """Whether a filter matches a name.

    Args:
        where: the filter.
        name: of a collection, a PRNG stream or a field of a context.

    Raises:
        TypeError: if `where` is no filter.

    Example:
        >>> in_filter(("params", "cache"), "cache")
        True
    """
    if isinstance(where, bool):
        return where
    if isinstance(where, str):
        return name == where
    if isinstance(where, DenyList):
        return not in_filter(where.deny, name)
    if isinstance(where, Collection):
        return name in where
    raise TypeError(
        f"{where!r} is no filter; expected True, False, a name, a collection of names or a "
        "DenyList."
    )


def first_match(filters: Collection[Filter], name: str) -> int | None:
    """The index of the first filter that matches, or None."""
    return next((i for i, where in enumerate(filters) if in_filter(where, name)), None)
