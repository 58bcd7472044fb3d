import json

import grain
import numpy as np
import pytest

from weft.config import config_class, config_for_function
from weft.errors import InputDatasetError
from weft.hierarchy.module import nowrap
from weft.input import Input, InputDispatcher, PrefetchingIterator
from weft.input.composite import ConcatenatedInput, ZipInput
from weft.input.fake import FakeLmInput
from weft.input.grain import Input as GrainInput
from weft.input.grain import per_feed_batch, shard_dataset


def rows_source(start, stop, global_batch_size=2):
    def source(dispatch_config):
        ds = shard_dataset(grain.MapDataset.range(start, stop), dispatch_config)
        ds = ds.map(lambda i: {"x": np.int32(i)})
        return per_feed_batch(
            ds, global_batch_size=global_batch_size, dispatch_config=dispatch_config
        )

    return source


def rows(start, stop, **kwargs):
    source = config_for_function(rows_source).set(start=start, stop=stop, **kwargs)
    return GrainInput.default_config().set(source=source)


def concatenated(**kwargs):
    cfg = ConcatenatedInput.default_config().set(name="input", is_training=True)
    cfg.set(**({"inputs": [rows(0, 4), rows(10, 14)]} | kwargs))
    return cfg.instantiate(parent=None)


def zipped(**kwargs):
    cfg = ZipInput.default_config().set(name="input", is_training=True)
    cfg.set(**({"inputs": {"a": rows(0, 8), "b": rows(10, 14)}} | kwargs))
    return cfg.instantiate(parent=None)


def listed(batches):
    return [
        {k: v["x"].tolist() for k, v in b.items()} if "a" in b else b["x"].tolist() for b in batches
    ]


CONCATENATED = [[0, 1], [2, 3], [10, 11], [12, 13]]
ZIPPED = [{"a": [0, 1], "b": [10, 11]}, {"a": [2, 3], "b": [12, 13]}]


@pytest.mark.parametrize(
    ("make", "want"), [(concatenated, CONCATENATED), (zipped, ZIPPED)], ids=["concat", "zip"]
)
def test_batches_and_saved_positions(make, want):
    input_ = make()
    assert listed(input_.batches(input_.dataset())) == want
    for consumed in range(len(want) + 1):
        it = iter(input_.dataset())
        with PrefetchingIterator(it, stream=input_.batches) as batches:
            assert listed(next(batches) for _ in range(consumed)) == want[:consumed]
            state = json.loads(json.dumps(batches.get_state()))
        other = iter(input_.dataset())
        other.set_state(state)
        assert listed(other) == want[consumed:]


def test_batches_of_all_are_dispatched_together():
    dispatcher = InputDispatcher.default_config().set(
        global_logical_batch_size=2, num_physical_feeds=4, physical_feed_index=1
    )
    # The second of four feeds, two of them reading.
    input_ = concatenated(input_dispatcher=dispatcher)
    batches = list(input_.batches(input_.dataset()))
    # Each feed has some devices; one of them reads.
    assert [b["x"].tolist()[0] for b in batches] == [1, 3, 11, 13]
    assert {b["x"].shape for b in batches} == {(input_.dispatcher.feed_physical_batch_size,)}
    with pytest.raises(InputDatasetError, match=r"'b' has an input_dispatcher.*set it in ZipInput"):
        zipped(inputs={"a": rows(0, 2), "b": rows(0, 2).set(input_dispatcher=dispatcher)})


def test_unsavable_parts():
    class Counting(Input):
        @config_class
        class Config(Input.Config):
            n: int = 2

        @nowrap
        def dataset(self):
            return ({"x": np.array([i])} for i in range(self.config.n))

    both = zipped(inputs={"a": Counting.default_config(), "b": rows(0, 8)})
    it = iter(both.dataset())
    assert not hasattr(it, "get_state")
    assert listed(both.batches(it)) == [{"a": [0], "b": [0, 1]}, {"a": [1], "b": [2, 3]}]
    it.close()


def test_no_inputs():
    for cls, none in ((ConcatenatedInput, []), (ZipInput, {})):
        cfg = cls.default_config().set(name="input", is_training=True, inputs=none)
        with pytest.raises(InputDatasetError, match=r"inputs is empty, so there are no batches"):
            cfg.instantiate(parent=None)


def test_is_training_is_inherited():
    fake = FakeLmInput.default_config().set(global_batch_size=2, total_num_batches=1)
    both = zipped(is_training=False, inputs={"a": fake, "b": rows(0, 2)})
    assert both.children["a"].config.is_training is False
