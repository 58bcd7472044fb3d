"""Where a config's values were set: the file and line of the statement, remembered per field.

The caller's frame is looked up at each assignment, past the frames of this package, which costs
about a microsecond. Copies keep the origins of what they are copies of.
"""

import os
import sys
from typing import NamedTuple


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
