import jax
import numpy as np
import pytest

from weft.trainer import exchanged_numbers
from weft.trainer.exchanged_numbers import LargestNumberLater, largest_number, number_of_first


def test_one_process_agrees_with_itself():
    later = LargestNumberLater()
    assert (number_of_first(3), largest_number(4), later(5), later(0)) == (3, 4, 5, 0)


@pytest.fixture
def two_processes(monkeypatch):
    """As the second of two processes sees it; the first always gives 7."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    utils = exchanged_numbers.multihost_utils
    monkeypatch.setattr(utils, "broadcast_one_to_all", lambda x: np.int32(7))
    monkeypatch.setattr(utils, "process_allgather", lambda x: np.array([7, x]))


def test_what_others_give_counts(two_processes):
    assert number_of_first(3) == 7
    assert (largest_number(3), largest_number(9)) == (7, 9)


def test_the_largest_comes_one_call_later(two_processes):
    # Here all devices are of this process, so it is the largest of its own.
    later = LargestNumberLater()
    assert [later(n) for n in (0, 1, 0, 5)] == [0, 0, 1, 0]
