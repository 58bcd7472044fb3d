"""What a command prints, also where it cannot: the reader has gone, the disk is full, no output.

A command that only prints ends there: with its code where the reader, such as `head`, has seen
enough, and else with code 1 and the reason. A training continues without output, and saves.
"""

import contextlib
import logging
import os
import sys
from typing import Any, TextIO

logger = logging.getLogger(__name__)


class Output:
    """Standard output while a command runs.

    Args:
        stream: what it was before; None if the process was started without (`>&-`).

    Attributes:
        error: why nothing more is printed; None if all was.
        lasts: whether the command continues then.
    """

    def __init__(self, stream: TextIO | None):
        if stream is None:
            # It takes the lowest number that is free: else a file of the run would be number 1, and
            # have in it what libraries print.
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
        self._stream = stream
        self.error: OSError | None = None
        self.lasts = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Prints a text, or drops it."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Has all that was written arrive."""
        self._try("flush")

    def _try(self, method: str, *args: Any) -> None:
        if self.error is not None:
            return
        try:
            getattr(self._stream, method)(*args)
        except OSError as error:
            self.error = error
            self._drop()
            if not self.lasts:
                raise
            logger.warning("nothing more is printed, as the output takes nothing: %s", error)

    def _drop(self) -> None:
        """Drops what has not arrived: else it would fail again at the exit."""
        with contextlib.suppress(OSError, ValueError):  # there may be no file behind it
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)


def go_on_without_output() -> None:
    """Lets the command that runs continue when nobody can read what it prints."""
    if isinstance(sys.stdout, Output):
        sys.stdout.lasts = True
