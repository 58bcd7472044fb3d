"""Stack traces of all threads, printed by a process that must not block on its reader.

An unread pipe, such as that of a frozen launcher, blocks its writers, and `faulthandler` blocks all
threads when it writes there.
"""

import faulthandler
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

_SECONDS = 1.0


def beside(call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Runs a call that may block, such as `logger.error`, and continues after at most a second."""
    thread = threading.Thread(target=call, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    thread.join(_SECONDS)


def print_error(text: str) -> None:
    """Prints to the process's own standard error, even if `sys.stderr` is replaced."""
    file = sys.__stderr__ or sys.stderr
    if file is not None:
        beside(print, text, file=file, flush=True)


def stacks_of_all_threads() -> str:
    """Returns the stacks as `faulthandler` shows them, with the caller's as the current one."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
