"""Graceful stop: a run that receives a signal stops between two steps, after a checkpoint.

A signal may come while the step is compiled or runs, is evaluated or saved, or while the run waits
for input. A second thread does the work that would block the main thread in C++ for long, so that
the main thread notices signals.

All processes must stop after the same step: one that runs another step would wait for the others
forever. Before each step, each batch of an evaluation, and the result of a compilation, they meet
at a point of agreement (`Companions.agree`). A process that waits for its input or its compiler
notices the wish of another to stop and goes to the point. An input that ends early or fails in one
process stops all of them:

    process 0    step 4    SIGTERM, comes to the point        saves step 4
    process 1    step 4    waits for input, is asked to stop    saves step 4
"""

import contextlib
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import jax

from weft.errors import LossSpikeError, ProcessLostError, UndefinedLossException
from weft.input import PrefetchingIterator
from weft.trainer.companions import Companions, Wish, current_companions, in_company
from weft.trainer.meeting import open_companions

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_COMPILE_THREAD = "weft-compile"


class StopRun(BaseException):
    """Ends the steps of a run; all processes raise it at the same point.

    It is not an Exception, so that error handling does not catch it. `wish` is the reason, and
    `error` the error that this process raises after it has saved, if any.
    """

    def __init__(self, wish: Wish, error: Exception | None = None):
        super().__init__(wish.text)
        self.wish = wish
        self.error = error


def _signals_to_stop() -> list[signal.Signals]:
    """Returns the signals that stop a run; SIGHUP only if it is not ignored, as by `nohup`."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]


class GracefulStop:
    """Context in which SIGTERM, SIGHUP and Ctrl-C stop the run instead of ending the process.

    A closed terminal sends SIGHUP; if it is ignored, as under `nohup`, it stays ignored. A second
    Ctrl-C raises KeyboardInterrupt. Only the main thread can handle signals; in other threads
    nothing is changed.

    Args:
        companions: the connections to the other processes; None for a single process.
        report: called with the current activity, and repeatedly while waiting for others.
        patience_seconds: how much longer than another process one may take to restore or to
            compile.

    Example:
        >>> with GracefulStop() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.signal_name, stop.agreed("running").text
        ('SIGTERM', 'SIGTERM')
    """

    def __init__(
        self,
        companions: Companions | None = None,
        report: Callable[[str], None] = lambda doing: None,
        patience_seconds: float | None = None,
    ) -> None:
        self.signal_name: str | None = None
        self._companions = companions
        self._report = report
        self._patience_seconds = patience_seconds
        self._within: float | None = None
        self._now = "starting"
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():
            for number in _signals_to_stop():
                self._previous[number] = signal.signal(number, self._on_signal)
        _OPEN.stack.append(self)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __exit__(self, *exc_info: object) -> None:
        _OPEN.stack.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    # Agreeing.

    def doing(self, what: str) -> None:
        """Announces the current activity to the watchdog and the other processes."""
        self._now = what
        if self._companions is not None:
            self._companions.doing = what
        self._report(what)

    @property
    def wanted(self) -> bool:
        """True if a process wishes to stop or is gone, so that the next point should come soon."""
        if self._companions is None:
            return self.signal_name is not None
        self._companions.check()
        return self.signal_name is not None or self._companions.asked is not None

    def agreed(
        self, doing: str, own: Wish | None = None, *, within_seconds: float | None = None
    ) -> Wish | None:
        """Returns why all processes stop here, or None. All must call it equally often.

        Args:
            doing: the next activity.
            own: why this process wishes to stop, in addition to a signal.
            within_seconds: how long the first process waits here for the last.

        Raises:
            ProcessesNotReadyError: if some do not arrive in time.
            ProcessLostError: if one is gone.
        """

        def wish() -> Wish | None:
            if own is None and self.signal_name is not None:
                return Wish("signal", self.signal_name)
            return own

        if self._companions is None:
            self.doing(doing)
            return wish()
        stop = self._companions.agree(
            wish,
            within_seconds=within_seconds,
            alive=lambda: self._report(f"waiting for the other processes before {doing}"),
        )
        self.doing(doing)
        return stop

    def check(self, doing: str) -> None:
        """Raises StopRun if any process wishes to stop; all processes must call it."""
        stop = self.agreed(doing)
        if stop is not None:
            raise StopRun(stop)

    @contextlib.contextmanager
    def getting_ready(self, doing: str) -> Iterator[None]:
        """Runs a block that all processes must complete before any of them continues.

        Raises:
            ProcessesNotReadyError: if one takes longer than another by more than the patience.
            ProcessLostError: if one is gone.
        """
        before = self._now, self._within
        self.doing(doing)
        self._within = self._patience_seconds
        try:
            yield
            self.wait_for_all()
        finally:
            self._within = before[1]
        self.doing(before[0])

    def wait_for_all(self) -> None:
        """Waits for all processes; within `getting_ready`, no longer than its patience."""
        if self._companions is None:
            return
        what = f"waiting for the other processes while {self._now}"
        self._companions.agree(None, within_seconds=self._within, alive=lambda: self._report(what))
        self._report(self._now)

    # Waiting.

    def next_batch(
        self,
        batches: PrefetchingIterator,
        doing: str,
        *,
        prepare: Callable[[Any], None] | None = None,
        within_seconds: float | None = None,
    ) -> Any:
        """Returns the next batch, once all processes have theirs; raises StopRun if they stop.

        `prepare` is called with the batch before all agree on using it. At a stop, no batch is
        consumed.
        """
        own, error = None, None
        while not batches.ready(_POLL_SECONDS):
            if self.wanted:
                break
        else:
            try:
                batch = batches.peek()
                if prepare is not None:
                    prepare(batch)
            except StopIteration:
                own = Wish("end", "input ended")
            except Exception as raised:
                own, error = Wish("error", self._told_to_others(raised)), raised
        stop = self.agreed(doing, own, within_seconds=within_seconds)
        if stop is None:
            return next(batches)
        if stop.kind == "error" and error is None:
            error = ProcessLostError(
                f"{stop.text.rstrip('.')}. The training up to this point is saved."
            )
        raise StopRun(stop, error if stop.kind == "error" else None)

    def _told_to_others(self, error: Exception) -> str:
        where = f"process {jax.process_index()} of {jax.process_count()} has failed"
        return f"{where}: {type(error).__name__}: {error}"

    def compile(self, lowered: jax.stages.Lowered) -> None:
        """Compiles a program, unless a process wishes to stop before it is done.

        JAX caches the result for the later call. An abandoned compilation cannot be ended and
        continues in its thread; see `still_compiling`.
        """
        done, failure = threading.Event(), []

        def work() -> None:
            try:
                lowered.compile()
            except BaseException as error:  # raised in the main thread
                failure.append(error)
            finally:
                done.set()

        threading.Thread(target=work, name=_COMPILE_THREAD).start()
        while not done.wait(_POLL_SECONDS):
            if self.wanted:
                return
        if failure:
            raise failure[0]

    def compile_together(self, lowered: jax.stages.Lowered, name: str) -> StopRun | None:
        """Compiles a program; all processes meet afterwards, or as soon as one wishes to stop.

        Returns None if all have compiled it, else the end of the run in all processes, with the
        compiler's error if it fails here.
        """
        self.doing(f"compiling {name}")
        failure, own = None, None
        try:
            self.compile(lowered)
        except Exception as error:
            failure, own = error, Wish("error", f"compiling {name}: {error}")
        stop = self.agreed(f"computing {name}", own, within_seconds=self._patience_seconds)
        stop = stop or own
        return None if stop is None else StopRun(stop, failure)


class Interruptible:
    """Jitted function whose compilation a request to stop the run interrupts.

    Outside a run it is only the function. All processes must make the same calls. `name` is the
    name of its result, for the watchdog.
    """

    def __init__(self, jitted: Any, name: str):
        self._jitted, self._name = jitted, name
        self._compiled: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        if _OPEN.stack:
            leaves, tree = jax.tree.flatten(args)
            kinds = (tree, *((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves))
            if kinds not in self._compiled:
                stop = _OPEN.stack[-1].compile_together(self._jitted.lower(*args), self._name)
                if stop is not None:
                    raise stop
                self._compiled.add(kinds)
        return self._jitted(*args)


def still_compiling() -> bool:
    """Returns whether an abandoned compilation is running, which delays the end of the process."""
    return any(thread.name == _COMPILE_THREAD for thread in threading.enumerate())


class _Open(threading.local):
    def __init__(self) -> None:
        self.stack: list[GracefulStop] = []


_OPEN = _Open()


def stop_point(doing: str) -> None:
    """Raises StopRun if the run should stop, at a point in long work that all processes reach.

    Do not catch it. Outside a run it does nothing. An evaluation has such a point before each
    batch.
    """
    if _OPEN.stack:
        _OPEN.stack[-1].check(doing)


def compiled_unless_stopped(lowered: jax.stages.Lowered, name: str) -> bool:
    """Compiles an optional program in all processes; returns whether to use it.

    It returns False if the run is about to stop, or if another process cannot compile it, and
    raises the compiler's error in this process.
    """
    stop = _OPEN.stack[-1].compile_together(lowered, name) if _OPEN.stack else None
    if stop is not None and stop.error is not None:
        raise stop.error
    return stop is None


@contextlib.contextmanager
def getting_ready(doing: str) -> Iterator[None]:
    """Applies `GracefulStop.getting_ready` of the current run, if there is one."""
    with _OPEN.stack[-1].getting_ready(doing) if _OPEN.stack else contextlib.nullcontext():
        yield


def wait_for_all() -> None:
    """Waits for all processes of a run, before work that would hang without one of them."""
    if _OPEN.stack:
        _OPEN.stack[-1].wait_for_all()


@contextlib.contextmanager
def batches_until_stopped(
    iterator: Any, stream: Callable[[Any], Iterable[Any]], name: str
) -> Iterator[Iterator[Any]]:
    """Yields the batches of work within a step, such as an evaluation, with a `stop_point` each.

    In a run, `stream`'s batches of the source `iterator` are prefetched, so that a slow source does
    not delay a stop; all processes end with the first whose batches end. The source is closed.
    """
    close = getattr(iterator, "close", None)
    if _OPEN.stack and hasattr(iterator, "get_state"):
        with PrefetchingIterator(iterator, stream=stream) as batches:
            yield _until_stopped(_OPEN.stack[-1], batches, name)
        return
    try:
        yield iter(stream(iterator))
    finally:
        if close is not None:
            close()


def _until_stopped(stop: GracefulStop, batches: PrefetchingIterator, name: str) -> Iterator[Any]:
    for n in itertools.count(1):
        stop.doing(f"waiting for batch {n} of {name}")
        try:
            yield stop.next_batch(batches, f"running batch {n} of {name}")
        except StopRun as stopped:
            if stopped.error is not None:
                raise stopped.error from None
            if stopped.wish.kind == "end":
                return
            raise


@contextlib.contextmanager
def graceful_stop(
    report: Callable[[str], None], readiness_timeout_seconds: float
) -> Iterator[GracefulStop]:
    """Opens a `GracefulStop` with this thread's connections to other processes, or new ones.

    An error caused by the end of another process becomes a ProcessLostError that names it.
    """
    with contextlib.ExitStack() as stack:
        companions = current_companions()
        if companions is None:
            companions = open_companions(readiness_timeout_seconds)
            if companions is not None:
                stack.enter_context(in_company(companions))
        try:
            yield stack.enter_context(GracefulStop(companions, report, readiness_timeout_seconds))
        except (ProcessLostError, UndefinedLossException, LossSpikeError):
            raise  # all processes raise the latter two together
        except Exception as error:
            if companions is not None:
                companions.explain(error)
            raise
