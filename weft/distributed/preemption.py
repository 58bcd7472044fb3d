"""Preemption: a graceful stop of a run by a signal, between two steps and after a checkpoint.

A signal may come while the step is compiled or runs, is evaluated or saved, or while the run waits
for input. A second thread does the work that would block the main thread in C++ for long, so that
the main thread notices signals.

All processes must stop after the same step: one that runs another step would wait for the others
forever. Before the first step, each batch of an evaluation, and the result of a compilation, they
meet at a point of agreement (`Peers.agree`). A process that waits for its input or its compiler
notices the request of another to stop and goes to the point.

The other steps cost no message. A step is computed by all together, so a process that begins it
only when the last but one is computed is at most two steps ahead of another; and one that holds the
batches of its next steps before it begins one can follow so far, even if its input hangs:

    process 0    has begun step 5    SIGTERM, asks all to stop      stops before step 6
    process 1    has begun step 3    waits for the batch of 6       begins 4 and 5, stops before 6

An input that ends or fails in one process is known two steps before, and stops all of them there.

A process that diverges leaves the others waiting in the next collective, so an observation of one
process (a full disk, a damaged file, its clock) is exchanged before any process acts on it, by
`broadcast_from_first`, `max_over_processes` or `DelayedMax`.
"""

import contextlib
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.core.tracing import ThreadStack
from weft.distributed import rendezvous, watchdog
from weft.distributed.peers import Peers, StopRequest, current_peers, use_peers
from weft.errors import (
    LossSpikeError,
    ProcessesDifferError,
    ProcessLostError,
    UndefinedLossException,
    describe_error,
)
from weft.input import PrefetchingIterator
from weft.typing import PyTree

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_SHORTEST_PAUSE_SECONDS = 5e-5
# A process begins a step when it has its batch and those of the two steps that others may have
# begun before it: so it can reach the step before which all stop, even if its input hangs.
BATCHES_AHEAD = 3
_COMPILE_THREAD = "weft-compile"


class StopRun(BaseException):
    """Ends the steps of a run; all processes raise it at the same point.

    It is not an Exception, so that error handling does not catch it. `request` is the reason, and
    `error` the error that this process raises after it has saved, if any.
    """

    def __init__(self, request: StopRequest, error: Exception | None = None):
        super().__init__(request.text)
        self.request = request
        self.error = error


def _request_for(error: BaseException) -> StopRequest:
    """Returns the request of a process whose data has ended, or that has failed."""
    if isinstance(error, StopIteration):
        return StopRequest("end", "input ended")
    return StopRequest(
        "error",
        f"process {jax.process_index()} of {jax.process_count()} has failed: "
        f"{describe_error(error)}",
    )


def _end_of_run(stop: StopRequest, error: BaseException | None) -> StopRun:
    """Returns what a process raises at an agreed stop; `error` is its own, if it has one."""
    if stop.kind != "error":
        return StopRun(stop)
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        error = ProcessLostError(
            f"{stop.text.rstrip('.')}. The training up to this point is saved."
        )
    return StopRun(stop, error)


class GracefulStop:
    """Context in which signals stop the run instead of ending the process.

    These are SIGTERM and Ctrl-C; SIGHUP, which a closed terminal sends, SIGUSR1 and SIGUSR2, unless
    they are ignored, as under `nohup`, or the program handles them. A second Ctrl-C raises
    KeyboardInterrupt; one that was swallowed earlier, during an import, counts here. Only the main
    thread can handle signals; others change nothing.

    Args:
        peers: the connections to the other processes; None for a single process.
        report: called with the current activity, and repeatedly while waiting for others.
        patience_seconds: how much longer than others a process may take to restore or to compile.

    >>> with GracefulStop() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.signal_name, stop.agreed("running").text
    ('SIGTERM', 'SIGTERM')
    """

    def __init__(
        self,
        peers: Peers | None = None,
        report: Callable[[str], None] = lambda doing: None,
        patience_seconds: float | None = None,
    ) -> None:
        self.signal_name: str | None = None
        self._peers = peers
        self._report = report
        self._patience_seconds = patience_seconds
        self._barrier_seconds: float | None = (
            None  # how long a barrier waits, None for no limit
        )
        self._activity = "starting"
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "GracefulStop":
        def on_signal(number: signal.Signals) -> None:
            if self.signal_name is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal_name = number.name

        if watchdog.interrupts.came:
            self.signal_name = signal.SIGINT.name
        numbers = self._exit.enter_context(
            watchdog.handle_stop_signals(on_signal)
        )
        if self._peers is not None:
            peers = self._peers

            def ask_others(number: int) -> None:
                # The main thread may wait in C++ for a process that this request makes go on.
                if number in numbers:
                    name = signal.Signals(number).name
                    peers.request_stop(StopRequest("signal", name))

            self._exit.enter_context(watchdog.notice_signals(ask_others))
        self._exit.enter_context(_ACTIVE.push(self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exit.close()

    # Agreeing.

    @property
    def has_peers(self) -> bool:
        """True if the run has other processes."""
        return self._peers is not None

    @property
    def waits_for_others(self) -> bool:
        """True if another process has not begun the last step that this one has begun."""
        return self._peers is not None and self._peers.is_ahead

    def from_first(self, data: bytes) -> bytes:
        """Returns the bytes that process 0 has passed; all processes must call it equally often.

        Raises ProcessLostError if one is gone.
        """
        if self._peers is None:
            return data
        return self._peers.from_first(
            data, lambda: self._report("waiting for what process 0 has")
        )

    def doing(self, activity: str) -> None:
        """Announces the current activity to the watchdog and the other processes."""
        self._activity = activity
        if self._peers is not None:
            self._peers.doing = activity
        self._report(activity)

    @property
    def stop_requested(self) -> bool:
        """True if a process requests a stop or is gone, so that the next point should come soon."""
        if self._peers is None:
            return self.signal_name is not None
        self._peers.check()
        return self.signal_name is not None or self._peers.requested is not None

    def agreed(
        self,
        doing: str,
        own_request: StopRequest | None = None,
        *,
        within_seconds: float | None = None,
        starts_run: bool = False,
    ) -> StopRequest | None:
        """Returns why all processes stop here, or None. All must call it equally often.

        Args:
            doing: the next activity.
            own_request: why this process requests to stop; it takes precedence over a signal.
            within_seconds: how long the first process waits here for the last.
            starts_run: whether a run begins here, so that stops of an earlier one no longer count.

        Raises:
            ProcessesNotReadyError: if some do not arrive in time.
            ProcessLostError: if one is gone.
        """
        if self._peers is None:
            self.doing(doing)
            return self._request(own_request)
        stop = self._peers.agree(
            lambda: self._request(own_request),
            within_seconds=within_seconds,
            starts_run=starts_run,
            alive=lambda: self._report(
                f"waiting for the other processes before {doing}"
            ),
        )
        self.doing(doing)
        return stop

    def _request(self, own_request: StopRequest | None) -> StopRequest | None:
        if own_request is None and self.signal_name is not None:
            return StopRequest("signal", self.signal_name)
        return own_request

    def check(self, doing: str) -> None:
        """Raises StopRun if any process requests to stop; all processes must call it."""
        stop = self.agreed(doing)
        if stop is not None:
            raise StopRun(stop)

    @contextlib.contextmanager
    def barrier_after(self, doing: str) -> Iterator[None]:
        """Runs a block that all processes must complete before any of them continues.

        Raises:
            ProcessesNotReadyError: if one takes longer than another by more than the patience.
            ProcessLostError: if one is gone.
        """
        outer_activity, outer_limit = self._activity, self._barrier_seconds
        self.doing(doing)
        self._barrier_seconds = self._patience_seconds
        try:
            yield
            self.barrier()
        finally:
            self._barrier_seconds = outer_limit
        self.doing(outer_activity)

    def barrier(self) -> None:
        """Waits for all processes; within `barrier_after`, no longer than its patience."""
        if self._peers is None:
            return
        activity = f"waiting for the other processes while {self._activity}"
        self._peers.agree(
            None,
            within_seconds=self._barrier_seconds,
            alive=lambda: self._report(activity),
        )
        self._report(self._activity)

    # Waiting.

    @contextlib.contextmanager
    def meet_with_batch(
        self,
        batches: PrefetchingIterator,
        doing: str,
        *,
        own_request: StopRequest | None = None,
        within_seconds: float | None = None,
        num_batches: int = 1,
    ) -> Iterator[PyTree]:
        """Yields the batch that is next; after the block, all processes agree on using theirs.

        If they stop, or one fails in its block, all raise StopRun. With a request to stop of its
        own, this process does not wait for its batch.

        Args:
            num_batches: how many batches to wait for, unless there are no more.
        """
        error: Exception | None = None
        is_ready = False
        while own_request is None:
            is_ready = batches.ready(_POLL_SECONDS, num_batches)
            if is_ready or self.stop_requested:
                break
        if is_ready:
            try:
                yield batches.peek()
            except Exception as raised:
                error = raised
                own_request = _request_for(raised)
        if num_batches > 1:
            self._announce_end(batches)
        stop = self.agreed(doing, own_request, within_seconds=within_seconds)
        if stop is not None:
            raise _end_of_run(stop, error)

    def next_batch(
        self,
        batches: PrefetchingIterator,
        doing: str,
        own_request: StopRequest | None = None,
    ) -> PyTree:
        """Returns the batch of the next step of training.

        It waits for other processes only if one requests to stop: then all raise StopRun before
        the same step.
        """
        while own_request is None and not self._stops_soon:
            if batches.ready(_POLL_SECONDS, self.num_batches):
                break
        end = batches.remaining()
        error = end[1] if end is not None and end[0] == 0 else None
        if self._peers is None:
            stop = self._request(own_request)
            if stop is None and error is not None:
                stop = _request_for(error)
        else:
            self._announce_end(batches)
            stop = self._peers.begin_step(
                lambda: self._request(own_request),
                lambda: self._report(
                    f"waiting for the other processes before {doing}"
                ),
            )
        self.doing(doing)
        if stop is None:
            return next(batches)
        raise _end_of_run(stop, error)

    @property
    def num_batches(self) -> int:
        """The number of batches that a process needs before it begins a step."""
        return 1 if self._peers is None else BATCHES_AHEAD

    @property
    def _stops_soon(self) -> bool:
        """True if this process should not wait for more than the batch of the next step."""
        if self.stop_requested:
            return True
        return self._peers is not None and self._peers.stops_soon

    def _announce_end(self, batches: PrefetchingIterator) -> None:
        """Tells the other processes before which step the data of this one ends, if it is near."""
        end = batches.remaining()
        if self._peers is None or end is None or end[0] >= BATCHES_AHEAD:
            return
        num_batches, error = end
        self._peers.request_stop(
            _request_for(error), before=self._peers.next_step + num_batches
        )

    def wait_until_computed(self, array: jax.Array) -> None:
        """Waits for the devices, unless a process requests to stop; alone, it does not wait.

        Unlike the wait of JAX, it ends with an error if another process is gone.
        """
        if self._peers is None:
            return
        pause = _SHORTEST_PAUSE_SECONDS
        while not (array.is_ready() or self._peers.stops_soon):  # pyright: ignore[reportAttributeAccessIssue]
            self._peers.check()
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS / 10)

    def compile(self, lowered: jax.stages.Lowered) -> None:
        """Compiles a program, unless a process requests to stop before it is done.

        JAX caches the result for the later call. An abandoned compilation cannot be ended and
        continues in its thread; see `still_compiling`.
        """
        executor = futures.ThreadPoolExecutor(
            1, thread_name_prefix=_COMPILE_THREAD
        )
        compiled = executor.submit(lowered.compile)
        executor.shutdown(wait=False)
        while not futures.wait([compiled], _POLL_SECONDS).done:
            if self.stop_requested:
                return
        compiled.result()

    def compile_on_all(
        self, lowered: jax.stages.Lowered, name: str
    ) -> StopRun | None:
        """Compiles a program; all processes meet afterwards, or as soon as one requests to stop.

        Returns None if all have compiled it, else the end of the run in all processes, with the
        compiler's error if it fails here.
        """
        self.doing(f"compiling {name}")
        failure: Exception | None = None
        own_request: StopRequest | None = None
        try:
            self.compile(lowered)
        except Exception as error:
            failure, own_request = (
                error,
                StopRequest("error", f"compiling {name}: {error}"),
            )
        agreed_request = self.agreed(
            f"computing {name}",
            own_request,
            within_seconds=self._patience_seconds,
        )
        request = agreed_request or own_request
        return None if request is None else StopRun(request, failure)


class InterruptibleJit:
    """Jitted function whose compilation a request to stop the run interrupts.

    Outside a run it is only the function. All processes must make the same calls. `name` is the
    name of its result, for the watchdog.
    """

    def __init__(self, jitted: jax.stages.Wrapped, name: str):
        self._jitted, self._name = jitted, name
        self._compiled: set[tuple] = set()

    def __call__(self, *args: PyTree) -> Any:
        stop = _ACTIVE.top
        if stop is not None:
            leaves, structure = jax.tree.flatten(args)
            types = tuple(
                (jax.typeof(x), getattr(x, "sharding", None)) for x in leaves
            )
            if (structure, types) not in self._compiled:
                end_of_run = stop.compile_on_all(
                    self._jitted.lower(*args), self._name
                )
                if end_of_run is not None:
                    raise end_of_run
                self._compiled.add((structure, types))
        return self._jitted(*args)


def still_compiling() -> bool:
    """Returns whether an abandoned compilation is running, which delays the end of the process."""
    return any(
        thread.name.startswith(_COMPILE_THREAD)
        for thread in threading.enumerate()
    )


_ACTIVE = ThreadStack[GracefulStop]()


def _current() -> GracefulStop:
    """Returns that of the current run, or one that changes nothing."""
    return _ACTIVE.top or GracefulStop()


def stop_point(doing: str) -> None:
    """Raises StopRun if the run should stop, at a point in long work that all processes reach.

    Do not catch it. Outside a run it does nothing. Evaluations have such a point before each batch.
    """
    _current().check(doing)


def compile_unless_stopped(lowered: jax.stages.Lowered, name: str) -> bool:
    """Compiles an optional program in all processes; returns whether to use it.

    It returns False if the run is about to stop, or if another process cannot compile it, and
    raises the compiler's error in this process.
    """
    if _ACTIVE.top is None:
        return True
    end_of_run = _ACTIVE.top.compile_on_all(lowered, name)
    if end_of_run is not None and end_of_run.error is not None:
        raise end_of_run.error
    return end_of_run is None


def barrier_after(doing: str) -> contextlib.AbstractContextManager[None]:
    """Applies `GracefulStop.barrier_after` of the current run, if there is one."""
    return _current().barrier_after(doing)


def barrier() -> None:
    """Waits for all processes of a run, before work that would hang without one of them."""
    _current().barrier()


@contextlib.contextmanager
def batches_until_stopped(
    iterator: Any, stream: Callable[[Any], Iterable[Any]], name: str
) -> Iterator[Iterator[Any]]:
    """Yields the batches of work within a step, such as an evaluation, with a `stop_point` each.

    In a run, `stream`'s batches of the source `iterator` are prefetched, so that a slow source does
    not delay a stop; all processes end with the first whose batches end. The source is closed.
    """
    if _ACTIVE.top is not None and hasattr(iterator, "get_state"):
        with PrefetchingIterator(iterator, stream=stream) as batches:
            yield _until_stopped(_ACTIVE.top, batches, name)
        return
    try:
        yield iter(stream(iterator))
    finally:
        getattr(iterator, "close", lambda: None)()


def _until_stopped(
    stop: GracefulStop, batches: PrefetchingIterator, name: str
) -> Iterator[PyTree]:
    for number in itertools.count(1):
        stop.doing(f"waiting for batch {number} of {name}")
        try:
            with stop.meet_with_batch(
                batches, f"running batch {number} of {name}"
            ):
                pass
        except StopRun as end_of_run:
            if end_of_run.error is not None:
                raise end_of_run.error from None
            if end_of_run.request.kind == "end":
                return
            raise
        yield next(batches)


@contextlib.contextmanager
def graceful_stop(
    report: Callable[[str], None], readiness_timeout_seconds: float
) -> Iterator[GracefulStop]:
    """Opens a `GracefulStop` with this thread's connections to other processes, or new ones.

    An error caused by the end of another process becomes a ProcessLostError that names it.
    """
    with contextlib.ExitStack() as stack:
        peers = current_peers()
        if peers is None:
            peers = rendezvous.connect_peers(readiness_timeout_seconds)
            if peers is not None:
                stack.enter_context(use_peers(peers))
        try:
            yield stack.enter_context(
                GracefulStop(peers, report, readiness_timeout_seconds)
            )
        except (
            ProcessLostError,
            ProcessesDifferError,
            UndefinedLossException,
            LossSpikeError,
        ):
            raise  # all processes raise the latter three together
        except Exception as error:
            if peers is not None:
                peers.raise_cause(error)
            raise


# Exchange of numbers. All processes must call these at the same points; with one process they cost
# nothing. In a run, they wait first where a late process is named, and then in a collective.


def broadcast_from_first(number: int) -> int:
    """Returns process 0's number, an int32."""
    if jax.process_count() == 1:
        return number
    barrier()
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def each_of_first(numbers: Iterable[int]) -> Iterator[int]:
    """Yields process 0's numbers, int32 from 0 on, in all processes."""
    remaining_numbers = iter(numbers)
    while True:
        # Processes exchange one number at a time, and do not know how many there are.
        number = broadcast_from_first(next(remaining_numbers, -1))
        if number == -1:
            return
        yield number


def max_over_processes(number: int) -> int:
    """Returns the largest of all processes' numbers, which are int32."""
    if jax.process_count() == 1:
        return number
    barrier()
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


class DelayedMax:
    """Largest number of all processes, one call late, so that no step waits for it."""

    def __init__(self) -> None:
        self._pending: jax.Array | None = None  # result of the previous call

    def __call__(self, number: int) -> int:
        """Sends this process's int32 to the others; returns the largest of the previous call.

        The first call returns 0; with one process, each call returns `number`.
        """
        if jax.process_count() == 1:
            return number
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        by_device = NamedSharding(mesh, PartitionSpec("devices"))
        replicated = NamedSharding(mesh, PartitionSpec())
        # Each device holds the number of its process.
        local_numbers = np.full(len(jax.local_devices()), number, np.int32)
        all_numbers = jax.make_array_from_process_local_data(
            by_device, local_numbers
        )
        # JAX caches the compiled reduction by the function and its sharding.
        largest = jax.jit(jnp.max, out_shardings=replicated)
        previous, self._pending = self._pending, largest(all_numbers)
        return 0 if previous is None else int(previous)
