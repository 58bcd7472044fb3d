import resource

import pytest

from weft.lifting.stack import with_room

CALLS = 2_000


def pages_in(fn):
    """How many pages of memory the process is given while `fn` runs."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fn()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def below(depth, fn):
    return fn() if depth == 0 else below(depth - 1, fn)


def many_calls():
    for _ in range(CALLS):
        below(3, int)


def test_no_depth_is_slow_with_room():
    # Where a piece of Python's stack is full, each call is given a new one, which is a new page.
    depths = range(200)
    without = [below(depth, lambda: pages_in(many_calls)) for depth in depths]
    with_it = [below(depth, lambda: with_room(pages_in, many_calls)) for depth in depths]
    assert max(without) >= CALLS, "Python has fixed this: weft.lifting.stack is no longer needed"
    assert max(with_it) < CALLS / 10


def test_arguments_results_and_errors_pass():
    assert with_room(lambda *args, **kwargs: (args, kwargs), 1, fn=2) == ((1,), {"fn": 2})
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 / 0)


def test_there_is_room_for_as_many_calls_as_python_allows():
    def inner():
        return below(900, lambda: pages_in(many_calls))

    assert with_room(inner) < CALLS / 10
