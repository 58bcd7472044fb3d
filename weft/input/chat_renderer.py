"""The process that renders chat templates, and what is asked of it.

A template is a program of a stranger, and no check of its text bounds what it takes. Therefore one
process, `chat_worker.py`, renders for all threads, and the system bounds its time and memory. It
starts at the first request, and again after one that had to be ended.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weft.errors import ChatTemplateError
from weft.serialization.untrusted import printable

MAX_SECONDS = 10
MAX_MEMORY_BYTES = 2**30
MAX_CHARACTERS = 2**24
"""What a template may take and write for a conversation."""

_LIMITS = (MAX_SECONDS, MAX_MEMORY_BYTES, MAX_CHARACTERS)
_MAX_ERROR_CHARACTERS = 1000
_WORKER = Path(__file__).with_name("chat_worker.py")


class Renderer:
    """Process that renders templates, one at a time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self,
        source: str,
        variables: Mapping[str, object],
        generation_marks: tuple[str, str],
    ) -> str:
        """Returns the text of a template, with marks around that of `{% generation %}`.

        Args:
            variables: What JSON can hold, and NumPy's arrays and numbers.

        Raises ChatTemplateError if the template is wrong or refuses, or at a limit.
        """
        request = {
            "source": source,
            "variables": variables,
            "marks": generation_marks,
        }
        try:
            line = json.dumps(request, default=_json_value).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(
                f"the conversation is not JSON ({error}); write its messages, tools and variables "
                "with strings, numbers, booleans, None, lists and dicts"
            ) from error
        with self._lock:
            reply = self._exchange(line)
        if "error" in reply:
            message = printable(reply["error"][:_MAX_ERROR_CHARACTERS])
            raise ChatTemplateError(
                f"the chat template does not render this conversation: {message}"
            )
        return reply["text"]

    def _exchange(self, line: bytes) -> dict[str, str]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        except BaseException:
            # An interrupt: the reply that is left belongs to no request.
            self.stop()
            raise
        if reply:
            return json.loads(reply)
        exit_status = process.wait()
        self.stop()
        if exit_status == -signal.SIGPROF:
            raise ChatTemplateError(
                f"the chat template computes for more than {MAX_SECONDS} seconds on a "
                "conversation; correct its loops, or use another template"
            )
        raise ChatTemplateError(
            f"the process that renders chat templates ended (status {exit_status}); expected at "
            f"most {MAX_MEMORY_BYTES:,} bytes of memory for a conversation: correct the template, "
            "or use another one"
        )

    def _start(self) -> subprocess.Popen[bytes]:
        packages = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            # Not with the folder of the program as that of its modules.
            [sys.executable, "-P", str(_WORKER), *map(str, _LIMITS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": packages},
            # Ctrl-C is for this process.
            start_new_session=True,
        )
        atexit.register(self.stop)
        return self._process

    def leave(self) -> None:
        """Leaves the process to the parent of this one, after a fork."""
        self._lock = threading.Lock()
        # Kept, since its pipes would be flushed when it is deleted.
        self._process_of_parent, self._process = self._process, None

    def stop(self) -> None:
        """Ends the process, if there is one."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        # Reads what is left and closes the pipes.
        process.communicate()


def _json_value(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"it has a value of type {type(value).__name__}")


RENDERER = Renderer()
os.register_at_fork(after_in_child=RENDERER.leave)
