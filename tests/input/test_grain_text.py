import re

import grain
import numpy as np
import pytest

from weft.config import config_for_class, config_for_function
from weft.errors import InputDatasetError
from weft.input.chat import ChatTemplate
from weft.input.grain_text import (
    count_num_bytes,
    num_bytes,
    tokenize,
    tokenize_turns,
    with_regex_mapping,
)
from weft.input.tokenizers import ByteTokenizer, SentencePieceTokenizer

VOCAB = ByteTokenizer()
EOS, PAD = VOCAB.eos_id, VOCAB.pad_id


def first(fn, record, **kwargs):
    return fn(grain.MapDataset.source([record]), **kwargs)[0]


def test_tokenize_replaces_only_the_named_fields():
    vocab = {"q": config_for_class(ByteTokenizer), "a": VOCAB}
    example = first(tokenize, {"q": "é", "a": b"b", "id": "c"}, vocab=vocab, with_eos=True)
    assert example["q"].tolist() == [0xC3, 0xA9, EOS]
    assert example["a"].tolist() == [98, EOS]
    assert example["id"] == "c"
    assert example["q"].dtype == np.int32


def test_tokenize_without_the_field():
    with pytest.raises(
        InputDatasetError, match=r"no 'text', it has \['q'\]; name one of .* in vocab"
    ):
        first(tokenize, {"q": "a"}, vocab={"text": VOCAB})


def test_bytes_of_ids_by_hand():
    ids = [*b"a<n>b<n>", EOS, PAD, -1]
    assert num_bytes(ids, vocab=VOCAB) == 8
    assert num_bytes(ids, vocab=VOCAB, newlines_replaced_with="<n>") == 4
    assert num_bytes(ids, vocab=VOCAB, newlines_replaced_with="\n") == 8
    assert num_bytes([], vocab=VOCAB) == 0
    kwargs = {"input_key": "ids", "output_key": "n", "newlines_replaced_with": "<n>"}
    example = first(count_num_bytes, {"ids": ids}, vocab=VOCAB, **kwargs)
    assert (example["n"], example["n"].dtype, example["ids"]) == (4, np.int32, ids)


def test_newline_of_a_trained_vocabulary_is_one_byte(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra text")
    lines = ["a dark night", "a fine day", "one line and another line"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "pieces"),
        vocab_size=40,
        user_defined_symbols=["<n>"],
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    vocab = SentencePieceTokenizer(str(tmp_path / "pieces.model"))
    text = "a day\n\none line\n"
    ids = with_regex_mapping(vocab, encode_mapping=[("\n", "<n>")]).encode(text)
    assert vocab.decode(ids) == text.replace("\n", "<n>")
    ids = np.append(ids, vocab.eos_id)
    assert num_bytes(ids, vocab=vocab, newlines_replaced_with="<n>") == len(text)


def test_regular_expressions_apply_in_order():
    vocab = config_for_function(with_regex_mapping).set(
        vocab=VOCAB,
        encode_mapping=[(r"\s+", "_"), (r"_(\d)", r"#\1")],
        decode_mapping=[("#", " "), ("_", " ")],
    )
    mapped = vocab.instantiate()
    ids = mapped.encode(b"a  1\nb")
    assert bytes(ids.tolist()) == b"a#1_b"
    assert mapped.decode([*ids, EOS]) == "a 1 b"
    assert (mapped.eos_id, mapped.pad_id, mapped.vocab_size) == (EOS, PAD, 258)
    assert first(tokenize, {"text": "a \n"}, vocab={"text": vocab})["text"].tolist() == [97, 95]


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "c"},
]


def text_of(ids, masked="."):
    names = {EOS: "|", PAD: masked}
    return "".join(names.get(i, chr(i)) for i in ids.tolist())


def test_only_turns_of_the_assistant_are_targets():
    example = first(tokenize_turns, {"messages": CONVERSATION}, vocab=VOCAB)
    assert text_of(example["input_ids"]) == "|S\nq\nab|r\nc"
    assert text_of(example["target_labels"]) == "....ab|..c|"
    assert example["live_targets"].tolist() == [c != "." for c in "....ab|..c|"]
    assert example["target_num_bytes"].tolist() == [int(c in "abc") for c in "....ab|..c|"]
    assert {name: x.dtype for name, x in example.items()} == {
        "input_ids": np.int32,
        "target_labels": np.int32,
        "live_targets": bool,
        "target_num_bytes": np.int32,
    }


def test_chat_templates():
    source = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    template = config_for_class(ChatTemplate).set(source=source)
    rows = [
        {"messages": CONVERSATION[1:3]},
        {"prompt": "q", "completion": "ab"},
        {"prompt": "q", "response": "ab"},
    ]
    for row in rows:
        example = first(tokenize_turns, row, vocab=VOCAB, template=template)
        assert text_of(example["input_ids"]) == "u:q;a:ab"
        assert text_of(example["target_labels"]) == ".....ab;"
        assert example["live_targets"].tolist() == [c != "." for c in ".....ab;"]
        assert example["target_num_bytes"].tolist() == [0] * 5 + [1] * 3
        assert {name: x.dtype for name, x in example.items()} == {
            "input_ids": np.int32,
            "target_labels": np.int32,
            "live_targets": bool,
            "target_num_bytes": np.int32,
        }
    with pytest.raises(
        InputDatasetError, match="leave out add_bos, templates and learned_role, or"
    ):
        first(tokenize_turns, {}, vocab=VOCAB, template=template, learned_role="user")


def test_templates_of_turns():
    templates = {"user": "U:{content} ", "assistant": "A:{content};", "system": "{content}"}
    kwargs = {"vocab": VOCAB, "templates": templates}
    example = first(tokenize_turns, {"prompt": "q", "response": "ab"}, **kwargs)
    assert text_of(example["input_ids"]) == "|U:q A:ab;"
    assert text_of(example["target_labels"]) == "......ab;|"
    other = first(tokenize_turns, {"messages": CONVERSATION[1:3]}, learned_role="user", **kwargs)
    assert text_of(other["target_labels"]) == "..q |....."


@pytest.mark.parametrize(
    "record",
    [
        {"text": "a"},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"prompt": "a"},
        {"prompt": 1, "response": "b"},
    ],
    ids=str,
)
def test_example_without_a_conversation(record):
    named = rf"the example, with {re.escape(str(sorted(record)))}, has no conversation; expected"
    with pytest.raises(InputDatasetError, match=named):
        first(tokenize_turns, record, vocab=VOCAB)


def test_unknown_role():
    record = {"messages": [{"role": "asistant", "content": "a"}]}
    with pytest.raises(InputDatasetError, match=r"role 'asistant'.*Did you mean 'assistant'\?"):
        first(tokenize_turns, record, vocab=VOCAB)


def test_template_without_content():
    with pytest.raises(InputDatasetError, match=r"template 'Q' of the role 'user' does not have"):
        first(tokenize_turns, {}, vocab=VOCAB, templates={"user": "Q"})
