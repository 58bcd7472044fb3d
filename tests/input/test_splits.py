import json
import tracemalloc

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config import config_for_function
from weft.errors import InputDatasetError, InputReadError
from weft.input import Arrays, Corpus, TextFile, split, split_part, splits
from weft.input.datasets import json_lines_dataset
from weft.input.file_cache import tokenize_documents
from weft.input.grain import DispatchConfig, sample_from_datasets
from weft.input.text import lm_documents_source
from weft.input.tokenizers import ByteTokenizer


def records_of(num):
    return grain.MapDataset.source(list(range(num)))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 3))
def test_each_record_is_in_one_part(num, fraction, seed):
    train, held_out = split(list(range(num)), held_out=fraction, seed=seed)
    assert sorted(train + held_out) == list(range(num))
    assert train == sorted(train) and held_out == sorted(held_out)
    assert len(held_out) == min(max(1, round(num * fraction)), num - 1)
    # All kinds of data have the same parts.
    parts = split(records_of(num), held_out=fraction, seed=seed)
    assert [list(part) for part in parts] == [train, held_out]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 80), st.floats(0.01, 0.99), st.integers(0, 3))
def test_each_record_of_a_large_dataset_is_in_one_part(num, fraction, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "_MOST_CHOSEN", 1)
        parts = split(records_of(num), held_out=fraction, seed=seed)
        train, held_out = map(list, parts)
    assert sorted(train + held_out) == list(range(num))
    assert train == sorted(train) and held_out == sorted(held_out)
    assert len(held_out) == min(max(1, round(num * fraction)), num - 1)


def test_parts_of_a_hundred_million_records_take_no_memory():
    num = 10**8
    tracemalloc.start()
    train, held_out = split(grain.MapDataset.range(num), held_out=0.1)
    mixed = sample_from_datasets(
        sources=[train.seed(0).shuffle(), held_out.seed(1).shuffle()], weights=[0.9, 0.1]
    )
    mixed_records = [mixed[i] for i in range(0, num, num // 100)]
    of_held_out = {held_out[i] for i in range(1000)}
    of_train = {train[i] for i in range(9000)}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6
    assert len(train) == 9 * len(held_out) == 9 * 10**7
    assert of_train | of_held_out == set(range(10_000))
    # They are spread over all records, at random within their blocks.
    assert 0.4 < np.mean(mixed_records) / num < 0.6
    assert len({record % 10 for record in of_held_out}) == 10
    others = split_part(grain.MapDataset.range(num), "held_out", held_out=0.1, seed=1)
    assert len({others[i] for i in range(1000)} & of_held_out) < 200


# Whatever happened to the records before, as long as each is there once.
BEFORE = {
    "as they are": lambda ds: ds,
    "shuffled": lambda ds: ds.shuffle(seed=3),
    "mapped": lambda ds: ds.map(lambda x: x),
    "filtered": lambda ds: ds.filter(lambda x: x % 3 > 0),
    "sliced": lambda ds: ds.slice(slice(5, 95)),
    "in batches": lambda ds: ds.batch(2),
}


@pytest.mark.parametrize("before", BEFORE)
def test_shuffled_and_repeated_parts_have_no_record_in_common(before):
    train, held_out = split(BEFORE[before](records_of(100)), held_out=0.2)
    train = train.seed(7).shuffle().repeat(None)
    held_out = held_out.seed(7).shuffle().repeat(3)
    parts = [
        {int(x) for i in range(200) for x in np.atleast_1d(part[i]) if x is not None}
        for part in (train, held_out)
    ]
    assert parts[0] and parts[1]
    assert not parts[0] & parts[1]
    expected = {int(x) for one in BEFORE[before](records_of(100)) for x in np.atleast_1d(one)}
    assert parts[0] | parts[1] == expected


@pytest.mark.parametrize(
    ("repeated", "message"),
    [
        (lambda ds: ds.repeat(None), "is repeated, so both parts would have the same records"),
        (lambda ds: ds.seed(0).shuffle().repeat(2), "is repeated"),
        (lambda ds: ds.repeat(2).map(lambda x: x).batch(2), "is repeated"),
        (lambda ds: grain.MapDataset.concatenate([ds, ds.map(lambda x: x)]), "the records of"),
        (
            lambda ds: sample_from_datasets(sources=[ds, records_of(5)], weights=[1, 1]),
            "is repeated|has no end",
        ),
    ],
    ids=["endless", "twice", "before other functions", "concatenated", "mixed"],
)
def test_repeated_records_are_refused(repeated, message):
    with pytest.raises(InputDatasetError, match=rf"(?s){message}.*call split before `repeat`"):
        split(repeated(records_of(10)))


def test_rows_of_arrays():
    x, y = np.arange(20).reshape(10, 2), jnp.arange(10)
    for data in ((x, y), {"inputs": {"x": x}, "y": y}):
        train, held_out = split(data, held_out=0.3)
        assert type(train) is type(data)
        found = [part[1] if isinstance(part, tuple) else part["y"] for part in (train, held_out)]
        inputs = [
            part[0] if isinstance(part, tuple) else part["inputs"]["x"]
            for part in (train, held_out)
        ]
        assert sorted(np.concatenate(found).tolist()) == list(range(10))
        assert len(found[1]) == 3
        for rows, labels in zip(inputs, found, strict=True):
            assert (rows[:, 0] == 2 * labels).all()
    train, held_out = split(Arrays({"x": x, "y": np.arange(10)}), held_out=0.3)
    assert (train.num_rows, held_out.num_rows) == (7, 3)
    np.testing.assert_array_equal(held_out.value["y"], found[1])


def write_lines(path, num, bad=None):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(num)]
    if bad is not None:
        lines[bad] = '{"text": 1}'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_documents_of_files_in_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", 20)
    texts = []
    for part in ("train", "held_out"):
        documents = config_for_function(split_part).set(
            data=config_for_function(json_lines_dataset).set(paths="a.jsonl"), part=part
        )
        source = lm_documents_source(
            documents=documents, sequence_length=16, global_batch_size=1, is_training=False
        )
        rows = [batch["target_labels"][0] for batch in source(DispatchConfig(0, 1))]
        text = ByteTokenizer().decode(np.concatenate(rows)).split("document ")[1:]
        texts.append(set(text))
    assert texts[0] | texts[1] == {str(i) for i in range(20)}
    assert not texts[0] & texts[1]
    assert len(texts[1]) == 2
    # Parts of the same files have tokens of their own in a cache.
    train, held_out = split(json_lines_dataset("a.jsonl"))
    assert train.fingerprint != held_out.fingerprint
    assert train.fingerprint == split(json_lines_dataset("a.jsonl"))[0].fingerprint
    assert train.fingerprint != split(json_lines_dataset("a.jsonl"), seed=1)[0].fingerprint


def test_errors_name_the_record_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", 8, bad=3)
    faults = []
    for part in split(json_lines_dataset("a.jsonl").map(lambda x: x), held_out=0.5):
        try:
            tokenize_documents(part, ByteTokenizer())
        except InputReadError as error:
            faults.append(str(error))
    (fault,) = faults
    assert fault.startswith("line 4 of a.jsonl: 'text' of the record is of type int")


@pytest.mark.parametrize(
    ("data", "kwargs", "message"),
    [
        ([1, 2, 3], {"held_out": 0.0}, r"held_out=0.0 cannot be a fraction of the records"),
        ([1, 2, 3], {"held_out": 1}, r"held_out=1 cannot be a fraction"),
        ([1], {}, r"1 records cannot be split into two parts; expected at least 2"),
        (iter([1, 2]), {}, r"list_iterator has no random access.*hold out some files"),
        (records_of(3).to_iter_dataset(), {}, r"no random access"),
        ((np.ones(3), np.ones(2)), {}, r"shapes \[\(3,\), \(2,\)\] cannot be split; expected"),
        (Corpus("c", (TextFile("a", b"x"),)), {}, r"splits itself, by the names of its files"),
    ],
)
def test_what_cannot_be_split(data, kwargs, message):
    with pytest.raises(InputDatasetError, match=message):
        split(data, **kwargs)
    with pytest.raises(InputDatasetError, match="part='test'; expected 'train' or 'held_out'"):
        split_part(data, "test", **kwargs)
