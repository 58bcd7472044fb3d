"""Iterator that is read ahead by a thread.

Use `weft.input.PrefetchingIterator`, on which it is based, if the position must survive a restart.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from weft.errors import ArgumentValueError
from weft.input.prefetch import PrefetchingIterator


class PrefetchIterator:
    """Iterator that reads up to `buffer_size` elements ahead in a thread, from the first `next` on.

    An error of the iterator is raised in place of the element, and at every later `next`.

    >>> with PrefetchIterator([1, 2, 3], buffer_size=2) as elements:
    ...     list(elements)
    [1, 2, 3]
    """

    def __init__(self, data_iter: Iterable[Any], buffer_size: int = 1):
        if buffer_size < 1:
            raise ArgumentValueError(
                f"buffer_size={buffer_size}: at least one element must be able to wait; use 1 or "
                "more."
            )
        self.buffer_size = buffer_size
        self._elements = PrefetchingIterator(_Positionless(data_iter), buffer_size=buffer_size)
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        return next(self._elements)

    def close(self) -> None:
        """Ends the thread and drops the elements read ahead; there are no further elements."""
        self._closed = True
        self._elements.close()

    def __enter__(self) -> "PrefetchIterator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Positionless:
    """Iterator without a position."""

    def __init__(self, elements: Iterable[Any]):
        self._elements = iter(elements)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._elements)

    def get_state(self) -> None:
        return None

    def set_state(self, state: Any) -> None:
        del state
