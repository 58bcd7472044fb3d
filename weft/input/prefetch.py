"""Batches made ready in a second thread while the step runs, without losing count of what was used.

A reader that runs ahead has read more than the training has seen, and its own state would skip
those batches after a restart. So each batch travels with the state that the reader had just after
it, and the iterator's state is the one that came with the last batch handed out.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

_CLOSE_TIMEOUT_SECONDS = 10.0


class SavableIterator(Protocol):
    """An iterator whose position is a small JSON value."""

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class PrefetchingIterator:
    """Runs an iterator, and what is made of it, ahead in a thread.

    The thread starts with the first `next`. An error of the source is raised in place of the batch
    that it prevented, and again at every later `next`. Close it, or use it in a `with` block: an
    open one holds a thread and its buffer.

    Args:
        source: The iterator whose position counts. Closed with this one if it has a `close` method.
        stream: From the source to the batches, exactly one for each of the source's; for a trainer
            `lambda it: map(to_device, input.batches(it))`. It runs in the thread, where no mesh is
            set: bind it.
        buffer_size: How many batches may wait.

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
        wait_seconds: How long `next` and `ready` have waited so far: what the source is too slow
            by.
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
        self._reader: _Reader | None = None
        self.wait_seconds = 0.0

    def __iter__(self) -> "PrefetchingIterator":
        return self

    def __next__(self) -> Any:
        self.ready()
        assert self._reader is not None
        batch, self._state = self._reader.take()
        return batch

    def ready(self, timeout: float | None = None) -> bool:
        """Waits until `next` would not wait: for a batch, the end, or an error that it raises.

        So who waits for a slow source can look after other things in between:

            while not batches.ready(timeout=0.5):
                stop_if_asked_to()
            batch = next(batches)

        Args:
            timeout: Seconds to wait at most. None: as long as it takes.

        Returns:
            Whether `next` would not wait.
        """
        if self._reader is None:
            self._reader = _Reader(self._source, self._stream, self._buffer_size)
        start = time.monotonic()
        try:
            return self._reader.wait(timeout)
        finally:
            self.wait_seconds += time.monotonic() - start

    def peek(self) -> Any:
        """What `next` would give, or raise, without going on."""
        self.ready()
        assert self._reader is not None
        return self._reader.look()

    def get_state(self) -> Any:
        """The source's state just after the batch that was handed out last."""
        return copy.deepcopy(self._state)

    def set_state(self, state: Any) -> None:
        """Goes on after the batch that had this state; batches that wait are dropped."""
        self._stop()
        self._source.set_state(copy.deepcopy(state))
        self._state = copy.deepcopy(state)

    def close(self) -> None:
        """Ends the thread and closes the source."""
        self._stop()
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def __enter__(self) -> "PrefetchingIterator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Reader:
    """One run of the thread: a buffer of (batch, state), and how it ended."""

    def __init__(self, source, stream, buffer_size: int):
        self._changed = threading.Condition()
        self._buffer: deque[tuple[Any, Any]] = deque()
        self._buffer_size = buffer_size
        self._stopped = False
        self._end: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(source, stream), name="weft-input-prefetch", daemon=True
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
            self._changed.wait_for(lambda: self._stopped or len(self._buffer) < self._buffer_size)
            if self._stopped:
                return False
            self._buffer.append(item)
            self._changed.notify_all()
            return True

    def wait(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._buffer) or self._end is not None, timeout
            )

    def look(self) -> Any:
        with self._changed:
            if not self._buffer:
                assert self._end is not None
                raise self._end
            return self._buffer[0][0]

    def take(self) -> tuple[Any, Any]:
        with self._changed:
            if not self._buffer:
                assert self._end is not None
                raise self._end
            item = self._buffer.popleft()
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._buffer.clear()
            self._changed.notify_all()
        # A source that hangs must not keep the process from ending: the thread is a daemon.
        self._thread.join(timeout=_CLOSE_TIMEOUT_SECONDS)
