"""Names of objects for errors: where an object was made, and what it is an attribute of.

An object does not know its owner. When an error is to name it, the owner is looked for among all
objects that there are; that is slow, and no call pays for it.
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
    """Where the program is, outside of Weft; decoded only when it is asked for."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("weft."):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def line_of(origin: Origin | None) -> str | None:
    """The file and line of an origin, the file as it is seen from the working directory."""
    if origin is None:
        return None
    from weft.config.origins import Origin as Place  # all of `weft.config`, for errors only

    return str(Place(origin[0].co_filename, _line_number(origin)))


def text_of(origin: Origin) -> str:
    """The file and line of an origin, and what stands there."""
    text = linecache.getline(origin[0].co_filename, _line_number(origin)).strip()
    return f"{line_of(origin)}: {text}" if text else f"{line_of(origin)}"


def _line_number(origin: Origin) -> int:
    code, instruction = origin
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return 0


def path_of(x: Any, depth: int = 8) -> str:
    """The attributes that lead to an object from one that no other owns, such as "Model.layer.w".

    Args:
        x: the object.
        depth: how many owners are looked for at most.
    """
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
    """An object of which `x` is an attribute or item, and its name there."""
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
    """The error about a change of an object in a trace in which it was not made."""
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
    """What is known of an object, such as "is Model.layer.w and was made at train.py:3"."""
    from weft.nnx.variables import Variable

    path = path_of(x)
    line = line_of(getattr(x, "_origin", None) if isinstance(x, Variable) else x._watch.origin)
    known = [f"is {path}" if path else "", f"was made at {line}" if line else ""]
    return " and ".join(part for part in known if part)
