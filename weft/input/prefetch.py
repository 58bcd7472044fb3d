"""Prefetching of batches in a second thread, with an exact position.

The reader's own state is ahead of the training and would skip batches after a restart. Therefore
each batch is queued with the state after it: the iterator's state is that of the last one returned.
"""

import copy
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from weft.serialization.untrusted import check_json

_CLOSE_TIMEOUT_SECONDS = 10.0

logger = logging.getLogger(__name__)

PARTS = "__parts_of_processes__"
"""Only key of a dict within a state whose values, by any names, are spread over processes.

A run with another number of processes continues from the parts of all that saved it.
"""


class SavableIterator(Protocol):
    """Iterator whose position is a small JSON value, the same in all processes but for `PARTS`."""

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: object) -> None: ...


def savable_iterator(
    make: Callable[[], Iterable[Any]], name: str
) -> SavableIterator:
    """Returns an iterator of `make()` whose position can be saved.

    If it has no `get_state` of its own, the position is the number of items: to restore it, the
    items before it are read again. A warning with `name` reports that.
    """
    iterator: Any = iter(make())
    if hasattr(iterator, "get_state"):
        return iterator
    logger.warning(
        "%s: iterators of dataset() have no get_state and set_state, so batches are counted; to "
        "resume, the ones before the position are read again.",
        name,
    )
    return CountingIterator(iterator, make)


class CountingIterator(Iterator[Any]):
    """Iterator that counts its items, and reads them again to restore a count."""

    def __init__(
        self, iterator: Iterator[Any], make: Callable[[], Iterable[Any]]
    ):
        self._iterator, self._make, self._count = iterator, make, 0

    def __next__(self) -> Any:
        item = next(self._iterator)
        self._count += 1
        return item

    def get_state(self) -> int:
        return self._count

    def set_state(self, state: Any) -> None:
        check_json(state, int)
        self.close()
        self._iterator, self._count = iter(self._make()), state
        for _ in itertools.islice(self._iterator, state):
            pass

    def close(self) -> None:
        getattr(self._iterator, "close", lambda: None)()


class PrefetchingIterator(Iterator[Any]):
    """Runs an iterator and a transformation of it ahead in a thread.

    The thread starts with the first `next`. An error of the source is raised in place of the failed
    batch and of all later ones. Close it, or use it in a `with` block, to release its thread.

    Args:
        source: The iterator that defines the position. Closed with this one if it has `close`.
        stream: Transforms the source to as many batches; for a trainer `lambda it: map(to_device,
            input.batches(it))`. It runs in the thread, where no mesh is set: bind it.

    >>> class Count:
    ...     n = 0
    ...     def __iter__(self): return self
    ...     def __next__(self): self.n += 1; return self.n
    ...     def get_state(self): return {"n": self.n}
    ...     def set_state(self, state): self.n = state["n"]
    >>> with PrefetchingIterator(Count(), stream=lambda it: (10 * x for x in it)) as batches:
    ...     print(next(batches), next(batches), batches.get_state())
    ...     batches.set_state({"n": 7})
    ...     print(next(batches))
    10 20 {'n': 2}
    80

    Attributes:
        wait_seconds: Total time that `next` and `ready` have waited for the source.
    """

    def __init__(
        self,
        source: SavableIterator,
        *,
        stream: Callable[[SavableIterator], Iterable[Any]] = iter,
        buffer_size: int = 2,
    ):
        self._source = source
        self._stream = stream
        self._buffer_size = buffer_size
        self._state = copy.deepcopy(source.get_state())
        self._reader: _ReaderThread | None = None
        self.wait_seconds = 0.0

    def __next__(self) -> Any:
        self.ready()
        assert self._reader is not None
        batch, self._state = self._reader.take()
        return batch

    def ready(self, timeout: float | None = None, count: int = 1) -> bool:
        """Waits until `next` does not block; returns False after `timeout` seconds.

        With a `count`, up to the size of the buffer, it waits until so many batches are there or
        the source has ended.

        With a slow source, callers can do other work in between:

            while not batches.ready(timeout=0.5):
                stop_if_asked_to()
            batch = next(batches)
        """
        if self._reader is None:
            self._reader = _ReaderThread(
                self._source, self._stream, self._buffer_size
            )
        if len(self._reader.buffer) >= count:
            return True
        start = time.monotonic()
        try:
            return self._reader.wait(timeout, count)
        finally:
            self.wait_seconds += time.monotonic() - start

    def peek(self) -> Any:
        """Returns or raises the result of `next` without advancing."""
        self.ready()
        assert self._reader is not None
        return self._reader.look()[0]

    def remaining(self) -> tuple[int, BaseException] | None:
        """Returns the number of batches until the end and the error there; None before the end.

        The error is a StopIteration if the source has no more batches.
        """
        return None if self._reader is None else self._reader.remaining()

    def get_state(self) -> Any:
        """Returns the source's state after the last returned batch."""
        return copy.deepcopy(self._state)

    def set_state(self, state: object) -> None:
        """Continues after the batch with this state, and drops waiting batches."""
        self._stop()
        self._source.set_state(copy.deepcopy(state))
        self._state = copy.deepcopy(state)

    def close(self) -> None:
        """Ends the thread and closes the source."""
        self._stop()
        getattr(self._source, "close", lambda: None)()

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def __enter__(self) -> "PrefetchingIterator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _ReaderThread:
    """One run of the thread: a buffer of (batch, state), and its end."""

    def __init__(self, source, stream, buffer_size: int):
        self._changed = threading.Condition()
        self.buffer: deque[tuple[Any, Any]] = deque()
        self._buffer_size = buffer_size
        self._stopped = False
        self._end: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(source, stream),
            name="weft-input-prefetch",
            daemon=True,
        )
        self._thread.start()

    def _run(self, source, stream) -> None:
        end: BaseException = StopIteration()
        try:
            for batch in stream(source):
                if not self._put((batch, copy.deepcopy(source.get_state()))):
                    return
        except BaseException as error:  # `take` raises it
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _put(self, item: tuple[Any, Any]) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or len(self.buffer) < self._buffer_size
            )
            if self._stopped:
                return False
            self.buffer.append(item)
            self._changed.notify_all()
            return True

    def wait(self, timeout: float | None, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self.buffer) >= count or self._end is not None,
                timeout,
            )

    def remaining(self) -> tuple[int, BaseException] | None:
        with self._changed:
            if self._end is None:
                return None
            return len(self.buffer), self._end

    def look(self) -> tuple[Any, Any]:
        with self._changed:
            if not self.buffer:
                assert self._end is not None
                raise self._end
            return self.buffer[0]

    def take(self) -> tuple[Any, Any]:
        with self._changed:
            item = self.look()
            self.buffer.popleft()
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self.buffer.clear()
            self._changed.notify_all()
        # A daemon thread, so that a source that hangs does not block the exit of the process.
        self._thread.join(timeout=_CLOSE_TIMEOUT_SECONDS)
