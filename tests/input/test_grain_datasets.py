import subprocess
import sys
import textwrap

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InputDatasetError, InputReadError
from weft.input.grain import (
    RaggedTensor,
    array_record_dataset,
    maybe_to_iter_dataset,
    pad_for_evaluation,
    prefetch_dataset,
    shard_dataset_with_proportion,
    unbatch,
)


def numbers(n):
    return grain.MapDataset.range(n)


class TestProportions:
    @settings(deadline=None, max_examples=25)
    @given(st.data(), st.integers(0, 30), st.integers(1, 6))
    def test_proportions_take_a_range_of_each_period(self, data, n, period):
        start = data.draw(st.integers(0, period - 1))
        end = data.draw(st.integers(start + 1, period))
        ds = shard_dataset_with_proportion(
            numbers(n), range_start=start, range_end=end, period=period
        )
        assert list(ds) == [i for i in range(n) if start <= i % period < end]
        assert list(ds[1::2]) == list(ds)[1::2]

    def test_each_pass_is_reshuffled(self):
        ds = numbers(12).shuffle(seed=0)
        half = shard_dataset_with_proportion(ds, range_start=0, range_end=2, period=4).repeat(2)
        first, second = list(half)[:6], list(half)[6:]
        assert len(half) == 12
        assert first != second

    @pytest.mark.parametrize("bounds", [(0, 0, 2), (1, 3, 2), (-1, 1, 2)])
    def test_impossible_proportion(self, bounds):
        start, end, period = bounds
        with pytest.raises(InputDatasetError, match=rf"range {start} to {end} is empty or not"):
            shard_dataset_with_proportion(
                numbers(4), range_start=start, range_end=end, period=period
            )


class TestPadding:
    def test_custom_padding_and_slices(self):
        ds = pad_for_evaluation(numbers(3), per_feed_batch_size=4, pad_example_fn=lambda x: -1)
        assert list(ds) == [0, 1, 2, -1]
        assert list(ds[2:]) == [2, -1]
        assert list(ds.repeat(2)) == [0, 1, 2, -1] * 2


class TestArrayRecords:
    @pytest.fixture
    def paths(self, tmp_path):
        from array_record.python import array_record_module

        paths = []
        for name, records in {"a": [b"0", b"1", b"2"], "b": [b"3"]}.items():
            paths.append(str(tmp_path / f"{name}.array_record"))
            writer = array_record_module.ArrayRecordWriter(paths[-1], "group_size:1")
            for record in records:
                writer.write(record)
            writer.close()
        return paths

    def test_files_in_order(self, paths):
        ds = array_record_dataset(paths, seed=None)
        assert list(ds) == [b"0", b"1", b"2", b"3"]
        shuffled = [list(array_record_dataset(paths, seed=s).shuffle()) for s in (1, 1, 2)]
        assert shuffled[0] == shuffled[1]
        assert sorted(shuffled[2]) == list(ds)
        assert list(array_record_dataset(paths[1], seed=None)) == [b"3"]

    def test_missing_file_is_named(self, paths):
        with pytest.raises(InputReadError, match=r"cannot open .*gone\.array_record: \w+"):
            array_record_dataset([*paths, "gone.array_record"], seed=None)

    def test_broken_record_is_named(self, paths):
        class Torn(list):
            def __init__(self, path, *, fails_at):
                super().__init__(range(3))
                self.fails_at = fails_at

            def __getitem__(self, i):
                if i == self.fails_at:
                    raise OSError("checksum")
                return super().__getitem__(i)

        ds = array_record_dataset(["x", "y"], data_source_cls=Torn, seed=None, fails_at=1)
        assert (ds[0], ds[2], ds[3]) == (0, 2, 0)
        with pytest.raises(InputReadError, match=r"cannot read record 1 of y: OSError: checksum"):
            _ = ds[4]


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


class TestUnbatch:
    def test_unbatch_supports_ragged_rows(self):
        batches = [
            {"x": np.arange(2), "r": RaggedTensor([np.ones(1), np.ones(3)])},
            {"x": np.arange(2, 3), "r": RaggedTensor([np.ones(2)])},
        ]
        rows = list(unbatch(grain.MapDataset.source(batches)))
        assert [int(r["x"]) for r in rows] == [0, 1, 2]
        assert [len(r["r"]) for r in rows] == [1, 3, 2]

    @pytest.mark.parametrize("consumed", range(8))
    def test_unbatch_resumes_within_batch(self, consumed):
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


class TestIterPadding:
    @pytest.mark.parametrize("consumed", range(9))
    def test_padding_resumes(self, consumed):
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
    def test_no_workers_give_an_iterable(self):
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
    def test_unclosed_workers_exit_silently(self, tmp_path):
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
            ),
            encoding="utf-8",
        )
        done = subprocess.run(
            [sys.executable, str(program)], capture_output=True, encoding="utf-8", timeout=120
        )
        assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)
