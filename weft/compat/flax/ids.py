"""Ids of Flax, which copies do not share."""

import itertools
from typing import Any

_ids = itertools.count(1)


class FlaxId:
    """Hashable id; a copy of an object that holds one gets a new one.

    >>> import copy
    >>> first = uuid()
    >>> first == first, copy.deepcopy(first) == first
    (True, False)
    """

    def __init__(self, rawid: int):
        self.id = rawid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlaxId) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"FlaxId({self.id})"

    def __copy__(self) -> "FlaxId":
        return uuid()

    def __deepcopy__(self, memo: Any) -> "FlaxId":
        return uuid()


def uuid() -> "FlaxId":
    """Returns a new id."""
    return FlaxId(next(_ids))
