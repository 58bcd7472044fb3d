"""A polite end: signals that ask a run to stop between two steps."""

import signal
import threading
from types import FrameType
from typing import Any


class GracefulStop:
    """While open, SIGTERM and Ctrl-C set `signal_name` instead of ending the process.

    A second Ctrl-C raises KeyboardInterrupt, for a person who does not want to wait. In threads
    other than the main one, Python delivers no signals, and nothing is changed.

    Example:
        >>> with GracefulStop() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.signal_name
        'SIGTERM'
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
