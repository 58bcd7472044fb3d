"""Where all threads are, printed in a process that may not wait for whoever reads what it prints.

A pipe that nobody reads, as of a launcher that is frozen, holds up who writes to it; and what
`faulthandler` writes there itself holds up all threads.
"""

import faulthandler
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

_SECONDS = 1.0


def beside(call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Calls what may be held up, and goes on after a second if it is.

    Args:
        call: such as `logger.error`.
        args, kwargs: what it is called with.
    """
    thread = threading.Thread(target=call, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    thread.join(_SECONDS)


def print_error(text: str) -> None:
    """Prints where the process prints errors, whatever stands in for `sys.stderr`.

    Args:
        text: what to print.
    """
    file = sys.__stderr__ or sys.stderr
    if file is not None:
        beside(print, text, file=file, flush=True)


def stacks_of_all_threads() -> str:
    """As `faulthandler` shows them; that of the caller is the current one."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
