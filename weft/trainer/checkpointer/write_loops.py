"""Event loops for Orbax's writes, which end only after all of them, and without words of their own.

When a write fails, Orbax closes its event loop while others are still going on. Their results would
each be printed with a traceback, by threads of the storage library, although the first error is
raised and reported. Files that they write late would also return after a failed save is removed.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class WriteLoop(asyncio.SelectorEventLoop):
    """Event loop that awaits all of its tasks before it closes, and drops their errors."""

    def close(self) -> None:
        if not self.is_closed():
            others = asyncio.all_tasks(self)
            if others:
                self.run_until_complete(asyncio.gather(*others, return_exceptions=True))
        super().close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        pass

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().call_soon_threadsafe(callback, *args, **kwargs)
        except RuntimeError:
            if not self.is_closed():
                raise
            return None  # the result of a write that nobody awaits


class _Policy(asyncio.AbstractEventLoopPolicy):  # pyright: ignore[reportGeneralTypeIssues]
    """Policy that creates `WriteLoop`s; the current loops of threads are those of the one before.

    Attributes:
        count: number of open contexts.
    """

    def __init__(self, before: asyncio.AbstractEventLoopPolicy):
        self.before, self.count = before, 0

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        return self.before.get_event_loop()

    def set_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.before.set_event_loop(loop)

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return WriteLoop()


_lock = threading.Lock()


@contextlib.contextmanager
def write_loops() -> Iterator[None]:
    """Makes new event loops of all threads `WriteLoop`s while open; contexts may overlap."""
    with _lock:
        policy = asyncio.get_event_loop_policy()
        if not isinstance(policy, _Policy):
            policy = _Policy(policy)
            asyncio.set_event_loop_policy(policy)
        policy.count += 1
    try:
        yield
    finally:
        with _lock:
            policy.count -= 1
            if not policy.count and asyncio.get_event_loop_policy() is policy:
                asyncio.set_event_loop_policy(policy.before)
