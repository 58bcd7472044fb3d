"""Tracebacks without Weft's internal frames, as JAX hides its own.

Entry points remove Weft's frames between the user's call and the user's function from tracebacks of
errors. The user's frames and calls of Weft's layers remain. JAX's setting
`jax_traceback_filtering="off"` keeps all frames.
"""

import functools
import pathlib
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

import jax

from weft.configurations import config

P = ParamSpec("P")
R = TypeVar("R")
_WEFT = str(pathlib.Path(__file__).parent.parent) + "/"
_EXCLUDED: list[str] = []  # more files whose frames are hidden
# Classes with methods like these that are not layers.
_MACHINERY = ("core/", "lifting/", "nnx/transforms/", "linen/methods.py")
_OF_LAYERS = ("__call__", "forward")


def hide_frames(error: BaseException) -> None:
    """Removes Weft's frames from an error's traceback, which must begin in the caller."""
    filtering = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    if filtering == "off" or not config.flax_filter_frames:
        return
    shown: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _is_internal(frame):
            shown = TracebackType(shown, frame, frame.f_lasti, line)
    error.__traceback__ = shown


def entry_point(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates an entry point to raise errors without Weft's frames."""

    @functools.wraps(fn)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return entered


def hide_flax_in_tracebacks() -> None:
    """Hides internal frames, the default: sets the flag `flax_filter_frames`."""
    config.update("flax_filter_frames", True)


def show_flax_in_tracebacks() -> None:
    """Shows all frames in tracebacks: unsets the flag `flax_filter_frames`."""
    config.update("flax_filter_frames", False)


def register_exclusion(path: str) -> None:
    """Hides the frames of a file, too, in tracebacks."""
    _EXCLUDED.append(path)


def _is_internal(frame: FrameType) -> bool:
    code = frame.f_code
    if not code.co_filename.startswith(_WEFT):
        return code.co_filename in _EXCLUDED
    is_machinery = code.co_filename.removeprefix(_WEFT).startswith(_MACHINERY)
    return is_machinery or code.co_name not in _OF_LAYERS
