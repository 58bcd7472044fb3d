"""Mapping with keys compared by identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any


class RefMap(MutableMapping[Any, Any]):
    """Mapping by identity, which accepts unhashable keys such as variables and arrays.

    Example:
        >>> from weft import nnx
        >>> a, b = nnx.Param(1), nnx.Param(1)
        >>> seen = RefMap([(a, 0)])
        >>> a in seen, b in seen
        (True, False)
    """

    def __init__(self, items: Iterable[tuple[Any, Any]] = ()):
        self._items: dict[int, tuple[Any, Any]] = {}
        for key, value in items:
            self[key] = value

    def __getitem__(self, key: Any) -> Any:
        return self._items[id(key)][1]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._items[id(key)] = (key, value)

    def __delitem__(self, key: Any) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        items = ", ".join(f"{type(k).__name__}: {v!r}" for k, v in self._items.values())
        return f"RefMap({{{items}}})"
