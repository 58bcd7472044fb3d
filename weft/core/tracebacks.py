"""Tracebacks without Weft's own frames, as JAX shows them without its own.

Between a user's call and the user's function that it runs there are Weft's frames; none of them is
where the mistake is. The entry points take them out of the traceback of an error that passes.
The user's frames stay, and the calls of Weft's layers, which show in which layer it was.
The setting `jax_traceback_filtering` of JAX holds for both: `"off"` keeps all frames.
"""

from __future__ import annotations

import functools
import pathlib
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")
_WEFT = str(pathlib.Path(__file__).parent.parent) + "/"
# What has methods like these and is not a layer.
_MACHINERY = ("core/", "lifting/", "nnx/transforms/", "linen/methods.py")
_OF_LAYERS = ("__call__", "forward")


def hide_frames(error: BaseException) -> None:
    """Takes Weft's frames out of the traceback of an error, which is then raised on by `raise`.

    Args:
        error: the error; so far its traceback begins in the function that calls this one.

    """
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    shown: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _is_internal(frame):
            shown = TracebackType(shown, frame, frame.f_lasti, line)
    error.__traceback__ = shown


def entry_point(fn: Callable[P, R]) -> Callable[P, R]:
    """A function that users call, and whose errors come without Weft's frames.

    Example:
        >>> @entry_point
        ... def apply(fn):
        ...     return fn()
    """

    @functools.wraps(fn)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return entered


def _is_internal(frame: FrameType) -> bool:
    """Whether a frame is of Weft, and not the call of a layer."""
    code = frame.f_code
    if not code.co_filename.startswith(_WEFT):
        return False
    is_machinery = code.co_filename.removeprefix(_WEFT).startswith(_MACHINERY)
    return is_machinery or code.co_name not in _OF_LAYERS
