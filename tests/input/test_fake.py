import json

import jax
import numpy as np
import pytest

from weft.errors import InputDatasetError
from weft.input.dispatch import InputDispatcher
from weft.input.fake import (
    EmptyInput,
    FakeLmInput,
    FakeSeq2SeqInput,
    FakeSequenceClassificationInput,
    fake_classification_source,
    fake_classification_source_instruct_lm,
    fake_glue_source,
    fake_grain_source,
    fake_serialized_json_source,
    fake_source,
    fake_speech_source,
    fake_text2text_source,
    fake_text_source,
)
from weft.input.grain import DispatchConfig, Input

ALL = DispatchConfig(0, 1)


def make(klass, **kwargs):
    cfg = klass.default_config().set(
        name="fake", is_training=True, global_batch_size=4, source_length=8, max_token_id=50
    )
    return cfg.set(**kwargs).instantiate(parent=None)


def take(fake, n):
    it = iter(fake.dataset())
    return [b for _, b in zip(range(n), fake.batches(it), strict=False)]


def test_lm():
    fake = make(FakeLmInput)
    first, second = take(fake, 2)
    assert first["input_ids"].shape == first["target_labels"].shape == (4, 8)
    assert (first["input_ids"][:, 1:] == first["target_labels"][:, :-1]).all()
    assert first["target_num_bytes"].tolist() == [8] * 4
    assert 0 <= first["input_ids"].min() <= first["input_ids"].max() < 50
    assert (first["input_ids"] != second["input_ids"]).any()
    assert fake.element_spec()["input_ids"] == jax.ShapeDtypeStruct((4, 8), np.int32)


def test_seq2seq():
    (batch,) = take(make(FakeSeq2SeqInput, target_length=3), 1)
    shapes = jax.tree.map(np.shape, batch)
    assert shapes == {
        "source": {"input_ids": (4, 8)},
        "target": {"input_ids": (4, 3)},
        "target_labels": (4, 3),
    }
    assert (batch["target"]["input_ids"][:, 1:] == batch["target_labels"][:, :-1]).all()


def test_classification():
    (batch,) = take(make(FakeSequenceClassificationInput, num_labels=3, global_batch_size=64), 1)
    assert batch["input_ids"].shape == (64, 8)
    assert set(batch["target_labels"].tolist()) == {0, 1, 2}


def test_iterator_ends_and_resumes():
    fake = make(FakeLmInput, total_num_batches=3, is_training=False)
    batches = take(fake, 10)
    assert len(batches) == 3
    it = iter(fake.dataset())
    it.set_state({"next_index": 2})
    np.testing.assert_array_equal(next(it)["input_ids"], batches[2]["input_ids"])
    assert it.get_state() == {"next_index": 3}
    assert next(it, None) is None


def test_evaluation_must_end():
    with pytest.raises(InputDatasetError, match=r"fake: an evaluation must end.*total_num_batches"):
        make(FakeLmInput, is_training=False)


def test_processes_read_parts_of_a_global_batch():
    (whole,) = take(make(FakeLmInput), 1)
    dispatcher = InputDispatcher.default_config().set(
        global_logical_batch_size=4, num_physical_feeds=2, global_physical_batch_size=4
    )
    parts = [
        take(make(FakeLmInput, input_dispatcher=dispatcher.clone(physical_feed_index=i)), 1)[0]
        for i in range(2)
    ]
    for name in whole:
        together = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(together, whole[name])


def test_examples_are_repeated_and_sharded():
    source = fake_source(False, [1, 2, 3], repeat=2)
    assert list(source(ALL)) == [1, 2, 3, 1, 2, 3]
    assert [list(source(DispatchConfig(i, 2))) for i in range(2)] == [[1, 3, 2], [2, 1, 3]]


def test_training_shuffles_by_default():
    examples = list(range(20))
    shuffled = list(fake_source(True, examples)(ALL))
    assert shuffled != examples
    assert sorted(shuffled) == examples
    assert list(fake_source(True, examples, shuffle_buffer_size=0)(ALL)) == examples
    assert sorted(fake_grain_source(examples, shuffle_seed=1)) == examples


def test_speech_has_different_lengths():
    ds = fake_speech_source(is_training=False, max_len=9, num_examples=30)(ALL)
    lengths = {len(e["speech"]) for e in ds}
    assert len(ds) == 30
    assert lengths <= set(range(1, 10))
    assert len(lengths) > 3
    assert ds[0]["speech"].dtype == np.int16


def test_fake_source_feeds_the_grain_input():
    def source(dispatch_config):
        return fake_source(False, [{"x": np.arange(2)}] * 4)(dispatch_config).batch(4)

    fake = Input.default_config().set(name="fake", source=source).instantiate(parent=None)
    assert fake.element_spec()["x"].shape == (4, 2)


def test_spec_casts_and_checks():
    spec = {"x": jax.ShapeDtypeStruct((2,), np.float32)}
    (example,) = fake_source(False, [{"x": [1, 2]}], spec=spec)(ALL)
    assert example["x"].dtype == np.float32
    with pytest.raises(InputDatasetError, match=r"example 1: 'x' has shape \(3,\), the spec says"):
        fake_source(False, [{"x": [1, 2]}, {"x": [1, 2, 3]}], spec=spec)


def test_texts():
    assert list(fake_text_source(is_training=False, batch_size=3)(ALL)) == [
        {"text": f"eval text {i}"} for i in range(3)
    ]
    pairs = fake_text2text_source(is_training=True, source_key="a", shuffle_buffer_size=0)
    assert pairs(ALL)[1] == {"a": "train source 1", "target_text": "train target 1"}
    classes = fake_classification_source(is_training=False, classes=["cat", "dog"])
    assert [e["target_text"] for e in classes(ALL)] == ["cat", "dog"]
    instruct = fake_classification_source_instruct_lm(is_training=False)
    assert instruct(ALL)[1] == {"text": "eval question 1<eob>no<eoa>"}
    glue = fake_glue_source(
        input_key=("q", "a"), label_key="y", is_training=False, label_value=1, num_examples=3
    )
    assert len(glue(ALL)) == 3
    assert glue(ALL)[2] == {"q": "eval q 2", "a": "eval a 2", "y": 1}
    assert len(fake_glue_source(input_key="q", label_key="y", is_training=False)(ALL)) == 2


def test_json():
    examples = [{"a": [1, 2]}, "x"]
    assert [json.loads(e) for e in fake_serialized_json_source(examples)(ALL)] == examples


def test_empty():
    assert take(make(EmptyInput, total_num_batches=2), 5) == [{}, {}]
