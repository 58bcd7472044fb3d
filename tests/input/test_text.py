import json
import math

import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import EmptyCorpusError, InputDatasetError, InputDispatchError
from weft.input.baselines import ngram_baselines
from weft.input.corpus import Corpus, TextFile, stdlib_corpus
from weft.input.files import json_lines_dataset
from weft.input.grain import DispatchConfig, Input
from weft.input.prefetch import PrefetchingIterator
from weft.input.text import lm_documents_source, lm_text_source
from weft.input.tokenizer import ByteTokenizer

CORPUS = config_for_function(stdlib_corpus).set(pattern="[a-b]*.py")


def make(**kwargs):
    source = config_for_function(lm_text_source).set(
        corpus=CORPUS, split="train", sequence_length=64, global_batch_size=8, is_training=True
    )
    cfg = Input.default_config().set(name="input", source=source.set(**kwargs))
    return cfg.instantiate(parent=None)


def batches(source, n=None, part=None):
    it = iter(source(part or DispatchConfig(0, 1)))
    result = [batch for _, batch in zip(range(n or 10**6), it, strict=False)]
    it.close()
    return result


def ids(batches_):
    return [b["input_ids"].tolist() for b in batches_]


def test_batches_are_text_of_the_corpus():
    (batch,) = batches(make().source, 1)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        "input_ids": ((8, 64), np.int32),
        "target_labels": ((8, 64), np.int32),
        "target_num_bytes": ((8,), np.int32),
    }
    texts = [f.text for f in CORPUS.instantiate().split("train")]
    for row, labels in zip(batch["input_ids"], batch["target_labels"], strict=True):
        assert (row[1:] == labels[:-1]).all()
        if (row < 256).all():
            assert any(row.astype(np.uint8).tobytes() in text for text in texts)


def test_the_seed_decides_the_order():
    first, again, other = (ids(batches(make(seed=s).source, 20)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_each_pass_has_every_sequence_once_in_another_order():
    files = tuple(TextFile(f"{i + 3}.py", bytes([i]) * 63) for i in range(12))
    source = make(corpus=Corpus("twelve", files)).source
    rows = [row for b in batches(source, 3) for row in b["input_ids"][:, 1].tolist()]
    assert sorted(rows[:12]) == sorted(rows[12:]) == list(range(12))
    assert rows[:12] != rows[12:]


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("is_training", [True, False])
def test_global_batches_do_not_depend_on_the_number_of_processes(num_shards, is_training):
    source = make(is_training=is_training, max_examples=21).source
    whole = batches(source, 5)
    shards = [batches(source, 5, DispatchConfig(i, num_shards)) for i in range(num_shards)]
    assert {len(s) for s in shards} == {len(whole)}
    for k, want in enumerate(whole):
        for name in want:
            got = np.concatenate([s[k][name] for s in shards])
            np.testing.assert_array_equal(got, want[name])


def test_goes_on_bit_for_bit_where_it_was_saved_also_when_read_ahead():
    records = make(segments=True)
    with PrefetchingIterator(iter(records.dataset()), stream=records.batches) as it:
        for _ in range(7):
            next(it)
        state = json.loads(json.dumps(it.get_state()))
        assert state == {"next_index": 7}
        rest = [next(it) for _ in range(5)]
    fresh = iter(records.dataset())
    fresh.set_state(state)
    for want in rest:
        got = next(fresh)
        assert got.keys() == want.keys()
        for name in want:
            assert got[name].tobytes() == want[name].tobytes()
    fresh.close()


def test_workers_give_the_same_batches_and_states():
    kwargs = {"corpus": CORPUS.clone(pattern="json/*.py"), "global_batch_size": 4}
    alone = make(**kwargs)
    want = ids(batches(alone.source, 8))
    it = iter(make(num_workers=1, **kwargs).dataset())
    it.set_state({"next_index": 3})
    assert ids([next(it) for _ in range(3)]) == want[3:6]
    state = it.get_state()
    it.close()
    assert state == {"next_index": 6}
    it = iter(alone.dataset())
    it.set_state(state)
    assert ids([next(it), next(it)]) == want[6:8]
    it.close()


def test_evaluation_counts_every_held_out_byte_once():
    corpus = CORPUS.instantiate()
    records = make(split="held_out", is_training=False)
    found = batches(records.source)
    assert all(len(b["input_ids"]) == 8 for b in found)
    assert sum(int(b["target_num_bytes"].sum()) for b in found) == corpus.num_bytes("held_out")
    # A model that gives every target the unigram baseline's mean cost has its bits per byte.
    unigram = ngram_baselines(corpus)["unigram"]
    targets = sum(int((b["target_labels"] != ByteTokenizer.pad_id).sum()) for b in found)
    bits_per_byte = unigram.nats_per_token * targets / corpus.num_bytes("held_out") / math.log(2)
    assert bits_per_byte == pytest.approx(unigram.bits_per_byte, rel=1e-12)


def test_segments_are_optional():
    (batch,) = batches(make(segments=True).source, 1)
    assert batch["input_segment_ids"].shape == batch["input_positions"].shape == (8, 64)


def test_fields_are_set_by_path():
    cfg = Input.default_config().set(
        name="input",
        source=config_for_function(lm_text_source).set(
            split="train", sequence_length=16, global_batch_size=2, is_training=True
        ),
    )
    cfg.source.corpus.pattern = "json/*.py"
    (batch,) = batches(cfg.instantiate(parent=None).source, 1)
    assert batch["input_ids"].shape == (2, 16)


def test_too_little_text_for_one_batch():
    corpus = Corpus("short", (TextFile("3.py", b"x" * 200),))
    with pytest.raises(EmptyCorpusError, match=r"'train' part of .*'short'.* has 3 sequences"):
        make(corpus=corpus)


def test_a_batch_that_does_not_divide_over_the_processes():
    with pytest.raises(InputDispatchError, match=r"global_batch_size=8 does not divide over 3"):
        make().source(DispatchConfig(0, 3))


class TestDocuments:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name, letters in {"a": "abcd", "b": "vwxyz"}.items():
            lines = (json.dumps({"text": letter * 15, "body": "-" * 15}) for letter in letters)
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def make(self, **kwargs):
        documents = config_for_function(json_lines_dataset).set(paths="*.jsonl")
        kwargs = {"documents": documents, "sequence_length": 16, "global_batch_size": 4} | kwargs
        source = config_for_function(lm_documents_source).set(**kwargs)
        return Input.default_config().set(name="input", source=source).instantiate(parent=None)

    def letters(self, found):
        return [chr(row[1]) for b in found for row in b["input_ids"] if row[1] < 256]

    def test_records_of_files(self, folder):
        evaluation = self.make(is_training=False, segments=True)
        found = batches(evaluation.source)
        assert self.letters(found) == list("abcdvwxyz")
        assert [b["target_num_bytes"].sum() for b in found] == [60, 60, 15]
        assert {b["input_segment_ids"].shape for b in found} == {(4, 16)}
        training = batches(self.make(is_training=True).source, 9)
        rows = self.letters(training)
        assert sorted(rows[:9]) == sorted(rows[9:18]) == list("abcdvwxyz")
        other = batches(self.make(is_training=True, text_key="body").source, 1)
        assert set(self.letters(other)) == {"-"}

    def test_a_mixture_by_weights(self, folder):
        named = {
            name: config_for_function(json_lines_dataset).set(paths=f"{name}.jsonl")
            for name in "ab"
        }
        mixed = self.make(documents=named, weights={"b": 1.0, "a": 3.0}, is_training=True)
        rows = self.letters(batches(mixed.source, 8))
        assert sum(letter in "abcd" for letter in rows) == 24
        for weights in ({"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}):
            with pytest.raises(InputDatasetError, match=r"the documents are \['a', 'b'\]; pass"):
                self.make(documents=named, weights=weights, is_training=True)

    def test_too_few(self, folder):
        with pytest.raises(EmptyCorpusError, match=r"the text of documents has 9 sequences of 16"):
            self.make(is_training=True, global_batch_size=10)

    def test_a_tokenizer_decides_what_a_token_is_and_how_many_bytes_it_has(self, folder):
        class Threes:
            eos_id, pad_id, vocab_size = 0, 1, 200
            token_num_bytes = np.where(np.arange(200) > 1, 3, 0)

            def encode(self, text):
                return np.frombuffer(text.encode(), np.uint8)[::3].astype(np.int32)

        source = self.make(tokenizer=Threes(), is_training=False, sequence_length=6).source
        found = batches(source)
        assert [b["target_num_bytes"].sum() for b in found] == [60, 60, 15]
        assert found[0]["input_ids"][0].tolist() == [0, *[ord("a")] * 5]
