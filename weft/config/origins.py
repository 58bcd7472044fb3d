"""Origins of config values: file and line of the statement that set each field.

Each assignment looks up the caller's frame outside of this package, which takes about a
microsecond. Copies keep the origins.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.config.paths import get_path, split_path
from weft.config.values import ConfigNode


class Origin(NamedTuple):
    """Place where a value was set.

    Attributes:
        file: path of the file, or a description such as "command line".
        line: line number; 0 if there are no lines.
    """

    file: str
    line: int = 0

    def __str__(self) -> str:
        file = self.file
        if os.path.isabs(file):
            relative = os.path.relpath(file)
            file = file if relative.startswith("..") else relative
        return f"{file}:{self.line}" if self.line else file


def calling_line() -> Origin | None:
    """Returns the innermost line outside of this package, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("weft.config"):
            return Origin(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def origin(config: ConfigNode, path: str | Sequence[Any]) -> Origin | None:
    """Returns where the value at a path was last set; None for a default.

    Args:
        path: a path, as in `ConfigBase.get_recursively`. Inside of a list, a dict or a record it
            refers to the enclosing field.

    Raises:
        UnknownFieldError: if the path does not exist.
    """
    get_path(config, path)
    owner, steps = split_path(config, path)
    return owner._origins.get(steps[0])  # type: ignore[attr-defined]
