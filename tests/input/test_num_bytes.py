"""Bytes of the texts of tokens, for tokenizers of every kind."""

import functools

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.input import tokenizer_kinds
from weft.input.datasets import json_lines_dataset
from weft.input.grain import DispatchConfig
from weft.input.grain_lm import (
    streaming_packing,
    text_to_lm_eval_input,
    text_to_lm_training_input,
)
from weft.input.grain_text import num_bytes, tokenize_turns
from weft.input.text import lm_documents_source, lm_stream_source
from weft.input.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    text_num_bytes,
)

KINDS = [*tokenizer_kinds.HUGGING_FACE, *tokenizer_kinds.SENTENCE_PIECE]
WORDS = ["one", "two", "three", "Héllo", " ", "  ", "    ", "\n", "don't", ",", "漢", "x", "é"]
texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    pytest.importorskip("tokenizers", reason="needs the extra text")
    pytest.importorskip("sentencepiece", reason="needs the extra text")
    folder = tmp_path_factory.mktemp("kinds")

    @functools.cache
    def get(kind):
        if kind in tokenizer_kinds.HUGGING_FACE:
            path = str(folder / f"{kind}.json")
            tokenizer_kinds.HUGGING_FACE[kind]().save(path)
            return HuggingFaceTokenizer(path, eos_token="<|end|>")
        options = tokenizer_kinds.SENTENCE_PIECE[kind]
        return SentencePieceTokenizer(tokenizer_kinds.train_pieces(folder / kind, **options))

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_tokens_of_a_text_add_up_to_it(load, kind):
    tokenizer = load(kind)

    @settings(deadline=None, max_examples=60)
    @given(texts)
    def check(text):
        ids = tokenizer.encode(text)
        sizes = text_num_bytes(tokenizer, text, ids)
        is_lossless = tokenizer.decode(ids) in (text, f" {text}")
        assert (sizes is not None) == is_lossless
        if sizes is not None:
            assert len(sizes) == len(ids)
            assert (sizes >= 0).all()
            assert sizes.sum() == len(text.encode())

    check()


# A text that each kind decodes, and the bytes of its tokens.
@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [
        ("byte level", "one        two", [3, 8, 3]),
        ("byte level with a prefix", "one two", [3, 4]),
        ("word ends", "one two", [4, 3]),
        ("word pieces", "one, two", [3, 1, 4]),
        ("byte fallback", "one 漢", [3, 1, 1, 1, 1]),
        ("words", "one two", [3, 4]),
    ],
)
def test_bytes_of_each_token(load, kind, text, want):
    tokenizer = load(kind)
    sizes = text_num_bytes(tokenizer, text, tokenizer.encode(text))
    assert sizes.sum() == len(text.encode())
    assert np.abs(np.cumsum(sizes) - np.cumsum(want)).max() <= 1
    ids = tokenizer.encode(text)
    assert num_bytes(ids, vocab=tokenizer) == len(tokenizer.decode(ids).encode())


DOCUMENTS = ["one two three", "two one", "", "three three three one", "one"]


def batches_of(source):
    return list(source(DispatchConfig(0, 1)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lower case"])
def test_examples_of_every_input_add_up_to_the_documents(load, kind):
    tokenizer = load(kind)
    total = sum(len(text.encode()) for text in DOCUMENTS)
    documents = grain.MapDataset.source([{"text": text} for text in DOCUMENTS])
    options = {"documents": documents, "tokenizer": tokenizer, "sequence_length": 4}
    options |= {"global_batch_size": 2, "is_training": False}
    found = {
        "documents": batches_of(lm_documents_source(**options)),
        "stream": batches_of(lm_stream_source(**options)),
        "windows": list(text_to_lm_training_input(documents, vocab=tokenizer, max_len=4)),
        "whole": list(
            text_to_lm_training_input(documents, vocab=tokenizer, max_len=4, window_size=None)
        ),
        "strided": list(text_to_lm_eval_input(documents, vocab=tokenizer, max_len=4, stride=2)),
    }
    turns = documents.map(lambda one: {"prompt": "two", "response": one["text"]})
    turns = tokenize_turns(turns, vocab=tokenizer)
    found["turns"] = list(streaming_packing(turns, vocab=tokenizer, max_len=4))
    for name, examples in found.items():
        sizes = np.concatenate([np.atleast_1d(one["target_num_bytes"]) for one in examples])
        assert (sizes >= 0).all(), name
        assert sizes.sum() == total, name


def test_newlines_that_are_replaced_are_one_byte_each(load):
    ds = grain.MapDataset.source([{"text": "a\nb\n\nc"}, {"text": "\n\n\n\n"}])
    for vocab in (ByteTokenizer(), load("byte level")):
        for length in (3, 8):
            kwargs = {"vocab": vocab, "max_len": length, "replace_newlines_with": "<n>"}
            for make in (text_to_lm_training_input, text_to_lm_eval_input):
                sizes = [int(one["target_num_bytes"]) for one in make(ds, **kwargs)]
                assert min(sizes) >= 0
                assert sum(sizes) == 10


def test_text_that_is_lost_has_no_figure(load, caplog, tmp_path):
    load("lower case")
    tokenizer_kinds.lower_case().save(str(tmp_path / "lower.json"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "lower.json"))
    documents = grain.MapDataset.source([{"text": "one"}, {"text": "Hello"}])
    options = {"documents": documents, "tokenizer": tokenizer, "sequence_length": 4}
    options |= {"global_batch_size": 2, "is_training": False}
    for _ in range(2):
        found = batches_of(lm_documents_source(**options))
        assert all("target_num_bytes" not in batch for batch in found)
    (message,) = [m for m in caplog.messages if "does not decode" in m]
    assert "it encodes 'Hello' and decodes 'hello'. Bits per byte are not reported" in message
    mixed = {"a": documents, "b": grain.MapDataset.source([{"text": "two"}] * 2)}
    found = batches_of(lm_documents_source(**options | {"documents": mixed}))
    assert all("target_num_bytes" not in batch for batch in found)
    # Features of a stream are known before its texts.
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "Hello"}', encoding="utf-8")
    for records in (documents, json_lines_dataset(str(tmp_path / "a.jsonl"))):
        found = batches_of(lm_stream_source(**options | {"documents": records}))
        assert min(int(batch["target_num_bytes"].min()) for batch in found) == -1
    windows = text_to_lm_training_input(documents, vocab=tokenizer, max_len=4)
    assert {int(one["target_num_bytes"]) for one in windows} == {-1}
