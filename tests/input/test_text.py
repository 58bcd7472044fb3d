import json
import math
import os

import grain
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import EmptyCorpusError, InputDatasetError, InputDispatchError, InputReadError
from weft.input import file_cache
from weft.input.corpus import Corpus, TextFile, ngram_baselines, stdlib_corpus
from weft.input.datasets import json_lines_dataset
from weft.input.grain import DispatchConfig, Input
from weft.input.packing import PackedSequences, token_stream
from weft.input.prefetch import PrefetchingIterator
from weft.input.text import lm_documents_source, lm_stream_source, lm_text_source, sequence_batches
from weft.input.tokenizers import ByteTokenizer

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
        "live_targets": ((8, 64), bool),
        "target_num_bytes": ((8,), np.int32),
    }
    texts = [f.text for f in CORPUS.instantiate().split("train")]
    for row, labels in zip(batch["input_ids"], batch["target_labels"], strict=True):
        assert (row[1:] == labels[:-1]).all()
        if (row < 256).all():
            assert any(row.astype(np.uint8).tobytes() in text for text in texts)


def test_tokens_of_a_large_corpus_are_not_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    want = ids(batches(make().source, 3))
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 1000)
    for _ in range(2):
        assert ids(batches(make().source, 3)) == want
        assert len([*(tmp_path / "weft/tokens").glob("*[!k]")]) == 1
    # Other files have other tokens, and so has the other part.
    make(corpus=CORPUS.clone(pattern="[c-d]*.py"))
    make(split="held_out")
    assert len([*(tmp_path / "weft/tokens").glob("*[!k]")]) == 3


def test_each_pass_reshuffles_all_sequences():
    files = tuple(TextFile(f"{i + 3}.py", bytes([i]) * 63) for i in range(12))
    source = make(corpus=Corpus("twelve", files, held_out_fraction=0.0)).source
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


def test_resumes_exactly_with_prefetch():
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
    corpus = Corpus("short", (TextFile("3.py", b"x" * 200),), held_out_fraction=0.0)
    with pytest.raises(EmptyCorpusError, match=r"'train' part of .*'short'.* has 3 sequences"):
        make(corpus=corpus)


def test_batch_indivisible_by_processes():
    with pytest.raises(InputDispatchError, match=r"global_batch_size=8 does not divide over 3"):
        make().source(DispatchConfig(0, 3))


class TestDocuments:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name, letters in {"a": "abcd", "b": "vwxyz"}.items():
            lines = (json.dumps({"text": letter * 15, "body": "-" * 15}) for letter in letters)
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")

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

    def test_mixture_by_weights(self, folder):
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

    def test_tokenizer_defines_tokens_and_their_bytes(self, folder):
        class Threes:
            eos_id, pad_id, vocab_size = 0, 1, 200
            token_num_bytes = np.where(np.arange(200) > 1, 3, 0)

            def encode(self, text):
                return np.frombuffer(text.encode(), np.uint8)[::3].astype(np.int32)

            def decode(self, ids):
                return "".join(3 * chr(i) for i in ids)

        source = self.make(tokenizer=Threes(), is_training=False, sequence_length=6).source
        found = batches(source)
        assert [b["target_num_bytes"].sum() for b in found] == [60, 60, 15]
        assert found[0]["input_ids"][0].tolist() == [0, *[ord("a")] * 5]


EOS, PAD, LENGTH = 900, 901, 4


def sequences(first, n):
    """Returns `n` sequences identified by their first token."""
    documents = [np.full(LENGTH - 1, first + i) for i in range(n)]
    stream = token_stream(documents, eos_id=EOS)
    return PackedSequences(stream, sequence_length=LENGTH, eos_id=EOS, pad_id=PAD)


SOURCES = [sequences(0, 12), sequences(100, 12), sequences(200, 20)]


def make_mixture(sources=SOURCES, **kwargs):
    kwargs = {"global_batch_size": 8, "is_training": True, "seed": 3} | kwargs
    return sequence_batches(sources, **kwargs)


def names(batch):
    return batch["input_ids"][:, 1].tolist()


def take(it, n):
    return [names(next(it)) for _ in range(n)]


def flat(lists):
    return [name for one in lists for name in one]


def open_(source, index=0, num=1):
    return iter(source(DispatchConfig(index, num)))


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0]], ids=["sizes", "weights"])
def test_resuming_on_other_process_counts_keeps_global_batches(weights):
    source = make_mixture(weights=weights)
    want = take(open_(source), 12)
    one = open_(source)
    seen = take(one, 4)
    state = json.loads(json.dumps(one.get_state()))
    two = [open_(source, i, 2) for i in range(2)]
    for it in two:
        it.set_state(state)
    seen += [a + b for a, b in zip(*(take(it, 4) for it in two), strict=True)]
    states = [it.get_state() for it in two]
    assert states[0] == states[1] == {"next_index": 8}
    again = open_(source)
    again.set_state(states[1])
    assert seen + take(again, 4) == want


def test_mixture_keeps_proportions_and_source_passes():
    rows = flat(take(open_(make_mixture(weights=[1.0, 1.0, 2.0])), 24))
    by_source = [[r for r in rows if r // 100 == i] for i in range(3)]
    assert [len(part) for part in by_source] == [48, 48, 96]
    for part, source in zip(by_source, SOURCES, strict=True):
        n = len(source)
        passes = [part[i : i + n] for i in range(0, len(part) - n + 1, n)]
        assert all(len(set(one)) == n for one in passes)
        assert passes[0] != passes[1]
    # Sources of equal size are shuffled differently.
    assert by_source[0][:12] != [r - 100 for r in by_source[1][:12]]


def test_evaluation_reads_all_once_in_order():
    source = make_mixture(global_batch_size=4, is_training=False)
    rows = flat(names(batch) for batch in open_(source))
    assert rows == [*range(12), *range(100, 112), *range(200, 220)]


def test_mixture_rows_match_their_sources():
    batch = next(open_(make_mixture(weights=[1.0, 1.0, 1.0])))
    for row, name in enumerate(names(batch)):
        example = SOURCES[name // 100][name % 100]
        for key, value in example.items():
            np.testing.assert_array_equal(batch[key][row], value)


def test_invalid_weights():
    with pytest.raises(InputDatasetError, match=r"3 sources cannot be mixed with weights=\[1\.0\]"):
        make_mixture(weights=[1.0])
    with pytest.raises(InputDatasetError, match=r"weights=\[1\.0, 0\.0, 1\.0\]; pass one positive"):
        open_(make_mixture(weights=[1.0, 0.0, 1.0]))


TEXTS = ["abcdefghij"[: 1 + i % 10] * (1 + i % 3) for i in range(37)]
DOCUMENTS = grain.MapDataset.source([{"text": text} for text in TEXTS])
STREAM_EOS, STREAM_PAD = 256, 257


def make_stream(**kwargs):
    defaults = {"documents": DOCUMENTS, "sequence_length": 32, "global_batch_size": 4}
    return lm_stream_source(**(defaults | {"is_training": True} | kwargs))


def stream_batches(source, n=None, index=0, num=1, state=None):
    it = iter(source(DispatchConfig(index, num)))
    if state is not None:
        it.set_state(json.loads(json.dumps(state)))
    found = []
    while n is None or len(found) < n:
        batch = next(it, None)
        if batch is None:
            break
        found.append(batch)
    state = it.get_state()
    it.close()
    return found, state


def documents_of(found):
    """Returns the documents as the targets show them, those that were cut in their pieces."""
    texts = []
    for batch in found:
        for inputs, targets, segments in zip(
            batch["input_ids"], batch["target_labels"], batch["input_segment_ids"], strict=True
        ):
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                # Inputs are the targets one step earlier.
                assert (inputs[here][1:] == targets[here][:-1]).all()
                texts.append(bytes(t for t in targets[here].tolist() if t < STREAM_EOS).decode())
    return texts


@pytest.mark.parametrize("split_documents", [True, False], ids=["cut", "whole"])
def test_evaluation_has_each_document_once(split_documents):
    found, _ = stream_batches(make_stream(is_training=False, split_documents=split_documents))
    texts = documents_of(found)
    assert "".join(texts) == "".join(TEXTS) if split_documents else sorted(texts) == sorted(TEXTS)
    assert sum(int(b["target_num_bytes"].sum()) for b in found) == sum(map(len, TEXTS))
    last = {name: values[-1] for name, values in found[-1].items()}
    assert (last["input_ids"] == STREAM_PAD).all()
    assert (last["target_labels"] == STREAM_PAD).all()
    assert not last["input_segment_ids"].any()
    shapes = {name: (v.shape, v.dtype) for name, v in found[0].items()}
    assert shapes == {
        "input_ids": ((4, 32), np.int32),
        "target_labels": ((4, 32), np.int32),
        "live_targets": ((4, 32), bool),
        "target_num_bytes": ((4,), np.int32),
        "input_segment_ids": ((4, 32), np.int32),
        "input_positions": ((4, 32), np.int32),
    }


@pytest.mark.parametrize("split_documents", [True, False], ids=["cut", "whole"])
def test_resuming_an_evaluation_on_other_process_counts_keeps_batches(split_documents):
    source = make_stream(split_documents=split_documents, is_training=False)
    want, end = stream_batches(source, 4)
    first, state = stream_batches(source, 1)
    halves = [stream_batches(source, 2, index=i, num=2, state=state) for i in range(2)]
    assert halves[0][1] == halves[1][1]
    middle = [
        {name: np.concatenate([a[name], b[name]]) for name in a}
        for a, b in zip(halves[0][0], halves[1][0], strict=True)
    ]
    last, state = stream_batches(source, 1, state=halves[0][1])
    for got, expected in zip(first + middle + last, want, strict=True):
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
    assert state == end
    # Its size does not grow.
    assert len(json.dumps(state)) < 250


class CountedBytes(ByteTokenizer):
    num_encoded = 0

    def encode(self, text):
        CountedBytes.num_encoded += 1
        return super().encode(text)


@pytest.mark.parametrize("is_large", [False, True])
def test_evaluations_of_two_processes_tokenize_documents_once(tmp_path, monkeypatch, is_large):
    """Each process tokenized and packed all documents, in each evaluation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(CountedBytes, "num_encoded", 0)
    if is_large:
        monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    named = {}
    for name, texts in (("a", TEXTS[:20]), ("b", TEXTS[20:])):
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        named[name] = json_lines_dataset(str(tmp_path / f"{name}.jsonl"))
    options = {"documents": named, "tokenizer": CountedBytes(), "is_training": False}
    halves = []
    for index in range(2):
        source = make_stream(**options)  # of another process
        for _ in range(2):
            found, _ = stream_batches(source, index=index, num=2)
        halves.append(found)
    assert CountedBytes.num_encoded == len(TEXTS) * (1 if is_large else 2)
    want, _ = stream_batches(make_stream(is_training=False))
    for first, second, whole in zip(*halves, want, strict=True):
        assert first.keys() == second.keys() == whole.keys()
        for name, expected in whole.items():
            both = np.concatenate([first[name], second[name]])
            np.testing.assert_array_equal(both, expected)
            assert both.dtype == expected.dtype


def test_order_depends_on_pass_and_seed():
    found = [
        documents_of(stream_batches(make_stream(split_documents=False, seed=s), 9)[0])
        for s in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]
    assert len(found[0]) > len(TEXTS)


def test_errors_name_the_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "good"}\n{"text": "' + "x" * 31 + '"}\n{"words": 1}\n', encoding="utf-8"
    )
    documents = config_for_function(json_lines_dataset).set(paths=str(path))
    source = make_stream(documents=documents, split_documents=False, is_training=False)
    with pytest.raises(InputReadError, match=r"line 2 of .*has 32 tokens .* sequence_length=31; l"):
        stream_batches(make_stream(documents=documents, sequence_length=31, split_documents=False))
    with pytest.raises(InputReadError, match=r"line 3 of \S+a\.jsonl: the record has no 'text'"):
        stream_batches(source)


def test_evaluation_of_an_incomplete_batch():
    with pytest.raises(InputDatasetError, match=r"has 44 sequences, which is not a multiple of a"):
        make_mixture(is_training=False)
    assert len(batches(make_mixture(is_training=False, global_batch_size=11))) == 4


def test_no_documents():
    with pytest.raises(EmptyCorpusError, match=r"^documents has no documents; pass files"):
        make_stream(documents=grain.MapDataset.source([]))
