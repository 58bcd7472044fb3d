import itertools

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config import config_for_function
from weft.errors import (
    InputDatasetError,
    InputDispatchError,
    InputReadError,
    RequiredFieldMissingError,
)
from weft.input.dispatch import InputDispatcher
from weft.input.grain import (
    DispatchConfig,
    Input,
    default_pad_example_fn,
    feed_batch_size,
    pad_for_evaluation,
    per_feed_batch,
    rekey,
    sample_from_datasets,
    shard_dataset,
    shard_dataset_with_proportion,
)


def numbers(n):
    return grain.MapDataset.range(n)


def rows_source(num_rows=40, global_batch_size=8, seed=3):
    """Returns a source as a user writes it."""

    def source(dispatch_config):
        ds = numbers(num_rows).seed(seed).shuffle().repeat(None)
        ds = shard_dataset(ds, dispatch_config).map(lambda i: {"id": np.int32(i)})
        return per_feed_batch(
            ds, global_batch_size=global_batch_size, dispatch_config=dispatch_config
        )

    return source


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


class TestInput:
    def make(self, **kwargs):
        return Input.default_config().set(name="input", **kwargs).instantiate(parent=None)

    def test_yields_batches_of_its_source_repeatably(self):
        cfg = config_for_function(rows_source).set(seed=1)
        first, second, other = (
            [b["id"].tolist() for b in take(iter(self.make(source=c).dataset()), 10)]
            for c in (cfg, cfg, cfg.clone(seed=2))
        )
        assert first == second
        assert first != other
        assert len(first[0]) == 8
        # Each pass has every row once, and passes differ.
        passes = [sorted(itertools.chain(*first[i : i + 5])) for i in (0, 5)]
        assert passes == [list(range(40))] * 2
        assert first[:5] != first[5:]

    def test_resumes_from_state(self):
        records = self.make(source=rows_source())
        it = iter(records.dataset())
        take(it, 7)
        state = it.get_state()
        assert state == {"next_index": 7}
        rest = [b["id"].tolist() for b in take(it, 5)]
        fresh = iter(records.dataset())
        fresh.set_state(state)
        assert [b["id"].tolist() for b in take(fresh, 5)] == rest
        it.close()
        fresh.close()

    def test_source_gets_dispatch_config(self):
        asked = []

        def source(dispatch_config):
            asked.append(dispatch_config)
            return numbers(4).map(lambda i: {"id": np.int32(i)}).batch(1)

        dispatcher = InputDispatcher.default_config().set(
            global_logical_batch_size=3, num_physical_feeds=4, physical_feed_index=2
        )
        spec = self.make(source=source, input_dispatcher=dispatcher).element_spec()
        assert spec == {"id": jax.ShapeDtypeStruct((1,), np.int32)}
        self.make(source=source).dataset()
        assert asked == [DispatchConfig(2, 3), DispatchConfig(0, 1)]

    def test_element_spec_reads_at_most_one_batch(self):
        read = []

        def source(dispatch_config):
            return numbers(100).map(lambda i: read.append(i) or {"id": np.int32(i)}).batch(2)

        spec = self.make(source=source).element_spec()
        assert spec == {"id": jax.ShapeDtypeStruct((2,), np.int32)}
        assert read == [0, 1]

    def test_source_is_required_and_readable(self):
        source = rows_source()
        assert self.make(source=source).source is source
        with pytest.raises(RequiredFieldMissingError, match="source"):
            self.make()

    def test_error_of_a_source_names_input_and_index(self):
        def fail(i):
            if i == 2:
                raise ValueError("record 2 of x.txt is torn")
            return {"id": np.int32(i)}

        records = self.make(source=lambda dispatch_config: numbers(4).map(fail).batch(1))
        it = iter(records.dataset())
        batches = records.batches(it)
        take(batches, 2)
        with pytest.raises(InputReadError, match=r"input: .*{'next_index': 2}.*record 2 of x.txt"):
            next(batches)
        it.close()


class TestSharding:
    @settings(deadline=None, max_examples=25)
    @given(st.integers(0, 30), st.integers(1, 5))
    def test_shards_are_disjoint_and_complete(self, n, num_shards):
        shards = [
            list(shard_dataset(numbers(n), DispatchConfig(i, num_shards)))
            for i in range(num_shards)
        ]
        assert sorted(itertools.chain(*shards)) == list(range(n))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1

    @pytest.mark.parametrize(("index", "num"), [(2, 2), (-1, 2), ((0, 1), (2,)), ((0, 3), (2, 3))])
    def test_invalid_index(self, index, num):
        with pytest.raises(InputDispatchError, match=r"shard_index=.* does not fit num_shards="):
            DispatchConfig(index, num)

    def test_iter_dataset_cannot_be_sharded(self):
        ds = numbers(4).to_iter_dataset()
        with pytest.raises(InputDatasetError, match=r"shard_dataset accesses .*before to_iter"):
            shard_dataset(ds, DispatchConfig(0, 1))
        with pytest.raises(InputDatasetError, match=r"shard_dataset_with_proportion accesses"):
            shard_dataset_with_proportion(ds, range_start=0, range_end=1, period=1)

    def test_batches_are_process_shards(self):
        part = DispatchConfig(1, 4)
        ds = per_feed_batch(
            numbers(7), global_batch_size=12, dispatch_config=part, drop_remainder=True
        )
        assert [b.tolist() for b in ds] == [[0, 1, 2], [3, 4, 5]]
        assert feed_batch_size(12, DispatchConfig((0, 0), (2, 3))) == 2
        with pytest.raises(InputDispatchError, match=r"=10 does not divide over 4 .* as 12"):
            per_feed_batch(numbers(7), global_batch_size=10, dispatch_config=part)


class TestBatches:
    @pytest.mark.parametrize("iterable", [False, True])
    @pytest.mark.parametrize(("n", "padded"), [(0, 0), (1, 4), (4, 4), (6, 8)])
    def test_padding_for_evaluation_keeps_every_example(self, iterable, n, padded):
        ds = numbers(n).map(lambda i: {"x": np.full(2, i + 1), "text": "t"})
        ds = ds.to_iter_dataset() if iterable else ds
        result = list(pad_for_evaluation(ds, per_feed_batch_size=4))
        assert len(result) == padded
        assert [int(e["x"][0]) for e in result] == [*range(1, n + 1), *[0] * (padded - n)]
        assert [e["text"] for e in result] == ["t"] * n + [""] * (padded - n)
        assert all(e["x"].shape == (2,) for e in result)

    @pytest.mark.parametrize("iterable", [False, True])
    def test_endless_evaluation_is_rejected(self, iterable):
        ds = numbers(3).repeat(None)
        ds = ds.to_iter_dataset(grain.ReadOptions(0, 0)) if iterable else ds
        with pytest.raises(InputDatasetError, match=r"over max_num_examples=5.*do not repeat it"):
            list(pad_for_evaluation(ds, per_feed_batch_size=2, max_num_examples=5))

    def test_default_padding_keeps_shapes_and_types(self):
        example = {"a": np.ones((2, 3), np.int16), "b": np.float32(3), "c": "x", "d": b"y"}
        padding = default_pad_example_fn(example)
        assert padding["a"].shape == (2, 3)
        assert padding["a"].dtype == np.int16
        assert (padding["a"] == 0).all()
        assert (padding["b"], padding["c"], padding["d"]) == (0, "", b"")


class TestRekey:
    def test_flat(self):
        ds = grain.MapDataset.source([{"a": 1, "b": 2}])
        assert rekey(ds, key_map={"x": "a", "y": None, "z": "gone"}, default_value=-1)[0] == {
            "x": 1,
            "y": -1,
            "z": -1,
        }
        assert rekey(ds, key_map={"x": "a"}, retain_original_inputs=True)[0] == {
            "a": 1,
            "b": 2,
            "x": 1,
        }

    def test_nested_keeps_the_original(self):
        original = {"q": {"text": "why", "n": 1}}
        ds = grain.MapDataset.source([original])
        result = rekey(
            ds,
            key_map={"q/ids": "q/text", "new": "q/text/no"},
            separator="/",
            retain_original_inputs=True,
        )
        assert list(result) == [{"q": {"text": "why", "n": 1, "ids": "why"}, "new": ""}]
        assert original == {"q": {"text": "why", "n": 1}}

    def test_iterable(self):
        ds = grain.MapDataset.source([{"a": 1}]).to_iter_dataset()
        assert list(rekey(ds, key_map={"b": "a"})) == [{"b": 1}]


class TestMixing:
    @pytest.mark.parametrize("iterable", [False, True])
    def test_infinite_mixture_follows_weights(self, iterable):
        sources = [numbers(3), numbers(5).map(lambda i: 10 + i)]
        if iterable:
            sources[1] = sources[1].to_iter_dataset()
        mixed = sample_from_datasets(sources=sources, weights=[1, 3])
        it = iter(mixed)
        result = take(it, 40)
        assert sum(x >= 10 for x in result) == 30
        assert [x for x in result if x < 10] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
        state = it.get_state()
        rest = take(it, 10)
        fresh = iter(mixed)
        fresh.set_state(state)
        assert take(fresh, 10) == rest
        it.close()
        fresh.close()

    def test_endless_sources_may_be_mixed(self):
        mixed = sample_from_datasets(sources=[numbers(2).repeat(None)] * 2, weights=[1, 1])
        assert [mixed[i] for i in range(8)] == [0, 0, 1, 1] * 2

    @pytest.mark.parametrize("weights", [[1], [1, 0], []])
    def test_invalid_weights(self, weights):
        with pytest.raises(InputDatasetError, match=r"2 sources cannot be mixed with weights="):
            sample_from_datasets(sources=[numbers(2)] * 2, weights=weights)
