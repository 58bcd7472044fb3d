"""Errors of running traces of JAX, and tracebacks of errors without Weft's internal frames.

Raw JAX transformations do not lift scopes. Errors name what the user called, and its replacement.

Entry points remove Weft's frames between the user's call and the user's function from tracebacks,
as JAX hides its own. The user's frames and calls of Weft's layers remain. JAX's setting
`jax_traceback_filtering="off"` keeps all frames.
"""

import contextlib
import functools
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Generic, ParamSpec, TypeVar

import jax

from weft.core.settings import settings
from weft.errors import JaxTransformError
from weft.lifting.traces import TraceState, current_trace
from weft.typing import T


class ThreadStack(threading.local, Generic[T]):
    """Stack of each thread."""

    def __init__(self) -> None:
        self.items: list[T] = []

    @property
    def top(self) -> T | None:
        """The last item; None if there is none."""
        return self.items[-1] if self.items else None

    @contextlib.contextmanager
    def push(self, item: T) -> Iterator[T]:
        """Makes an item the last one within the context."""
        self.items.append(item)
        try:
            yield item
        finally:
            self.items.pop()


def check_trace_level(base_level: TraceState) -> None:
    """Raises JaxTransformError unless the trace `base_level`, in which state was created, runs."""
    if base_level != current_trace():
        raise trace_error()


def trace_error(
    problem: str = "A scope is used", location: str = "/", consequence: str = ""
) -> JaxTransformError:
    """Returns the error that names the running transformation; see `JaxTransformError`."""
    jax_name = running_transformation()
    return JaxTransformError(
        problem, location, jax_name, lifted_names(jax_name), consequence
    )


# By the function of JAX that runs: what its user called.
_NAMES = {
    **{
        f"api.{name}": f"jax.{name}"
        for name in ("eval_shape", "jvp", "linearize", "vjp")
    },
    **{
        f"conditionals.{name}": f"jax.lax.{name}" for name in ("cond", "switch")
    },
    **{
        f"loops.{name}": f"jax.lax.{name}"
        for name in ("fori_loop", "map", "scan", "while_loop")
    },
    "ad_checkpoint.fun_remat": "jax.checkpoint",
    "api.grad_f": "jax.grad",
    "api.grad_f_aux": "jax.grad",
    "api.jacfun": "a Jacobian of JAX",
    "api.value_and_grad_f": "jax.value_and_grad",
    "api.vmap_f": "jax.vmap",
    "checkify.checked_fun": "checkify",
    "custom_derivatives.__call__": "a custom derivative of JAX",
    "pjit.cache_miss": "jax.jit",
    "shard_map.wrapped": "jax.shard_map",
}
# Those that call another one of them, as `jax.grad` does `jax.vjp`.
_CALL_OTHERS = {
    "api.grad_f",
    "api.grad_f_aux",
    "api.jacfun",
    "api.value_and_grad_f",
    "loops.fori_loop",
    "loops.map",
}
# What takes the place of those that Weft has under another name.
_OTHER_NAMES = {
    "a Jacobian of JAX": ("jvp", "vjp"),
    "a custom derivative of JAX": ("custom_vjp", "custom_jvp"),
    "jax.checkpoint": ("remat",),
    "jax.lax.map": ("scan",),
    "jax.linearize": ("jvp",),
}


def running_transformation() -> str:
    """Returns the innermost transformation of JAX that the user called, "" if unknown."""
    jax_name = ""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax."):
            _, _, module_name = module.rpartition(".")
            key = f"{module_name}.{frame.f_code.co_name}"
            if key in _NAMES and (not jax_name or key in _CALL_OTHERS):
                jax_name = _NAMES[key]
        elif module.startswith("weft.lifting."):
            jax_name = ""  # not called by the user
        elif jax_name:
            break
        frame = frame.f_back
    return jax_name


def lifted_names(jax_name: str) -> tuple[str, ...]:
    """Returns the names of Weft's functions for a result of `running_transformation`.

    >>> lifted_names("jax.lax.scan"), lifted_names("jax.linearize")
    (('scan',), ('jvp',))
    """
    if jax_name in _OTHER_NAMES:
        return _OTHER_NAMES[jax_name]
    _, _, name = jax_name.rpartition(".")
    return (name,) if name else ()


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
    if filtering == "off" or not settings.filter_frames:
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


def register_exclusion(path: str) -> None:
    """Hides the frames of a file, too, in tracebacks."""
    _EXCLUDED.append(path)


def _is_internal(frame: FrameType) -> bool:
    code = frame.f_code
    if not code.co_filename.startswith(_WEFT):
        return code.co_filename in _EXCLUDED
    is_machinery = code.co_filename.removeprefix(_WEFT).startswith(_MACHINERY)
    return is_machinery or code.co_name not in _OF_LAYERS
