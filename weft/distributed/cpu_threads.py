"""Threads for virtual devices on the CPU, and a watch over the first step without enough.

The devices of a process share a pool of threads. A collective operation keeps a thread of each
device until all devices have come to it, and a device starts several at once. With more devices
than cores, all threads may come to wait, and none is left for what they wait for:

    thread    0       1       2       3
    device    0       0       1       1
    waits in  sum a   sum b   sum c   sum d

XLA ends the process after 40 s. It takes the number of threads from the environment variable NPROC,
else from the cores, when JAX first uses a device.
"""

import contextlib
import functools
import logging
import os
import re
import signal
import threading
import time

import jax

from weft.distributed.watchdog import print_error

logger = logging.getLogger(__name__)

THREADS_PER_DEVICE = 4
_VARIABLE = "NPROC"
_SETTING = "jax_num_cpu_devices"
_ADVICE_SECONDS = 30.0  # before XLA ends the process
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.2


def virtual_devices() -> int:
    """Returns how many devices XLA makes of the CPU, or will."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        return 1
    configured: int = jax.config.values[_SETTING]
    if configured > 0:
        return configured
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    counts = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 1


def missing_threads() -> str | None:
    """Returns what to do about too few threads for the virtual devices; None if there are enough.

    A number of threads in the environment is taken to be what XLA uses.
    """
    devices, threads = virtual_devices(), os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        threads = len(os.sched_getaffinity(0))
    variable = os.environ.get(_VARIABLE, "")
    if variable.isdigit():
        threads = int(variable)
    if threads >= devices:
        return None
    assignment = f"{_VARIABLE}={THREADS_PER_DEVICE * devices}"
    return (
        f"{devices} virtual CPU devices share {threads} threads, so their collective operations "
        f"may wait for each other forever. Set {assignment} in the environment before JAX uses a "
        f"device, as in `{assignment} python train.py`, or use fewer devices."
    )


def provide_threads() -> None:
    """Sets the number of threads for virtual devices, unless the environment has one.

    Says how to set it if that is too small, or if JAX has already used a device.
    """
    advice = missing_threads()
    if advice is None:
        return
    if os.environ.get(_VARIABLE) or _has_devices():
        _say(advice)
    else:
        os.environ[_VARIABLE] = str(THREADS_PER_DEVICE * virtual_devices())


@functools.cache
def _say(advice: str) -> None:
    logger.warning("%s", advice)


def _has_devices() -> bool:
    number = jax.config.values[_SETTING]
    try:
        # Once JAX has made its devices, it refuses another number; it has no question for that.
        jax.config.update(_SETTING, virtual_devices() + 1)
    except RuntimeError:
        return True
    jax.config.update(_SETTING, number)
    return False


class FirstStepWatch:
    """Watch over the first step, which explains a hang without threads and lets signals end it.

    A thread that waits in XLA runs no signal handlers of Python. In a first step there is nothing
    to save, so a signal ends the process after a few seconds. Does nothing with enough threads.

    >>> watch = FirstStepWatch()
    >>> watch.start()
    >>> watch.dispatched(jnp.ones(()))
    >>> watch.close()
    """

    def __init__(self) -> None:
        self.is_dispatched = False
        self._advice: str | None = None
        self._ended = threading.Event()
        self._exit = contextlib.ExitStack()

    def close(self) -> None:
        """Ends the watch."""
        self._ended.set()
        self._exit.close()

    def start(self) -> None:
        """Starts to watch, before the step is dispatched."""
        self._advice = missing_threads()
        if (
            self._advice is None
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        # Python's handler in C writes the number of each signal, also while the main thread waits.
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
            self._exit.callback(os.close, end)
        previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._exit.callback(signal.set_wakeup_fd, previous_fd)
        thread = threading.Thread(
            target=self._watch, args=(reader,), daemon=True
        )
        thread.start()
        self._exit.callback(thread.join)

    def dispatched(self, result: jax.Array) -> None:
        """Lets the watch end when a result of the step is there."""
        self.is_dispatched = True
        if self._advice is not None:
            threading.Thread(
                target=self._wait, args=(result,), daemon=True
            ).start()

    def _wait(self, result: jax.Array) -> None:
        with contextlib.suppress(Exception):  # the main thread raises it, too
            result.block_until_ready()
        self._ended.set()

    def _watch(self, signals: int) -> None:
        started_at, is_advice_printed = time.monotonic(), False
        stop_signal, stop_deadline = 0, 0.0
        while not self._ended.wait(_POLL_SECONDS):
            current_time = time.monotonic()
            if not stop_signal:
                stop_signal = _stop_signal(signals)
                stop_deadline = current_time + _STOP_SECONDS
            elif current_time > stop_deadline:
                # The main thread may never run its handler.
                print_error(
                    f"The first step is stopped while it waits. {self._advice}"
                )
                os._exit(128 + stop_signal)
            waited_seconds = current_time - started_at
            if waited_seconds > _ADVICE_SECONDS and not is_advice_printed:
                is_advice_printed = True
                print_error(
                    f"The first step takes {waited_seconds:.0f} s. {self._advice}"
                )


def _stop_signal(signals: int) -> int:
    """Returns a signal to stop that has come since the last call; 0 if none has."""
    try:
        numbers = os.read(signals, 64)
    except BlockingIOError:
        return 0
    for number in numbers:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return number
    return 0
