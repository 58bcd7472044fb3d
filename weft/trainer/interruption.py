"""A polite end: signals that ask a run to stop between two steps.

Of several processes all have to stop after the same step: one that takes a step more waits for the
others without end. So after each step each tells the others of its signal, and all look at what was
told after the step before, which is the same for all and need not be waited for.

    after step      4          5                6
    process 0       -          SIGTERM, tells   sees it, stops
    process 1       -          -                sees it, stops
"""

import signal
import threading
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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
        self._told: Any = None  # by all processes after the step before, as a number
        self._largest: Any = None  # of what the processes tell, compiled

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def agreed(self) -> str | None:
        """The signal on which all processes stop now, or None. All have to call it at each step."""
        if jax.process_count() == 1:
            return self.signal_name
        before, self._told = self._told, self._tell()
        number = 0 if before is None else int(before)
        return signal.Signals(number).name if number else None

    def _tell(self) -> Any:
        """Tells the others of this process's signal; returns the largest number of all."""
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        if self._largest is None:
            self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        number = signal.Signals[self.signal_name] if self.signal_name else 0
        mine = np.full(len(jax.local_devices()), number, np.int32)
        sharding = NamedSharding(mesh, PartitionSpec("devices"))
        return self._largest(jax.make_array_from_process_local_data(sharding, mine))

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
