import threading

import pytest

from weft.errors import ArgumentValueError
from weft.training.common_utils import PrefetchIterator


def test_reads_ahead():
    read = threading.Event()

    def source():
        yield 0
        read.set()
        yield 1

    with PrefetchIterator(source()) as elements:
        assert next(elements) == 0
        assert read.wait(10)


def test_error_is_raised_in_order():
    def source():
        yield 0
        raise OSError("record 1 is broken")

    elements = PrefetchIterator(source())
    assert next(elements) == 0
    for _ in range(2):
        with pytest.raises(OSError, match="record 1 is broken"):
            next(elements)


def test_close_ends_iteration():
    elements = PrefetchIterator(range(5))
    assert next(elements) == 0
    elements.close()
    assert list(elements) == []


def test_empty_buffer_is_rejected():
    with pytest.raises(ArgumentValueError, match="buffer_size=0: at least one"):
        PrefetchIterator([], buffer_size=0)
