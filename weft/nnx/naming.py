"""Names of objects for errors: where an object was made, and the attribute that holds it.

An object does not know its owner; errors search all live objects for it, which is slow.
"""

from __future__ import annotations

import gc
import inspect
import linecache
from types import CodeType
from typing import Any

from weft.errors import TraceContextError

Origin = tuple[CodeType, int]


def origin() -> Origin:
    """Returns the program's position outside Weft; decoded on demand."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("weft."):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def line_of(origin: Origin | None) -> str | None:
    """Returns file and line of an origin, relative to the working directory."""
    if origin is None:
        return None
    from weft.config.origins import Origin as Place  # imports all of `weft.config`, only for errors

    return str(Place(origin[0].co_filename, _line_number(origin)))


def text_of(origin: Origin) -> str:
    """Returns file, line and source line of an origin."""
    text = linecache.getline(origin[0].co_filename, _line_number(origin)).strip()
    return f"{line_of(origin)}: {text}" if text else f"{line_of(origin)}"


def _line_number(origin: Origin) -> int:
    code, instruction = origin
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return 0


def path_of(x: Any, depth: int = 8) -> str:
    """Returns the path to an object from an unowned one at most `depth` up, as "Model.layer.w"."""
    from weft.nnx.pytree import Pytree

    name, seen = "", {id(x)}
    for _ in range(depth):
        found = _owner(x)
        if found is None or id(found[0]) in seen:
            break
        x, at = found
        seen.add(id(x))
        name = (f".{at}" if isinstance(at, str) else f"[{at!r}]") + name
    is_root = isinstance(x, Pytree)
    return (type(x).__name__ if is_root else "") + name if name else ""


def _owner(x: Any) -> tuple[Any, Any] | None:
    from weft.nnx.pytree import Pytree

    for holder in gc.get_referrers(x):
        for owner in [holder] if isinstance(holder, Pytree) else _owners_of_part(holder):
            for name, value in owner._items():
                if value is x:
                    return owner, name
    return None


def _owners_of_part(holder: Any) -> list[Any]:
    from weft.nnx.pytree import Pytree

    if not isinstance(holder, dict):
        return []
    return [x for x in gc.get_referrers(holder) if isinstance(x, Pytree)]


def changed_elsewhere(x: Any) -> TraceContextError:
    """Returns the error about changing an object in a trace that did not create it."""
    from weft.nnx.transforms.calls import current_call
    from weft.nnx.variables import Variable

    is_variable = isinstance(x, Variable)
    shape = getattr(x._value, "shape", None) if is_variable else None
    what = type(x).__name__ + (f" of shape {shape}" if shape is not None else "")
    call = current_call()
    return TraceContextError(
        what, call.title if call is not None else "a JAX transformation", known_of(x)
    )


def known_of(x: Any) -> str:
    """Describes an object, such as "is Model.layer.w and was made at train.py:3"."""
    from weft.nnx.variables import Variable

    path = path_of(x)
    line = line_of(getattr(x, "_origin", None) if isinstance(x, Variable) else x._watch.origin)
    known = [f"is {path}" if path else "", f"was made at {line}" if line else ""]
    return " and ".join(part for part in known if part)
