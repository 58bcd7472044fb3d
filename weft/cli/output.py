"""Standard output that tolerates a closed pipe, a full disk or a missing stream.

After a failed write, a command that only prints ends: with its own code if the reader, such as
`head`, closed the pipe, else with code 1 and the reason. A training continues and saves.
"""

import contextlib
import logging
import os
import sys
from typing import Any, TextIO

logger = logging.getLogger(__name__)


class Output:
    """Standard output of a command.

    Args:
        stream: The original stream; None if the process was started without (`>&-`).

    Attributes:
        error: The reason why output is dropped, or None.
        lasts: Whether the command continues without output.
    """

    def __init__(self, stream: TextIO | None):
        if stream is None:
            # Takes the lowest free number: else a file of the run would be number 1 and receive the
            # output of libraries.
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the end
        self._stream = stream
        self.error: OSError | None = None
        self.lasts = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, or drops its buffer."""
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
            logger.warning("no further output, as the stream cannot be written: %s", error)

    def _drop(self) -> None:
        """Discards buffered text, which would fail again at exit."""
        with contextlib.suppress(OSError, ValueError):  # the stream may have no file descriptor
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)


def go_on_without_output() -> None:
    """Lets the running command continue when its output cannot be written."""
    if isinstance(sys.stdout, Output):
        sys.stdout.lasts = True
