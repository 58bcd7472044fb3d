"""Room for Python's frames, so that no trace is slow by the depth at which it happens to begin.

CPython (since 3.11) keeps frames in pieces of 16 KB, in which there is room for some sixty to a
hundred calls. A call that finds its piece full asks the system for another one, and gives it back
when it returns. Where that is in the middle of a trace, thousands of its calls do so, and it takes
up to 1.9 times as long. A frame larger than a piece is given one of its own, with room behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def with_room(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls a function, with room for all calls below it; for what takes longer than 13 µs.

    Args:
        fn: the function.
        *args: what it is called with.
        **kwargs: likewise.

    Example:
        >>> with_room(max, 1, 2)
        2
    """
    return fn(*args, **kwargs)


# A frame of 512 KB, of which nothing is written to. As much again is behind it in its piece, which
# is more than the calls take that the default recursion limit allows.
with_room.__code__ = with_room.__code__.replace(co_stacksize=1 << 16)
