import grain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InputDatasetError, InputReadError
from weft.input.grain import array_record_dataset, pad_for_evaluation, shard_dataset_with_proportion


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

    def test_proportions_of_several_passes_are_shuffled_anew(self):
        ds = numbers(12).shuffle(seed=0)
        half = shard_dataset_with_proportion(ds, range_start=0, range_end=2, period=4).repeat(2)
        first, second = list(half)[:6], list(half)[6:]
        assert len(half) == 12
        assert first != second

    @pytest.mark.parametrize("bounds", [(0, 0, 2), (1, 3, 2), (-1, 1, 2)])
    def test_an_impossible_proportion(self, bounds):
        start, end, period = bounds
        with pytest.raises(InputDatasetError, match=rf"range {start} to {end} is empty or not"):
            shard_dataset_with_proportion(
                numbers(4), range_start=start, range_end=end, period=period
            )


class TestPadding:
    def test_own_padding_and_slices_of_it(self):
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

    def test_files_one_after_the_other(self, paths):
        ds = array_record_dataset(paths, seed=None)
        assert list(ds) == [b"0", b"1", b"2", b"3"]
        shuffled = [list(array_record_dataset(paths, seed=s).shuffle()) for s in (1, 1, 2)]
        assert shuffled[0] == shuffled[1]
        assert sorted(shuffled[2]) == list(ds)
        assert list(array_record_dataset(paths[1], seed=None)) == [b"3"]

    def test_a_missing_file_is_named(self, paths):
        with pytest.raises(InputReadError, match=r"cannot open .*gone\.array_record: \w+"):
            array_record_dataset([*paths, "gone.array_record"], seed=None)

    def test_a_broken_record_is_named(self, paths):
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
