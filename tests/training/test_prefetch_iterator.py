import threading

import pytest

from weft.errors import ArgumentValueError
from weft.training.prefetch_iterator import PrefetchIterator


def test_gives_what_the_iterator_gives():
    elements = PrefetchIterator(iter(range(5)), buffer_size=2)
    assert next(elements) == 0
    assert list(elements) == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(elements)


def test_reads_ahead():
    read = threading.Event()

    def source():
        yield 0
        read.set()
        yield 1

    with PrefetchIterator(source()) as elements:
        assert next(elements) == 0
        assert read.wait(10)


def test_an_error_is_raised_where_it_happened():
    def source():
        yield 0
        raise OSError("record 1 is broken")

    elements = PrefetchIterator(source())
    assert next(elements) == 0
    for _ in range(2):
        with pytest.raises(OSError, match="record 1 is broken"):
            next(elements)


def test_nothing_comes_after_close():
    elements = PrefetchIterator(range(5))
    assert next(elements) == 0
    elements.close()
    assert list(elements) == []


def test_an_empty_buffer_is_refused():
    with pytest.raises(ArgumentValueError, match="buffer_size=0: at least one"):
        PrefetchIterator([], buffer_size=0)
