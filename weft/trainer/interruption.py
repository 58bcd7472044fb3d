"""A polite end: a run that is asked to stop does so between two steps, after a checkpoint.

A signal may come at any time: while the step is compiled, runs, is evaluated or saved, or while the
input keeps it waiting. Where the main thread would wait in C++ for long, a second thread does, so
that it notices.

Of several processes all have to stop after the same step: one that takes a step more waits for the
others without end. So before each step, each batch of an evaluation, and what is computed after a
compilation, all come to a point at which they agree (`Companions.agree`). Who waits for its input,
or for its compiler, looks up when another wishes to stop, and comes. An input that ends early or
fails in one of them stops all alike.

    process 0    step 4    SIGTERM, comes to the point        saves step 4
    process 1    step 4    waits for input, hears of it, comes    saves step 4
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

    Not an Exception: code that goes on after failures must not go on after this.

    Args:
        wish: why.
        error: what this process raises once it has saved, if anything.
    """

    def __init__(self, wish: Wish, error: Exception | None = None):
        super().__init__(wish.text)
        self.wish = wish
        self.error = error


def _signals_to_stop() -> list[signal.Signals]:
    """The signals that ask a process to stop; SIGHUP not where `nohup` has it ignored."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]


class GracefulStop:
    """While open, SIGTERM, SIGHUP and Ctrl-C ask the run to stop instead of ending the process.

    SIGHUP comes when a terminal is closed; where it is ignored, as under `nohup`, it stays ignored.
    A second Ctrl-C raises KeyboardInterrupt, for a person who does not want to wait. In threads
    other than the main one, Python delivers no signals, and nothing is changed.

    Args:
        companions: the lines to the other processes; None for a process that is alone.
        report: told what the run does, and while it waits for others that it is alive.
        patience_seconds: how much longer than another process one may take to restore, or to
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
        """Says what the run does now, for the watchdog and the other processes."""
        self._now = what
        if self._companions is not None:
            self._companions.doing = what
        self._report(what)

    @property
    def wanted(self) -> bool:
        """Whether to come to the next point soon: somebody wishes to stop, or is gone."""
        if self._companions is None:
            return self.signal_name is not None
        self._companions.check()
        return self.signal_name is not None or self._companions.asked is not None

    def agreed(
        self, doing: str, own: Wish | None = None, *, within_seconds: float | None = None
    ) -> Wish | None:
        """Why all processes stop here, or None. All have to call it as often as each other.

        Args:
            doing: what comes next.
            own: why this process wishes to stop, beside a signal.
            within_seconds: how long the first process waits for the last one here.

        Raises:
            ProcessesNotReadyError: if some do not come in time.
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
        """A point at which all stop if one is asked to.

        Raises:
            StopRun: if they do.
        """
        stop = self.agreed(doing)
        if stop is not None:
            raise StopRun(stop)

    @contextlib.contextmanager
    def getting_ready(self, doing: str) -> Iterator[None]:
        """Work that all processes have to be done with before one of them goes on.

        Args:
            doing: what it is.

        Raises:
            ProcessesNotReadyError: if some take longer than another one by more than the patience.
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
        """Waits until all processes have come here; in `getting_ready` not for longer than it says.

        Raises:
            ProcessesNotReadyError: if some do not come in time.
            ProcessLostError: if one is gone.
        """
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
        """The next batch, once all processes have theirs.

        Args:
            batches: those of this process.
            doing: what comes next.
            prepare: called with the batch before all agree on using it.
            within_seconds: how long the first process waits for the last one.

        Raises:
            StopRun: if all stop instead; no batch is taken then.
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
                f"{stop.text.rstrip('.')}. What was trained until then is saved."
            )
        raise StopRun(stop, error if stop.kind == "error" else None)

    def _told_to_others(self, error: Exception) -> str:
        where = f"process {jax.process_index()} of {jax.process_count()} has failed"
        return f"{where}: {type(error).__name__}: {error}"

    def compile(self, lowered: jax.stages.Lowered) -> None:
        """Compiles, unless the run is asked to stop before that is done.

        JAX keeps what was compiled for the call that follows. A compilation that was given up goes
        on in its thread, since nothing can end it; see `still_compiling`.

        Args:
            lowered: to be compiled.
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
        """Compiles; afterwards, or as soon as one is asked to stop, all come to a point.

        Args:
            lowered: to be compiled.
            name: of what it computes.

        Returns:
            What ends the run in all processes, with the error of a compiler that fails here; None
            if it is compiled in all of them.
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
    """A jitted function that a run which is asked to stop leaves while it is compiled.

    Outside of a run it is the function alone. Of several processes all have to call it alike.

    Args:
        jitted: as of `jax.jit`.
        name: of what it computes, for the watchdog.
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
    """Whether a compilation that was given up goes on: the process ends only when that does."""
    return any(thread.name == _COMPILE_THREAD for thread in threading.enumerate())


class _Open(threading.local):
    def __init__(self) -> None:
        self.stack: list[GracefulStop] = []


_OPEN = _Open()


def stop_point(doing: str) -> None:
    """A point inside of long work between two steps, at which a run may stop; all processes come.

    Outside of a run it does nothing. An evaluation has one before each batch.

    Args:
        doing: what comes next, for the watchdog.

    Raises:
        StopRun: if the run stops. Let it through.
    """
    if _OPEN.stack:
        _OPEN.stack[-1].check(doing)


def compiled_unless_stopped(lowered: jax.stages.Lowered, name: str) -> bool:
    """Compiles what a run can do without; all processes come.

    Args:
        lowered: to be compiled.
        name: of what it computes, for the watchdog.

    Returns:
        Whether to go on with it; False if the run is asked to stop, which it does soon, or if
        another process cannot compile it.

    Raises:
        Exception: what the compiler raises in this process.
    """
    stop = _OPEN.stack[-1].compile_together(lowered, name) if _OPEN.stack else None
    if stop is not None and stop.error is not None:
        raise stop.error
    return stop is None


@contextlib.contextmanager
def getting_ready(doing: str) -> Iterator[None]:
    """As `GracefulStop.getting_ready` of the run that is open; outside of a run it does nothing.

    Args:
        doing: what is done while it is open, such as "restoring the checkpoint".

    Raises:
        ProcessesNotReadyError: if a process is late with it, by name.
    """
    with _OPEN.stack[-1].getting_ready(doing) if _OPEN.stack else contextlib.nullcontext():
        yield


def wait_for_all() -> None:
    """Before what waits for all processes without end or name; outside of a run it does nothing.

    Raises:
        ProcessesNotReadyError: if the run is `getting_ready`, and a process is late.
        ProcessLostError: if one is gone.
    """
    if _OPEN.stack:
        _OPEN.stack[-1].wait_for_all()


@contextlib.contextmanager
def batches_until_stopped(
    iterator: Any, stream: Callable[[Any], Iterable[Any]], name: str
) -> Iterator[Iterator[Any]]:
    """The batches of work inside of a step, such as an evaluation, with a `stop_point` before each.

    Within a run they are read ahead, so that a slow source delays no stop; of several processes all
    end with the first whose batches do.

    Args:
        iterator: the source; closed at the end if it can be.
        stream: from the source to the batches, one for each of its elements.
        name: of the work, for the watchdog.

    Yields:
        The batches.
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
    """A `GracefulStop` with lines to the other processes, those of this thread or new ones.

    An error that the end of another process has caused becomes one that names it.

    Args:
        report: told what the run does.
        readiness_timeout_seconds: how long to wait for the other processes.

    Raises:
        ProcessLostError: in place of errors that another process's end is behind.
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
            raise  # all processes come to the latter two alike
        except Exception as error:
            if companions is not None:
                companions.explain(error)
            raise
