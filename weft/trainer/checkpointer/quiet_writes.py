"""Orbax's writes of arrays without words of their own, as `docs/faults.md` promises.

When a write fails, Orbax closes its event loop while other writes are still going on. Each of their
results would be printed with a traceback, by threads of the storage library, although the first
error is raised and reported (decision 0029).
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any


class WriteLoop(asyncio.SelectorEventLoop):
    """Event loop that awaits all of its tasks before it closes, and drops their errors.

    So nothing is written after a failed save is removed.
    """

    def close(self) -> None:
        if not self.is_closed():
            unfinished_tasks = asyncio.all_tasks(self)
            if unfinished_tasks:
                results = asyncio.gather(
                    *unfinished_tasks, return_exceptions=True
                )
                self.run_until_complete(results)
        super().close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        pass

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return super().call_soon_threadsafe(callback, *args, **kwargs)
        except RuntimeError:
            if not self.is_closed():
                raise
            return None  # the result of a write that nobody awaits


class _LoopPolicy(asyncio.AbstractEventLoopPolicy):  # pyright: ignore[reportGeneralTypeIssues]
    """Policy that creates `WriteLoop`s; the current loops of threads are those of the one before.

    Attributes:
        before: the policy that was set before.
        num_contexts: number of open contexts of `write_loops`.
    """

    def __init__(self, before: asyncio.AbstractEventLoopPolicy):
        self.before = before
        self.num_contexts = 0

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        return self.before.get_event_loop()

    def set_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.before.set_event_loop(loop)

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return WriteLoop()


_loops_lock = threading.Lock()


@contextlib.contextmanager
def write_loops() -> Iterator[None]:
    """Makes new event loops of all threads `WriteLoop`s while open; contexts may overlap."""
    with _loops_lock:
        policy = asyncio.get_event_loop_policy()
        if not isinstance(policy, _LoopPolicy):
            policy = _LoopPolicy(policy)
            asyncio.set_event_loop_policy(policy)
        policy.num_contexts += 1
    try:
        yield
    finally:
        with _loops_lock:
            policy.num_contexts -= 1
            if (
                not policy.num_contexts
                and asyncio.get_event_loop_policy() is policy
            ):
                asyncio.set_event_loop_policy(policy.before)


@contextlib.contextmanager
def quiet_writes() -> Iterator[None]:
    """Lets Orbax write without words of its own, and waits for its threads if it raises.

    It logs an error three times with its traceback; it is also raised.
    """

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in record.pathname

    absl_logger = logging.getLogger("absl")
    earlier_threads = set(threading.enumerate())
    absl_logger.addFilter(is_of_others)
    try:
        with write_loops():
            yield
    except BaseException:
        for thread in set(threading.enumerate()) - earlier_threads:
            if type(thread).__module__.startswith("orbax."):
                thread.join()
        raise
    finally:
        absl_logger.removeFilter(is_of_others)
