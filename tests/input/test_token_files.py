import json

import grain
import numpy as np
import pytest

from weft.errors import EmptyCorpusError, InputReadError
from weft.input import file_cache, token_files
from weft.input.files import json_lines_dataset
from weft.input.token_files import document_text, tokens_of_documents
from weft.input.tokenizer import ByteTokenizer


class Words:
    """A word is its length; refuses `bad`."""

    eos_id, pad_id, fingerprint = 0, 99, "words"
    calls = 0

    def __init__(self, vocab_size=100):
        self.vocab_size = vocab_size
        self.token_num_bytes = np.arange(vocab_size)

    def encode(self, text):
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        type(self).calls += 1
        if any("bad" in text for text in texts):
            raise ValueError("no such word")
        return [np.array([len(word) for word in text.split()], np.int32) for text in texts]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Words.calls = 0
    return tmp_path


@pytest.mark.parametrize("batch", [1, 10, 10**6])
def test_documents_in_one_line_however_many_are_tokenized_at_once(monkeypatch, batch):
    monkeypatch.setattr(token_files, "_BATCH_CHARACTERS", batch)
    documents = grain.MapDataset.source([{"text": t} for t in ("a bb", "", "ccc", "dd e")])
    tokens = tokens_of_documents(documents, Words())
    assert tokens.tolist() == [0, 1, 2, 0, 0, 3, 0, 2, 1, 0]
    assert tokens.dtype == np.uint16
    assert tokens_of_documents(documents, Words(70_000)).dtype == np.uint32


def test_records_that_were_filtered_out_are_passed_over():
    documents = grain.MapDataset.source([{"text": t} for t in ("a", "bb", "c")])
    kept = documents.filter(lambda d: d["text"] != "bb")
    assert tokens_of_documents(kept, ByteTokenizer()).tolist() == [256, 97, 256, 99, 256]


def test_the_tokens_of_large_files_are_kept(folder, monkeypatch):
    monkeypatch.setattr(file_cache, "SMALL", 0)
    for text, calls in (("one three", 1), ("one three", 1), ("other", 2)):
        if calls > Words.calls:
            (folder / "a.jsonl").write_text(json.dumps({"text": text}))
        tokens = tokens_of_documents(json_lines_dataset("a.jsonl"), Words())
        assert tokens.tolist() == [0, *map(len, text.split()), 0]
        assert Words.calls == calls
    # What is mapped is not known, so it is tokenized each time.
    mapped = json_lines_dataset("a.jsonl").map(lambda d: {"text": "a"})
    for _ in range(2):
        assert tokens_of_documents(mapped, Words()).tolist() == [0, 1, 0]
    assert Words.calls == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a bad word"}', r"line 2 of a\.jsonl cannot be tokenized: ValueError: no such"),
        (
            '{"words": 1, "id": 2}',
            r"line 2 of a\.jsonl: .*no 'text', it has \['id', 'words'\]; set",
        ),
        ('{"text": [1]}', r"line 2 of a\.jsonl: 'text' of the record is of type list; expected a"),
        ("[1]", r"line 2 of a\.jsonl: the record is of type list; expected a dict with 'text'"),
        ('{"text": 1', r"a\.jsonl, line 2, column 11: Expecting"),
    ],
    ids=["tokenizer", "key", "type", "list", "json"],
)
def test_a_document_that_cannot_be_used_is_named(folder, line, message):
    (folder / "a.jsonl").write_text('{"text": "good"}\n' + line + '\n{"text": "good"}')
    with pytest.raises(InputReadError, match=message):
        tokens_of_documents(json_lines_dataset("a.jsonl"), Words())


def test_a_document_of_another_dataset_is_named_by_its_number():
    documents = grain.MapDataset.source([{"text": "a"}, {"text": "bad"}])
    with pytest.raises(InputReadError, match=r"^record 1 of \w*Dataset.* cannot be tokenized"):
        tokens_of_documents(documents, Words())


def test_no_documents(folder):
    (folder / "a.jsonl").touch()
    with pytest.raises(
        EmptyCorpusError, match=r"\(0 records in 1 files\)\) has no documents; pass"
    ):
        tokens_of_documents(json_lines_dataset("a.jsonl"), Words())


def test_text_is_a_string_or_bytes():
    assert document_text({"t": b"x"}, "t") == b"x"
    assert document_text({"t": "x"}, "t") == "x"
