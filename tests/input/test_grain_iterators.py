import subprocess
import sys
import textwrap

import grain
import numpy as np
import pytest

from weft.errors import InputDatasetError
from weft.input.grain import (
    RaggedTensor,
    maybe_to_iter_dataset,
    pad_for_evaluation,
    prefetch_dataset,
    unbatch,
)


def numbers(n):
    return grain.MapDataset.range(n)


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


class TestUnbatch:
    def test_unbatch_takes_rows_apart_also_ragged_ones(self):
        batches = [
            {"x": np.arange(2), "r": RaggedTensor([np.ones(1), np.ones(3)])},
            {"x": np.arange(2, 3), "r": RaggedTensor([np.ones(2)])},
        ]
        rows = list(unbatch(grain.MapDataset.source(batches)))
        assert [int(r["x"]) for r in rows] == [0, 1, 2]
        assert [len(r["r"]) for r in rows] == [1, 3, 2]

    @pytest.mark.parametrize("consumed", range(8))
    def test_unbatch_goes_on_within_a_batch(self, consumed):
        ds = unbatch(numbers(7).batch(3))
        it = iter(ds)
        take(it, min(consumed, 7))
        if consumed > 7 - 1:
            assert next(it, None) is None
        state = it.get_state()
        fresh = iter(ds)
        fresh.set_state(state)
        assert list(fresh) == list(it) == list(range(consumed, 7))

    def test_empty_batches(self):
        batches = grain.MapDataset.source([np.arange(2), np.arange(0), np.arange(1)])
        assert [int(x) for x in unbatch(batches, skip_empty_batch=True)] == [0, 1, 0]
        with pytest.raises(InputDatasetError, match=r"{'next_index': 1} has no rows.*skip_empty"):
            list(unbatch(batches))

    def test_leaves_of_different_lengths(self):
        ds = grain.MapDataset.source([{"a": np.ones(2), "b": {"c": np.ones(3)}}])
        with pytest.raises(InputDatasetError, match=r"{'a': 2, 'b/c': 3} rows; all must"):
            list(unbatch(ds))


class TestPadding:
    @pytest.mark.parametrize("consumed", range(9))
    def test_padding_goes_on_where_it_was_saved(self, consumed):
        ds = pad_for_evaluation(
            numbers(6).map(lambda i: i + 1).to_iter_dataset(), per_feed_batch_size=4
        )
        it = iter(ds)
        take(it, consumed if consumed < 9 else 8)
        fresh = iter(ds)
        fresh.set_state(it.get_state())
        assert list(fresh) == list(it) == [1, 2, 3, 4, 5, 6, 0, 0][consumed:]


def double(i):
    return {"x": np.array([2 * i])}


class TestPrefetch:
    def test_without_workers_it_is_an_iterable(self):
        for options in (None, grain.MultiprocessingOptions(num_workers=0)):
            ds = prefetch_dataset(numbers(5), multiprocessing_options=options)
            assert isinstance(ds, grain.IterDataset)
            assert list(ds) == list(range(5))
        assert maybe_to_iter_dataset(ds) is ds

    def test_workers_keep_order_and_state(self):
        # One test for all that needs processes, since they take seconds to start.
        plain = iter(prefetch_dataset(numbers(9).map(double)))
        take(plain, 3)
        options = grain.MultiprocessingOptions(num_workers=2)
        it = iter(prefetch_dataset(numbers(9).map(double), multiprocessing_options=options))
        # A state from an iterator without workers, and back.
        it.set_state(plain.get_state())
        assert [int(e["x"][0]) for e in take(it, 2)] == [6, 8]
        assert it.get_state() == {"next_index": 5}
        plain.set_state(it.get_state())
        assert [int(e["x"][0]) for e in it] == [int(e["x"][0]) for e in plain] == [10, 12, 14, 16]
        assert next(it, None) is None
        it.close()
        with pytest.raises(InputDatasetError, match=r"iterator is closed; create a new one"):
            next(it)

    @pytest.mark.long
    def test_workers_that_are_left_open_print_nothing_at_the_end(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(
            textwrap.dedent(
                """
                import grain
                from weft.input.grain import prefetch_dataset
                if __name__ == "__main__":
                    options = grain.MultiprocessingOptions(num_workers=1)
                    it = iter(prefetch_dataset(
                        grain.MapDataset.range(9), multiprocessing_options=options))
                    print(next(it))
                """
            )
        )
        done = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, timeout=120
        )
        assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)
