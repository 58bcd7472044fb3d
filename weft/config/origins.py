"""Where a config's values were set: the file and line of the statement, remembered per field.

The caller's frame is looked up at each assignment, past the frames of this package, which costs
about a microsecond. Copies keep the origins of what they are copies of.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.config.paths import get_path, split_path
from weft.config.values import ConfigNode


class Origin(NamedTuple):
    """The place in a program, or elsewhere, that a value comes from.

    Attributes:
        file: the path of the file, or what stands for it, such as "command line".
        line: the line in it, 0 where there are no lines.
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
    """Returns the innermost line outside of this package, None at the end of the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("weft.config"):
            return Origin(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def origin(config: ConfigNode, path: str | Sequence[Any]) -> Origin | None:
    """Returns where the value at a path was last set.

    Args:
        config: a config.
        path: a path into it, as of `ConfigBase.get_recursively`. Inside of a list, a dict or a
            record it is the field around it that was set.

    Returns:
        The file and line, or None where the field has the default of its class.

    Raises:
        UnknownFieldError: if the path leads nowhere.
    """
    get_path(config, path)
    owner, steps = split_path(config, path)
    return owner._origins.get(steps[0])  # type: ignore[attr-defined]
