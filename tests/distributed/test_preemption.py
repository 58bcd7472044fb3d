import contextlib
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sockets import connected
from weft.distributed import peers as peers_lib
from weft.distributed import preemption, watchdog
from weft.distributed.peers import Peers, StopRequest
from weft.distributed.preemption import (
    GracefulStop,
    InterruptibleJit,
    StopRun,
    barrier_after,
    batches_until_stopped,
    broadcast_from_first,
    compile_unless_stopped,
    max_over_processes,
    still_compiling,
    stop_point,
)
from weft.errors import ProcessesNotReadyError
from weft.input import PrefetchingIterator


def test_signal_that_the_program_handles_is_left_to_it():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with GracefulStop() as stop:
            signal.raise_signal(signal.SIGUSR1)
            assert seen == [signal.SIGUSR1] and stop.signal_name is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_swallowed_interrupt_stops_the_run():
    with watchdog.interrupts:
        with contextlib.suppress(KeyboardInterrupt):  # as code that is imported may do
            signal.raise_signal(signal.SIGINT)
        with GracefulStop() as stop:
            assert stop.agreed("step 1") == ("signal", "SIGINT")
    with GracefulStop() as stop:
        assert stop.agreed("step 1") is None


@pytest.fixture
def handled():
    """Handles SIGHUP, which stays ignored where `nohup` runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_signal_is_recorded_and_handler_restored(number):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert stop.signal_name is None and not stop.stop_requested
        signal.raise_signal(number)
        assert stop.signal_name == number.name and stop.stop_requested
    assert signal.getsignal(number) is before


def test_sighup_ignored_by_nohup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal_name is None and not stop.stop_requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_ctrl_c_interrupts():
    with GracefulStop(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


class Busy:
    """Work that takes until it is released, or too long."""

    def __init__(self):
        self.done, self._released = False, threading.Event()

    def work(self):
        self._released.wait(timeout=30)
        self.done = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._released.set()


class Source:
    """Two numbers; then it is busy, and ends or fails."""

    def __init__(self, busy=None, error=None):
        self.n, self.busy, self.error = 0, busy, error

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 2:
            if self.busy:
                self.busy.work()
            raise self.error or StopIteration
        self.n += 1
        return self.n

    def get_state(self):
        return self.n

    def set_state(self, state):
        self.n = state


def next_batch(stop, batches):
    return stop.next_batch(batches, "a step")


def test_stop_while_waiting_for_input_takes_no_batch():
    busy = Busy()
    # Released first: an iterator waits for its source when it is closed.
    with PrefetchingIterator(Source(busy)) as batches, busy, GracefulStop() as stop:
        assert [next_batch(stop, batches) for _ in range(2)] == [1, 2]
        timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGTERM,))
        timer.start()
        with pytest.raises(StopRun) as stopped:
            next_batch(stop, batches)
        assert not busy.done
        assert stopped.value.request == ("signal", "SIGTERM") and stopped.value.error is None
        assert batches.get_state() == 2


def test_error_in_the_block_stops_the_run_and_takes_no_batch():
    with PrefetchingIterator(Source()) as batches, GracefulStop() as stop:
        with pytest.raises(StopRun) as stopped, stop.meet_with_batch(batches, "a step"):
            raise ZeroDivisionError
        assert isinstance(stopped.value.error, ZeroDivisionError)
        assert batches.get_state() == 0


def test_end_and_a_failure_of_the_input_stop_the_run():
    with PrefetchingIterator(Source()) as batches, GracefulStop() as stop:
        next_batch(stop, batches), next_batch(stop, batches)
        with pytest.raises(StopRun) as stopped:
            next_batch(stop, batches)
        assert stopped.value.request == ("end", "input ended")
    failure = OSError("a.txt, record 3")
    with PrefetchingIterator(Source(error=failure)) as batches, GracefulStop() as stop:
        next_batch(stop, batches), next_batch(stop, batches)
        with pytest.raises(StopRun) as stopped:
            next_batch(stop, batches)
        assert stopped.value.error is failure


def test_stop_point_only_acts_inside_a_run():
    stop_point("batch 1")
    told = []
    with GracefulStop(report=told.append):
        stop_point("batch 2")
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRun, match="SIGTERM"):
            stop_point("batch 3")
    assert told == ["batch 2", "batch 3"]


def test_nested_batches_end_fail_and_stop():
    def all_of(source):
        with batches_until_stopped(source, iter, "held_out") as batches:
            return list(batches)

    assert all_of(iter([1, 2])) == all_of(Source()) == [1, 2]
    told = []
    with GracefulStop(report=told.append) as stop:
        assert all_of(Source()) == [1, 2]
        assert told[:2] == ["waiting for batch 1 of held_out", "running batch 1 of held_out"]
        with pytest.raises(OSError, match=r"a\.txt"):
            all_of(Source(error=OSError("a.txt")))
        busy = Busy()

        def ask_to_stop():
            signal.raise_signal(signal.SIGTERM)
            while not stop.stop_requested:
                time.sleep(0.01)
            threading.Timer(0.3, busy.__exit__).start()  # a source that is closed is waited for

        threading.Timer(0.2, ask_to_stop).start()
        with pytest.raises(StopRun, match="SIGTERM"):
            all_of(Source(busy))


class Lowered:
    """A compilation that is busy for a while, or fails."""

    def __init__(self, busy=None, error=None):
        self.busy, self.error = busy, error

    def compile(self):
        if self.busy:
            self.busy.work()
        if self.error:
            raise self.error


def test_stop_abandons_a_compilation():
    with GracefulStop() as stop:
        with pytest.raises(ValueError, match="XLA"):
            stop.compile(Lowered(error=ValueError("XLA")))
        threading.Timer(0.1, signal.raise_signal, (signal.SIGTERM,)).start()
        with Busy() as busy:
            stop.compile(Lowered(busy))
            assert not busy.done and still_compiling()
    while still_compiling():
        time.sleep(0.05)


class Slow:
    """A jitted function that takes a while to compile."""

    def __init__(self, busy):
        self.lowered, self.busy = 0, busy

    def __call__(self, x):
        return 2 * x

    def lower(self, x):
        self.lowered += 1
        return Lowered(self.busy if x.ndim else None)


def test_stop_abandons_work_that_is_compiling():
    busy, told = Busy(), []
    slow = Slow(busy)
    double = InterruptibleJit(slow, "the loss of held_out")
    assert list(double(jnp.arange(2))) == [0, 2] and slow.lowered == 0  # outside of a run
    with GracefulStop(report=told.append):
        assert double(jnp.array(3)) == 6 and double(jnp.array(4)) == 8 and slow.lowered == 1
        assert told == ["compiling the loss of held_out", "computing the loss of held_out"]
        threading.Timer(0.1, signal.raise_signal, (signal.SIGTERM,)).start()
        with busy:
            with pytest.raises(StopRun, match="SIGTERM"):
                double(jnp.arange(2))  # of another shape
            assert not busy.done
    while still_compiling():
        time.sleep(0.05)


def test_compile_error_is_sent_to_other_processes():
    class OneOfTwo:
        def agree(self, request, **_):
            points.append(request())

        def is_stopping(self):
            return False

    points = []
    with GracefulStop() as stop:
        stop._peers = OneOfTwo()
        lowered = Lowered(error=ValueError("XLA"))
        ended = stop.compile_on_all(lowered, "the loss")
        assert ended.request.kind == "error" and str(ended.error) == "XLA"
        with pytest.raises(ValueError, match="XLA"):
            compile_unless_stopped(lowered, "the loss")
        stop._peers = None
    assert [(w.kind, w.text) for w in points] == [("error", "compiling the loss: XLA")] * 2


@pytest.fixture
def two(monkeypatch):
    """Yields the lines between two processes, both ends here."""
    monkeypatch.setattr(peers_lib, "_ACTIVITY_SECONDS", 0.1)
    here, there = connected()
    names = {i: f"process {i} of 2" for i in range(2)}
    ends = [Peers(0, {1: here}, names, end_seconds=1e6)]
    ends.append(Peers(1, {0: there}, names, end_seconds=1e6))
    yield ends
    leaving = [threading.Thread(target=peers.leave) for peers in ends]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()


def test_late_process_is_named_with_its_barrier(two, monkeypatch):
    told, restored = [], threading.Event()

    def the_other():
        with GracefulStop(two[1], patience_seconds=1.0), pytest.raises(ProcessesNotReadyError):
            with barrier_after("restoring"):
                pass
            with barrier_after("restoring"):
                restored.wait()

    thread = threading.Thread(target=the_other)
    thread.start()
    with GracefulStop(two[0], told.append, patience_seconds=1.0) as stop:
        stop.doing("preparing the state")
        with barrier_after("restoring"):
            assert two[0].doing == "restoring"
        assert two[0].doing == told[-1] == "preparing the state"
        monkeypatch.setattr(jax, "process_count", lambda: 2)  # where JAX would wait without end
        with (
            pytest.raises(ProcessesNotReadyError, match=r"1 s: process 1 of 2, which is restor"),
            barrier_after("restoring"),
        ):
            broadcast_from_first(3)
    assert "waiting for the other processes while restoring" in told
    restored.set()
    thread.join()


@pytest.fixture
def two_processes(monkeypatch):
    """Simulates the second of two processes; the first always returns 7."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    utils = preemption.multihost_utils
    monkeypatch.setattr(utils, "broadcast_one_to_all", lambda x: np.int32(7))
    monkeypatch.setattr(utils, "process_allgather", lambda x: np.array([7, x]))


def test_broadcast_and_max(two_processes):
    assert broadcast_from_first(3) == 7
    assert (max_over_processes(3), max_over_processes(9)) == (7, 9)


@pytest.fixture
def one_of_two():
    """Yields the stop of process 0, and the connections of process 1."""
    here, there = connected()
    first = Peers(0, {1: here}, {1: "process 1 of 2"}, end_seconds=1e6)
    second = Peers(1, {0: there}, {0: "process 0 of 2"}, end_seconds=1e6)
    with GracefulStop(first) as stop:
        yield stop, second
    closing = threading.Thread(target=second.leave)
    closing.start()
    first.leave()
    closing.join()


class Computing:
    """An array that the devices have not computed."""

    def is_ready(self):
        return False


def test_wait_for_the_devices_ends_by_a_signal(one_of_two):
    stop, other = one_of_two
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGTERM,))
    timer.start()
    stop.wait_until_computed(Computing())
    deadline = time.monotonic() + 10
    while not other.stops_soon and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other.begin_step(lambda: None) == ("signal", "SIGTERM")
    with PrefetchingIterator(Source(), buffer_size=3) as batches:
        with pytest.raises(StopRun) as stopped:
            next_batch(stop, batches)
        assert stopped.value.request == ("signal", "SIGTERM") and batches.get_state() == 0


def test_step_begins_with_the_batches_of_the_next_ones(one_of_two):
    stop, other = one_of_two
    busy = Busy()
    with PrefetchingIterator(Source(busy), buffer_size=3) as batches, busy:
        timer = threading.Timer(0.3, other.request_stop, (StopRequest("signal", "SIGTERM"),))
        timer.start()
        # It has two batches, waits for the third, and does not wait any longer for a stop.
        with pytest.raises(StopRun):
            next_batch(stop, batches)
        assert not busy.done and batches.get_state() == 0


def test_data_that_ends_stops_both_where_it_ends(one_of_two):
    stop, other = one_of_two
    failure = OSError("a.txt, record 3")
    with PrefetchingIterator(Source(error=failure), buffer_size=3) as batches:
        assert [next_batch(stop, batches) for _ in range(2)] == [1, 2]
        with pytest.raises(StopRun) as stopped:
            next_batch(stop, batches)
    assert stopped.value.error is failure
    steps = [other.begin_step(lambda: None) for _ in range(3)]
    assert steps[:2] == [None, None] and steps[2].kind == "error" and "record 3" in steps[2].text
