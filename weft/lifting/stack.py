"""Preallocation of Python's stack frames, to keep traces fast at any depth.

CPython (since 3.11) allocates frames in chunks of 16 KB, enough for 60 to 100 calls. A call that
finds its chunk full allocates another one and frees it on return. If a trace crosses that boundary,
thousands of its calls do so, and it takes up to 1.9 times as long. A frame larger than a chunk gets
its own chunk, with additional room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def with_room(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls a function with room for all calls below it; use it for calls longer than 13 µs.

    Example:
        >>> with_room(max, 1, 2)
        2
    """
    return fn(*args, **kwargs)


# A frame of 512 KB that is never written to. Its chunk has as much additional room, which is enough
# for all calls within the default recursion limit.
with_room.__code__ = with_room.__code__.replace(co_stacksize=1 << 16)
