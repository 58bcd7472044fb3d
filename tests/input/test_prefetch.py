import json
import threading
import time

import jax
import numpy as np
import pytest

from weft.input import host_to_global_device_array
from weft.input.prefetch import PrefetchingIterator


class Counter:
    """Yields 0, 1, ... below `stop`; knows how far it was read and whether it was closed."""

    def __init__(self, stop=10**9, fails_at=None):
        self.next_index, self.stop, self.fails_at, self.closed = 0, stop, fails_at, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_index == self.fails_at:
            raise OSError(f"record {self.next_index} is broken")
        if self.next_index >= self.stop:
            raise StopIteration
        self.next_index += 1
        return self.next_index - 1

    def get_state(self):
        return {"next_index": self.next_index}

    def set_state(self, state):
        self.next_index = state["next_index"]

    def close(self):
        self.closed = True


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_state_follows_consumed_batches():
    source = Counter()
    with PrefetchingIterator(source, buffer_size=3) as batches:
        assert batches.get_state() == {"next_index": 0}
        assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4]
        wait_for(lambda: source.next_index >= 8)
        state = json.loads(json.dumps(batches.get_state()))
        assert state == {"next_index": 5}
        rest = [next(batches) for _ in range(4)]
        batches.set_state(state)
        assert batches.get_state() == state
        assert [next(batches) for _ in range(4)] == rest
    with PrefetchingIterator(Counter()) as fresh:
        fresh.set_state(state)
        assert [next(fresh) for _ in range(4)] == rest


def test_reads_ahead_up_to_buffer_size():
    source = Counter()
    with PrefetchingIterator(source, buffer_size=2) as batches:
        next(batches)
        # Two wait, and one more is in the thread's hand.
        wait_for(lambda: source.next_index == 4)
        time.sleep(0.05)
        assert source.next_index == 4


def test_batches_are_prefetched_to_devices():
    mesh = jax.make_mesh((8,), ("data",))
    made = []

    def to_device(number):
        batch = host_to_global_device_array({"x": np.full(8, number)}, mesh=mesh)
        made.append(batch["x"])
        return batch

    with PrefetchingIterator(Counter(), stream=lambda it: map(to_device, it)) as batches:
        next(batches)
        # While the first is used, the next ones are brought to the devices.
        wait_for(lambda: len(made) == 4)
        wait_for(lambda: all(x.is_ready() for x in made))
        assert len(made[1].sharding.device_set) == 8
        assert next(batches)["x"] is made[1]


def test_stream_runs_in_thread_and_restarts_after_restore():
    threads = []

    def stream(it):
        threads.append(threading.current_thread())
        return (x * 10 for x in it)

    with PrefetchingIterator(Counter(), stream=stream) as batches:
        assert next(batches) == 0
        batches.set_state({"next_index": 7})
        assert next(batches) == 70
    assert len(threads) == 2
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_end_follows_last_batch_and_persists():
    with PrefetchingIterator(Counter(stop=3), buffer_size=2) as batches:
        assert list(batches) == [0, 1, 2]
        assert list(batches) == []
        assert batches.get_state() == {"next_index": 3}


def test_error_is_raised_in_order_and_persists():
    with PrefetchingIterator(Counter(fails_at=2), buffer_size=4) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="record 2 is broken"):
                next(batches)
        # The consumed position can still be saved.
        assert batches.get_state() == {"next_index": 2}


def test_close_ends_thread_and_source():
    before = threading.active_count()
    source = Counter()
    with PrefetchingIterator(source, buffer_size=1) as batches:
        next(batches)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert source.closed
    unread = Counter()
    PrefetchingIterator(unread).close()
    assert unread.closed
    assert unread.next_index == 0


class Held(Counter):
    """Gives an item only when it is let."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.let = threading.Semaphore(0)

    def __next__(self):
        self.let.acquire()
        return super().__next__()


def test_ready_and_peek_do_not_block():
    source = Held(stop=1)
    with PrefetchingIterator(source) as batches:
        # Also starts the reading, so nothing waits for ever.
        assert not batches.ready(timeout=0)
        assert not batches.ready(timeout=0.02)
        assert batches.get_state() == {"next_index": 0}
        source.let.release()
        assert batches.ready(timeout=10)
        assert batches.ready(timeout=0)
        assert next(batches) == 0
        assert not batches.ready(timeout=0)
        source.let.release()
        # The end is ready, too.
        assert batches.ready(timeout=10)
        assert list(batches) == []


def test_several_batches_and_the_end_are_ready():
    source = Held(stop=2)
    with PrefetchingIterator(source, buffer_size=3) as batches:
        assert batches.remaining() is None
        source.let.release()
        assert not batches.ready(timeout=0.1, count=2)
        source.let.release()
        assert batches.ready(timeout=10, count=2)
        assert batches.remaining() is None
        source.let.release()
        # There are no three.
        assert batches.ready(timeout=10, count=3)
        num_batches, error = batches.remaining()
        assert num_batches == 2 and isinstance(error, StopIteration)
        assert list(batches) == [0, 1]


def test_counts_waiting_seconds():
    source = Held()
    with PrefetchingIterator(source) as batches:
        batches.ready(timeout=0.05)
        waited = batches.wait_seconds
        assert waited >= 0.05
        timer = threading.Timer(0.05, source.let.release)
        timer.start()
        next(batches)
        timer.join()
        assert batches.wait_seconds >= waited + 0.04
        source.let.release()
