import json
import os
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.input import tokenizer_kinds
from weft.errors import MissingExtraError, TokenizerError
from weft.input.grain_text import with_regex_mapping
from weft.input.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    as_tokenizer,
    encode_prompt,
    parses_special,
    text_num_bytes,
)


@settings(deadline=None, max_examples=25)
@given(st.text())
def test_every_text_round_trips(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_partial_character_decodes():
    assert ByteTokenizer().decode([104, 195]) == "h\ufffd"


TEXT = "Héllo wörld, one two three\n 漢字  two"
LINES = ["one two three", "Héllo wörld", "two one", "three two one"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def bpe(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # As a tokenizer of a model of limited length is saved.
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def pieces(folder):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra text")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(folder / "pieces"),
        vocab_size=290,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    return str(folder / "pieces.model")


def check(tokenizer):
    """Checks properties of every lossless tokenizer."""
    ids = tokenizer.encode(TEXT)
    assert (ids.dtype, ids.ndim) == (np.int32, 1)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([tokenizer.eos_id, *ids, tokenizer.pad_id]) == TEXT
    np.testing.assert_array_equal(tokenizer.encode(TEXT.encode()), ids)
    for one, text in zip(tokenizer.encode_batch(["two", "", TEXT]), ["two", "", TEXT], strict=True):
        np.testing.assert_array_equal(one, tokenizer.encode(text))
    assert len(tokenizer.token_num_bytes) == tokenizer.vocab_size
    assert tokenizer.token_num_bytes[ids].sum() == len(TEXT.encode())
    assert not tokenizer.token_num_bytes[[tokenizer.eos_id, tokenizer.pad_id]].any()
    assert max(tokenizer.eos_id, tokenizer.pad_id, *ids) < tokenizer.vocab_size
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    np.testing.assert_array_equal(copy.encode(TEXT), ids)


def test_hugging_face(bpe):
    tokenizer = HuggingFaceTokenizer(bpe, eos_token="<|end|>", pad_token="<|pad|>")
    check(tokenizer)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (0, 1)
    assert repr(tokenizer) == f"HuggingFaceTokenizer({bpe!r}, {tokenizer.vocab_size} tokens)"


HOLES = {"a": 0, "b": 1, "c": 2, "d": 7}


def test_ids_with_holes(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra text")
    tokenizer = HuggingFaceTokenizer(tokenizer_kinds.with_holes(tmp_path / "tokenizer.json", HOLES))
    assert tokenizer.encode("dab").tolist() == [7, 0, 1]
    # New ids are those of no token.
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (8, 9, 10)
    assert tokenizer.token_num_bytes.tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    assert tokenizer.decode([8, 7, 0, 5, 1, 9]) == "dab"
    assert text_num_bytes(tokenizer, "dab", tokenizer.encode("dab")).tolist() == [1, 1, 1]
    named = HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"), eos_token="d")
    assert (named.eos_id, named.pad_id, named.vocab_size) == (7, 8, 9)


def test_added_tokens_after_a_hole(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    path = tmp_path / "tokenizer.json"
    tokenizer_kinds.with_holes(path, HOLES)
    added = tokenizers.Tokenizer.from_file(str(path))
    added.add_special_tokens(["<|end|>"])
    content = json.loads(added.to_str())
    content["added_tokens"][0]["id"] = 20
    path.write_text(json.dumps(content), encoding="utf-8")
    tokenizer = HuggingFaceTokenizer(str(path), eos_token="<|end|>")
    found = tokenizers.Tokenizer.from_file(str(path)).token_to_id("<|end|>")
    assert (tokenizer.eos_id, tokenizer.pad_id) == (found, max(found, 7) + 1)
    assert tokenizer.vocab_size == len(tokenizer.token_num_bytes) == tokenizer.pad_id + 1


def test_id_that_no_model_has(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra text")
    path = tokenizer_kinds.with_holes(tmp_path / "tokenizer.json", {"a": 0, "b": 2**30})
    with pytest.raises(TokenizerError, match=r"the id 1073741824; expected ids below 16777216"):
        HuggingFaceTokenizer(path)


def test_no_text_spells_a_special_token(bpe):
    tokenizer = HuggingFaceTokenizer(bpe, eos_token="<|end|>")
    ids = tokenizer.encode("one<|end|>two")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "one<|end|>two"


def test_prompts_spell_special_tokens(bpe, pieces):
    tokenizer = HuggingFaceTokenizer(bpe, eos_token="<|end|>")
    text = "one<|end|>two"
    ids = encode_prompt(tokenizer, text)
    assert (ids.dtype, ids.tolist().count(tokenizer.eos_id)) == (np.int32, 1)
    assert tokenizer.decode(ids) == "onetwo"
    np.testing.assert_array_equal(tokenizer.encode(text, parse_special=True), ids)
    # Threads that encode documents are not disturbed.
    assert tokenizer.eos_id not in tokenizer.encode(text)
    spelling = SentencePieceTokenizer(pieces)
    assert spelling.encode("one</s>", parse_special=True)[-1] == spelling.eos_id
    copy = pickle.loads(pickle.dumps(HuggingFaceTokenizer(bpe, special_tokens=["<x>"])))
    assert encode_prompt(copy, "<x>").tolist() == [HuggingFaceTokenizer(bpe)._num_tokens]
    mapped = with_regex_mapping(tokenizer, encode_mapping=[("!", "<|end|>")])
    assert encode_prompt(mapped, "one!two").tolist() == ids.tolist()
    assert tokenizer.eos_id not in mapped.encode("one!two")


def test_prompts_of_tokenizers_without_special_tokens():
    class Letters:
        def encode(self, text):
            return ByteTokenizer().encode(text)

    assert not parses_special(Letters())
    assert encode_prompt(Letters(), "a<|end|>").tolist() == [*b"a<|end|>"]
    assert encode_prompt(ByteTokenizer(), b"a<|end|>").tolist() == [*b"a<|end|>"]


BAD_PROMPTS = [
    (7, "the prompt is of type int; expected a string"),
    ("a\ud800", r"the text has '\\ud800' at 1, half of a surrogate pair, which is not a character"),
    (b"a\xff", "the prompt is not text in UTF-8: byte 1 is 0xff; pass a string, or its bytes"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_bad_prompts(bpe, pieces, prompt, message):
    for tokenizer in (HuggingFaceTokenizer(bpe), SentencePieceTokenizer(pieces)):
        with pytest.raises(TokenizerError, match=message):
            encode_prompt(tokenizer, prompt)


def test_sentencepiece(pieces):
    tokenizer = SentencePieceTokenizer(pieces)
    check(tokenizer)
    # Its own end; it has no padding.
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, tokenizer.vocab_size - 1)
    assert SentencePieceTokenizer(pieces, eos_token="<s>").eos_id == 1


@pytest.mark.parametrize("kind", [HuggingFaceTokenizer, SentencePieceTokenizer])
def test_invalid_tokenizer_files(kind, folder):
    with pytest.raises(TokenizerError, match=r"cannot read the tokenizer gone \(No such file"):
        kind("gone")
    # Numbers are files that are open already; they stay open.
    with pytest.raises(TokenizerError, match="is read from a path, but got 0; pass the path of"):
        kind(0)
    os.fstat(0)
    pytest.importorskip("tokenizers" if kind is HuggingFaceTokenizer else "sentencepiece")
    (folder / "text").write_text("no tokenizer", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"text is not (a|an) [\w. ]+: \w+Error: .*; pass the"):
        kind(str(folder / "text"))


def test_missing_tokens(bpe, pieces):
    with pytest.raises(TokenizerError, match=r"no token '</s>' to be the eos_token; it has '<\|en"):
        HuggingFaceTokenizer(bpe, eos_token="</s>")
    with pytest.raises(TokenizerError, match=r"no token '<p>' to be the pad_token; it has '<unk>'"):
        SentencePieceTokenizer(pieces, pad_token="<p>")


@pytest.mark.parametrize(
    ("kind", "package"),
    [(HuggingFaceTokenizer, "tokenizers"), (SentencePieceTokenizer, "sentencepiece")],
)
def test_without_the_package(kind, package, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (folder / "any").touch()
    with pytest.raises(MissingExtraError, match=rf"needs the package {package}.*weft-jax\[text\]"):
        kind(str(folder / "any"))


def test_path_of_a_file_is_a_tokenizer(bpe):
    assert as_tokenizer(bpe).fingerprint == HuggingFaceTokenizer(bpe).fingerprint
    with pytest.raises(TokenizerError, match=r"'tokens\.txt' is not the path of a tokenizer; pass"):
        as_tokenizer("tokens.txt")
